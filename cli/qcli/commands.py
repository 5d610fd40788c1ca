"""What every command is made of: click's own, plus examples, documented exit codes and options under headings.

Help pages and manual pages are two walks over the same objects, so nothing is said twice. The docstring of a
command's function is its description: paragraphs, the first of which is one sentence.
"""

from __future__ import annotations

import difflib
import importlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click

from .exit_codes import ExitCode

OTHER_OPTIONS = "Options"

_F = TypeVar("_F", bound=Callable[..., Any])


class Example(NamedTuple):
    """A command line a user may paste, and what it does."""

    about: str
    line: str


class GroupedOption(click.Option):
    """An option that names the heading it stands under in `--help`."""

    def __init__(self, *args: Any, section: str = OTHER_OPTIONS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def option(section: str, *names: str, **attributes: Any) -> Callable[[_F], _F]:
    """`click.option` under the heading `section`."""
    return click.option(*names, cls=GroupedOption, section=section, **attributes)


def sections(ctx: click.Context, command: click.Command) -> dict[str, list[click.Option]]:
    """The visible options of a command by heading, in the order in which they were declared."""
    found: dict[str, list[click.Option]] = {}
    for param in command.get_params(ctx):
        if isinstance(param, click.Option) and not param.hidden:
            found.setdefault(getattr(param, "section", OTHER_OPTIONS), []).append(param)
    # -h belongs last, wherever the other options without a heading stand.
    if OTHER_OPTIONS in found:
        found[OTHER_OPTIONS] = found.pop(OTHER_OPTIONS)
    return found


class DocumentedCommand(click.Command):
    """A command with examples and exit codes in its help.

    Args:
        examples: At least one; a test insists.
        exits: What each exit code means here; those that every command shares may be left out.
        notes: Titled paragraphs about things a user has to know, shown after the options.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[Example] = (),
        exits: Mapping[ExitCode, str] | None = None,
        notes: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault(
            "context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        )
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        shared = (ExitCode.OK, ExitCode.FAILURE, ExitCode.USAGE, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
        meanings = {code: code.meaning for code in shared} | dict(exits or {})
        self.exits = dict(sorted(meanings.items()))
        self.notes = dict(notes or {})

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
                "\n".join(f"{indent}# {each.about}\n{indent}{each.line}\n" for each in self.examples)
            )
        with formatter.section("Exit status"):
            formatter.write_dl([(str(code.value), text) for code, text in self.exits.items()])


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, or suggest one that is written alike.

        Not with click's suggestions: it knows none of those that are imported late, and finds much alike.
        """
        name = args[0]
        if not (name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name)):
            near = _alike(name, self.list_commands(ctx))
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"No such command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


def _alike(name: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant: one that is written alike, or one that this begins, or is begun by."""
    # Below this, 'rename' is like 'create'.
    if close := difflib.get_close_matches(name, names, 1, cutoff=0.7):
        return close[0]
    begun = [each for each in names if len(name) > 1 and (each.startswith(name) or name.startswith(each))]
    return begun[0] if begun else None


class LazyGroup(DocumentedGroup):
    """A group whose subcommands are imported when they are asked for, so that each starts quickly.

    Args:
        modules: Module by subcommand name; the module holds it as `command`.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the subcommands, in the order in which they were given."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand of this name; None if there is no such."""
        if cmd_name not in self._modules:
            return None
        command = importlib.import_module(self._modules[cmd_name]).command
        assert isinstance(command, click.Command)
        return command
