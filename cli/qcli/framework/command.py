"""What every command is made of: click's own, plus examples, documented exit codes and options under headings.

Help pages and manual pages are two walks over the same objects, so nothing is said twice. The docstring of a
command's function is its description: paragraphs, the first of which is one sentence.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import platform
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from trio_nsq._version import __version__

from .exit_codes import ExitCode

OTHER_OPTIONS = "Options"
CONNECTION_OPTIONS = "Connection"

REPEATED = "qcli.repeated"
"""In a context's `meta`: what a `GoFlagsCommand` is to log about options that were given several times."""

_GO_FLAG = re.compile(r"--?(?P<name>[^-=][^=]*)(?:=(?P<value>.*))?", re.DOTALL)

_F = TypeVar("_F", bound=Callable[..., Any])


class Example(NamedTuple):
    """A command line a user may paste, and what it does."""

    about: str
    line: str


class GroupedOption(click.Option):
    """An option that names the heading it stands under in `--help`.

    Args:
        section: The heading.
        alone: The value that it has when none is given; then one is given behind `=` only, and this needs a
            `GoFlagsCommand`. None: it has to have a value, or is one of click's flags.
    """

    def __init__(
        self, *args: Any, section: str = OTHER_OPTIONS, alone: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.alone = alone

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """The text in the environment; several values are separated by commas."""
        if not self.multiple:
            return super().value_from_envvar(ctx)
        text = self.resolve_envvar_value(ctx)
        return None if text is None else text.split(",")

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Where the user gave a bad value: the option, or its environment variable."""
        source = ctx.get_parameter_source(self.name) if ctx and self.name else None
        if source is ParameterSource.ENVIRONMENT:
            return f"'{self.envvar}' in the environment"
        return click.Parameter.get_error_hint(self, ctx)  # click.Option's names the variable besides

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Names and help. click puts a blank between a name and its value, which would be wrong where `=` has to be."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


def option(section: str, *names: str, **attributes: Any) -> Callable[[_F], _F]:
    """`click.option` under the heading `section`."""
    return click.option(*names, cls=GroupedOption, section=section, **attributes)


class SeveralOption(GroupedOption):
    """An option that takes several values: it may be given several times, and a value may be several with commas.

    Its parameter is a tuple without duplicates.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, multiple=True, **kwargs)

    def type_cast_value(self, ctx: click.Context, value: Any) -> tuple[Any, ...]:
        """Convert the values one by one. Raises BadParameter: one is wrong, or is there twice."""
        texts = [text.strip() for each in value or () for text in each.split(",")]
        values: tuple[Any, ...] = super().type_cast_value(ctx, texts)
        for index, each in enumerate(values):
            if each in values[:index]:
                raise click.BadParameter(f"it names {each} twice.", ctx, self)
        return values


def several(section: str, *names: str, **attributes: Any) -> Callable[[_F], _F]:
    """An option that takes several values, as `SeveralOption` does, under the heading `section`."""
    return click.option(*names, cls=SeveralOption, section=section, **attributes)


def output_format(text: str, *formats: str) -> Callable[[_F], _F]:
    """`--format`; the first of the formats is the default."""
    choice = click.Choice(formats)
    return option("Output", "--format", "form", type=choice, default=formats[0], show_default=True, help=text)


def version_option(command: _F) -> _F:
    """`--version`: of what, and on what it runs; `compiled` is what makes a broker and a client faster."""
    make = click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_tell_version,
        help="Show the version and exit.",
    )
    return make(command)


def _tell_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from trio_nsq.protocol.bulk import COMPILED

    how = "compiled" if COMPILED else "not compiled"
    click.echo(f"qcli {__version__} (Python {platform.python_version()}, {how})")
    ctx.exit()


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but do not forget silently that an option had other values before its last."""
        if not ctx.resilient_parsing:
            _, _, given = self.make_parser(ctx).parse_args(list(args))
            for param in dict.fromkeys(given):
                if (count := given.count(param)) > 1 and _takes_one_value(param):
                    names = " / ".join([*param.opts, *param.secondary_opts])
                    self.note_repeated(ctx, f"{names} is given {count} times")
        return super().parse_args(ctx, args)

    def note_repeated(self, ctx: click.Context, text: str) -> None:
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
                "\n".join(f"{indent}# {each.about}\n{indent}{each.line}\n" for each in self.examples)
            )
        with formatter.section("Exit status"):
            formatter.write_dl([(str(code.value), text) for code, text in self.exits.items()])


def _takes_one_value(param: click.Parameter) -> bool:
    """Whether a second occurrence would replace the first. A flag that is only ever switched on stays on."""
    if not isinstance(param, click.Option) or param.multiple:
        return False
    return not param.is_flag or bool(param.secondary_opts)


class GoFlagsCommand(DocumentedCommand):
    """A command that also takes its options as Go's flag package does.

    One dash is as good as two. An option whose value may be left out, such as `--snappy`, takes one behind `=` only,
    `--snappy=false`: the word after it is another.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse them in click's way, after writing them so."""
        options = self._options_by_name(ctx)
        for flag, word in itertools.pairwise(args):
            param = options.get(flag.lstrip("-")) if flag.startswith("-") else None
            if not isinstance(param, GroupedOption) or not param.alone or word.startswith("-"):
                continue
            if ignored := getattr(param, "ignored", None):
                raise click.UsageError(f"{flag} has no effect here, {ignored}: leave '{word}' out.", ctx)
            if isinstance(param.type, click.Choice) and word.lower() in param.type.choices:
                raise click.UsageError(f"Write {flag}={word}: the value belongs behind '='.", ctx)
        return super().parse_args(ctx, self.as_click_has_it(ctx, args))

    def note_repeated(self, ctx: click.Context, text: str) -> None:
        """Remember it for the log: in Go the last value counts, without an error."""
        ctx.meta.setdefault(REPEATED, []).append(text)

    def as_click_has_it(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Arguments with two dashes before each name, and a value for each option that may be left without."""
        options = self._options_by_name(ctx)
        written: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                return [*written, word, *words]
            found = _GO_FLAG.fullmatch(word)
            param = options.get(found["name"]) if found else None
            if found is None or param is None:
                # click says what is wrong with it, and of the letters of -foo it would name the first only.
                written.append(f"-{word}" if found and word[1] != "-" and len(found["name"]) > 1 else word)
                continue
            value = found["value"] if found["value"] is not None else getattr(param, "alone", None)
            if value is not None:
                written.append(f"--{found['name']}={value}")
            else:
                # The value is not looked at: it may begin with a dash.
                written += [f"--{found['name']}", *itertools.islice(words, 1)]
        return written

    def _options_by_name(self, ctx: click.Context) -> dict[str, click.Option]:
        """Those with long names, without the dashes."""
        return {
            name.removeprefix("--"): param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
            if name.startswith("--")
        }


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
            near = alike(name, self.list_commands(ctx))
            hint = f" Did you mean '{near}'?" if near else ""
            raise click.UsageError(f"No such command '{name}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


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
