"""The command classes: click's, with examples, documented exit codes and options under headings.

`--help` is short: usage, description, options and some examples. The manual page has the rest: all examples, exit
codes and details. Both are made from the same objects. The docstring of a command's function is its description:
paragraphs, the first of which is one sentence.
"""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from .errors import ExitCode
from .options import CONNECTION_OPTIONS, OTHER_OPTIONS
from .output import write
from .raised_signals import raise_dropped

EXAMPLES_IN_HELP = 4
_UNBROKEN_HYPHEN = "\u2011"

SYNONYMS = {
    "ls": "list",
    "rm": "delete",
    "remove": "delete",
    "add": "create",
    "new": "create",
    "clear": "empty",
    "purge": "empty",
    "show": "settings",
    "get": "settings",
    "cat": "dump",
    "check": "verify",
    "resume": "unpause",
}
"""Words of other tools, and what this one calls it; suggested by the groups that have such a command."""


class Formatter(click.HelpFormatter):
    """Formats help as click does, but breaks no line within the name of an option or a command."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _UNBROKEN_HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        whole = [(term, text.replace("-", _UNBROKEN_HYPHEN)) for term, text in rows]
        super().write_dl(whole, col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_UNBROKEN_HYPHEN, "-")


class Context(click.Context):
    """A context whose help has this formatter."""

    formatter_class = Formatter


def sections(ctx: click.Context, command: click.Command) -> dict[str, list[click.Option]]:
    """Return the visible options of a command by heading, in the order of declaration."""
    found: dict[str, list[click.Option]] = {}
    for param in command.get_params(ctx):
        if isinstance(param, click.Option) and not param.hidden:
            found.setdefault(getattr(param, "section", OTHER_OPTIONS), []).append(param)
    # The options that every command has come last, -h at the very end.
    for title in (CONNECTION_OPTIONS, OTHER_OPTIONS):
        if title in found:
            found[title] = found.pop(title)
    return found


_HELP_NAMES = ("-h", "--help")


class DocumentedCommand(click.Command):
    """A command with examples, exit codes and titled paragraphs.

    Args:
        examples: Command lines that users may paste, by what they do; at least one. `--help` shows the first
            `EXAMPLES_IN_HELP`.
        exits: The meaning of each exit code. Codes that all commands share may be left out, and so may those that all
            commands share that connect to a broker.
        notes: Titled paragraphs that `--help` shows after the options.
        details: Titled paragraphs that only the manual page and the documentation show. A detail replaces the note
            with the same title there.
    """

    context_class = Context

    def __init__(
        self,
        *args: Any,
        examples: Mapping[str, str] | None = None,
        exits: Mapping[ExitCode, str] | None = None,
        notes: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault(
            "context_settings", {"help_option_names": list(_HELP_NAMES), "max_content_width": 100}
        )
        super().__init__(*args, **kwargs)
        self.examples = dict(examples or {})
        shared = [ExitCode.OK, ExitCode.FAILURE, ExitCode.USAGE, ExitCode.INTERRUPTED, ExitCode.TERMINATED]
        if any(getattr(param, "section", None) == CONNECTION_OPTIONS for param in self.params):
            shared.append(ExitCode.UNREACHABLE)
        meanings = {code: code.meaning for code in shared} | dict(exits or {})
        self.exits = dict(sorted(meanings.items()))
        self.notes = dict(notes or {})
        self.details = dict(details or {})

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the same names in every context: click keeps the option that it makes in the first one."""
        return list(_HELP_NAMES)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but say more about repeated options and words after the last argument."""
        if not ctx.resilient_parsing:
            self.typed(ctx, args)
        return super().parse_args(ctx, args)

    def typed(self, ctx: click.Context, args: Sequence[str]) -> dict[str, Any]:
        """Return the texts of a command line by parameter, without those of the environment. Raises UsageError."""
        try:
            found, extra, given = self.make_parser(ctx).parse_args(list(args))
        except click.NoSuchOption as error:
            if error.option_name in ("-y", "--yes"):
                raise click.UsageError(
                    f"No such option {error.option_name!r}: this command asks no question.", ctx
                ) from None
            raise
        for param in dict.fromkeys(given):
            if (count := given.count(param)) > 1 and _takes_one_value(param):
                names = " / ".join([*param.opts, *param.secondary_opts])
                self.report_repeated(ctx, f"{names} is given {count} times")
        wants_help = (shown := self.get_help_option(ctx)) is not None and found.get(shown.name or "")
        if extra and not (ctx.allow_extra_args or wants_help):
            plural = "s" if len(extra) > 1 else ""
            text = f"Got unexpected extra argument{plural} ({' '.join(extra)})."
            raise click.UsageError(f"{text} {self.about_extra(found, extra)}".rstrip(), ctx)
        return found

    def about_extra(self, typed: Mapping[str, Any], extra: Sequence[str]) -> str:
        """Return what to type instead of words after the last argument; empty: nothing is known.

        Args:
            typed: The texts of the command line by parameter.
            extra: The words, at least one.
        """
        for param in self.params:
            topic = typed.get(param.name or "")
            if "/CHANNEL" in (param.metavar or "") and isinstance(topic, str) and "/" not in topic:
                return f"Did you mean {topic}/{extra[0]}?"
        return ""

    def invoke(self, ctx: click.Context) -> Any:
        raise_dropped()
        return super().invoke(ctx)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return click's option, but report what keeps the help from being written, as for other output."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option

    def report_repeated(self, ctx: click.Context, text: str) -> None:
        """Raises UsageError: an option that takes one value has several, as the text says."""
        raise click.UsageError(f"{text}, and takes one value.", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading, those that are only named, and the subcommands of a group."""
        unexplained: list[str] = []
        for title, options in sections(ctx, self).items():
            explained = [param for param in options if not getattr(param, "brief", False)]
            named = ", ".join(param.opts[0] for param in options if param not in explained)
            if not explained:
                unexplained.append(f"{title}: {named}")
                continue
            with formatter.section(title):
                if title == CONNECTION_OPTIONS:
                    compresses = any("--snappy" in param.opts for param in options)
                    what = "TLS, AUTH and compression" if compresses else "TLS and AUTH"
                    formatter.write_text(f"{what}: see 'qcli help connection'.")
                    continue
                formatter.write_dl([record for param in explained if (record := param.get_help_record(ctx))])
                if named:
                    formatter.write_text(f"Also: {named}")
        if unexplained:
            with formatter.section(f"More options, see 'man {manual_page(ctx)}'"):
                for text in unexplained:
                    formatter.write_text(text)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write notes, the first examples, and where to read more."""
        for title, text in self.notes.items():
            with formatter.section(title):
                formatter.write_text(text)
        with formatter.section("Examples"):
            indent = " " * formatter.current_indent
            # Not wrapped: users paste these lines.
            for about, line in list(self.examples.items())[:EXAMPLES_IN_HELP]:
                formatter.write(f"{indent}# {about}\n{indent}{line}\n")
        formatter.write(f"\nMore: man {manual_page(ctx)}\n")


def _takes_one_value(param: click.Parameter) -> bool:
    """Return whether a second occurrence would replace the first. A flag without a negative form stays on."""
    if not isinstance(param, click.Option) or param.multiple:
        return False
    return not param.is_flag or bool(param.secondary_opts)


def manual_page(ctx: click.Context) -> str:
    """Return the name of the manual page of a command; a subcommand is on the page of its group."""
    return "-".join(ctx.command_path.split()[:2])


def _show_help(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        write(ctx.get_help() + "\n")
        ctx.exit()


class DocumentedGroup(DocumentedCommand, click.Group):
    """A group of commands; without a subcommand it shows its help.

    Args:
        synonyms: What users of other tools may type, and the command to suggest for it, besides `SYNONYMS`.
    """

    command_class = DocumentedCommand

    def __init__(self, *args: Any, synonyms: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._synonyms = dict(synonyms or {})

    def suggestion(self, ctx: click.Context, name: str) -> str | None:
        """Return the subcommand that was probably meant by an unknown name."""
        names = self.list_commands(ctx)
        known = {word: meant for word, meant in SYNONYMS.items() if meant in names} | self._synonyms
        return known.get(name) or alike(name, names)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, or suggest one with a similar name.

        click's own suggestions would not include commands that are imported late, and match too loosely.
        """
        name = args[0]
        if not (name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name)):
            near = self.suggestion(ctx, name)
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"No such command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(DocumentedGroup):
    """A group that imports a subcommand when it is used, so that each starts quickly.

    `modules` has the module of each subcommand; the subcommand is the module's `command`.
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
    """Yield the subcommands of a group, each with its context, and import them. Other commands have none."""
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            assert isinstance(command, DocumentedCommand)
            yield (
                command.context_class(command, info_name=name, parent=ctx, **command.context_settings),
                command,
            )


def contexts_below(ctx: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command and of every command below it, and import them all."""
    yield ctx
    for below, _ in subcommands(ctx):
        yield from contexts_below(below)


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return a suggestion to put before the full stop of a sentence about an unknown name; may be empty."""
    near = alike(name, names)
    return f" (did you mean {near}?)" if near else ""


def alike(name: str, names: Sequence[str]) -> str | None:
    """Return the name that was probably meant: a similar one, or one of which either is a prefix of the other."""
    # With a lower cutoff, 'rename' matches 'create'.
    if close := difflib.get_close_matches(name, names, 1, cutoff=0.7):
        return close[0]
    # The cutoff is too strict for two swapped letters in a short word.
    if mixed := [each for each in names if sorted(each) == sorted(name)]:
        return mixed[0]
    begun = [each for each in names if len(name) > 1 and (each.startswith(name) or name.startswith(each))]
    return begun[0] if begun else None
