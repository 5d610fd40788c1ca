"""What every command is made of: click's own, plus examples, documented exit codes and options under headings.

Help pages and manual pages are two walks over the same objects, so nothing is said twice. The docstring of a
command's function is its description: paragraphs, the first of which is one sentence.
"""

import difflib
import importlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from .errors import ExitCode
from .options import CONNECTION_OPTIONS, OTHER_OPTIONS


def sections(ctx: click.Context, command: click.Command) -> dict[str, list[click.Option]]:
    """The visible options of a command by heading, in the order in which they were declared."""
    found: dict[str, list[click.Option]] = {}
    for param in command.get_params(ctx):
        if isinstance(param, click.Option) and not param.hidden:
            found.setdefault(getattr(param, "section", OTHER_OPTIONS), []).append(param)
    # What every command has belongs last, -h most of all, wherever these options stand.
    for title in (CONNECTION_OPTIONS, OTHER_OPTIONS):
        if title in found:
            found[title] = found.pop(title)
    return found


class DocumentedCommand(click.Command):
    """A command with examples and exit codes in its help.

    Args:
        examples: Command lines that users may paste, by what they do. At least one; a test insists.
        exits: What each exit code means here; those may be left out that all commands share, or
            all that connect to a broker.
        notes: Titled paragraphs about things a user has to know, shown after the options.
    """

    def __init__(
        self,
        *args: Any,
        examples: Mapping[str, str] | None = None,
        exits: Mapping[ExitCode, str] | None = None,
        notes: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault(
            "context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        )
        super().__init__(*args, **kwargs)
        self.examples = dict(examples or {})
        shared = [ExitCode.OK, ExitCode.FAILURE, ExitCode.USAGE, ExitCode.INTERRUPTED, ExitCode.TERMINATED]
        if any(getattr(param, "section", None) == CONNECTION_OPTIONS for param in self.params):
            shared.append(ExitCode.UNREACHABLE)
        meanings = {code: code.meaning for code in shared} | dict(exits or {})
        self.exits = dict(sorted(meanings.items()))
        self.notes = dict(notes or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but do not forget silently that an option had other values before its last."""
        if not ctx.resilient_parsing:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
            for param in dict.fromkeys(given):
                if (count := given.count(param)) > 1 and _takes_one_value(param):
                    names = " / ".join([*param.opts, *param.secondary_opts])
                    self.report_repeated(ctx, f"{names} is given {count} times")
        return super().parse_args(ctx, args)

    def report_repeated(self, ctx: click.Context, text: str) -> None:
        """Raises UsageError: an option that takes one value has several, as the text says."""
        raise click.UsageError(f"{text}, and takes one value.", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading, and the subcommands of a group."""
        for title, options in sections(ctx, self).items():
            rows = [record for param in options if (record := param.get_help_record(ctx))]
            with formatter.section(title):
                formatter.write_dl(rows)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write notes, examples and exit codes."""
        for title, text in self.notes.items():
            with formatter.section(title):
                _write_text(formatter, text)
        with formatter.section("Examples"):
            indent = " " * formatter.current_indent
            # Written as they are: a wrapped command line cannot be pasted.
            formatter.write(
                "\n".join(f"{indent}# {about}\n{indent}{line}\n" for about, line in self.examples.items())
            )
        with formatter.section("Exit status"):
            formatter.write_dl([(str(code.value), text) for code, text in self.exits.items()])


def _takes_one_value(param: click.Parameter) -> bool:
    """Whether a second occurrence would replace the first. A flag that is only ever switched on stays on."""
    if not isinstance(param, click.Option) or param.multiple:
        return False
    return not param.is_flag or bool(param.secondary_opts)


def _write_text(formatter: click.HelpFormatter, text: str) -> None:
    """Write a paragraph. Not click's way, which breaks lines within the names of options."""
    indent = " " * formatter.current_indent
    wrapped = textwrap.fill(
        text,
        formatter.width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    formatter.write(wrapped + "\n")


class DocumentedGroup(DocumentedCommand, click.Group):
    """A group with examples and exit codes in its help; without a subcommand it shows that help."""

    command_class = DocumentedCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, or suggest one that is written alike.

        Not with click's suggestions: it knows none of those that are imported late, and finds much alike.
        """
        name = args[0]
        if not (name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name)):
            near = alike(name, self.list_commands(ctx))
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"No such command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(DocumentedGroup):
    """A group whose subcommands are imported when they are asked for, so that each starts quickly.

    `modules` names the module of each; the module holds it as `command`.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        command = importlib.import_module(self._modules[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


def subcommands(ctx: click.Context) -> Iterator[tuple[click.Context, DocumentedCommand]]:
    """The subcommands of a group, each with its context; imports them. None, if it is no group."""
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            assert isinstance(command, DocumentedCommand)
            yield click.Context(command, info_name=name, parent=ctx, **command.context_settings), command


def contexts_below(ctx: click.Context) -> Iterator[click.Context]:
    """The context of a command, and of every command below it; imports them all."""
    yield ctx
    for below, _ in subcommands(ctx):
        yield from contexts_below(below)


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """What is put behind a sentence about a name that is not known, before its full stop; may be nothing."""
    near = alike(name, names)
    return f" (did you mean {near}?)" if near else ""


def alike(name: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant: one that is written alike, or one that this begins, or is begun by."""
    # Below this, 'rename' is like 'create'.
    if close := difflib.get_close_matches(name, names, 1, cutoff=0.7):
        return close[0]
    # Two letters that changed places weigh too much in a short word.
    if mixed := [each for each in names if sorted(each) == sorted(name)]:
        return mixed[0]
    begun = [each for each in names if len(name) > 1 and (each.startswith(name) or name.startswith(each))]
    return begun[0] if begun else None
