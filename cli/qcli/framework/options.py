"""Options of commands: under headings, with several values, and all values of a command as one object."""

import functools
import platform
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from trio_nsq._version import __version__

from .params import delimiter, duration, long_duration, positive_duration

OTHER_OPTIONS = "Options"

CONNECTION_OPTIONS = "Connection"

F = TypeVar("F", bound=Callable[..., Any])
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


class Decorator(Protocol):
    """Adds an option to a command's function."""

    def __call__(self, command: F, /) -> F: ...


class GroupedOption(click.Option):
    """An option that names the heading it stands under in `--help`.

    Its default is shown unless it is None or empty. A number is called N, a duration DURATION, unless told otherwise.

    Args:
        section: The heading.
        alone: The value that it has when none is given; then one is given behind `=` only, and this needs a
            `GoFlagsCommand`. None: it has to have a value, or is one of click's flags.
    """

    def __init__(
        self, *args: Any, section: str = OTHER_OPTIONS, alone: str | None = None, **kwargs: Any
    ) -> None:
        kind = kwargs.get("type")
        if isinstance(kind, click.IntRange | click.FloatRange):
            kwargs.setdefault("metavar", "N")
        elif kind in (duration, positive_duration, long_duration):
            kwargs.setdefault("metavar", "DURATION")
        kwargs.setdefault("show_default", kwargs.get("default") not in (None, ""))
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


def option(section: str, *names: str, **attributes: Any) -> Decorator:
    """`click.option` under the heading `section`."""
    return click.option(*names, cls=GroupedOption, section=section, **attributes)


def all_of(*options: Decorator) -> Decorator:
    """Several options as one decorator; they stand in this order in the help."""

    def decorate(command: F) -> F:
        for each in reversed(options):  # the last decorator is the first option
            command = each(command)
        return command

    return decorate


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


def several(section: str, *names: str, **attributes: Any) -> Decorator:
    """An option that takes several values, as `SeveralOption` does, under the heading `section`."""
    return click.option(*names, cls=SeveralOption, section=section, **attributes)


def options_as(
    cls: Callable[..., _Options],
) -> Callable[[Callable[[_Options], _Result]], Callable[..., _Result]]:
    """Give a command's function all its parameters as one object, whose fields have their names."""

    def decorate(function: Callable[[_Options], _Result]) -> Callable[..., _Result]:
        @functools.wraps(function)
        def run(**values: Any) -> _Result:
            return function(cls(**values))

        return run

    return decorate


def given(*names: str) -> list[str]:
    """Which of these parameters of the command that runs are on the command line, in this order."""
    ctx = click.get_current_context()
    return [name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def given_flags(*names: str) -> list[str]:
    """The flags of those of these parameters that are on the command line, in the order of declaration."""
    params = click.get_current_context().command.params
    typed = given(*names)
    return [param.opts[0] for param in params if param.name in typed]


def output_format(text: str, *formats: str) -> Decorator:
    """`--format`; the first of the formats is the default."""
    choice = click.Choice(formats)
    return option("Output", "--format", "form", type=choice, default=formats[0], help=text)


def count_option(
    section: str, text: str, *, least: int = 1, most: int | None = None, default: int | None = None
) -> Decorator:
    """`-n`, `--count`: at most so many; without a default the parameter is None if it is not given."""
    return option(section, "-n", "--count", type=click.IntRange(least, most), default=default, help=text)


def rate_option(section: str, text: str) -> Decorator:
    """`--rate`: messages per second, at most; None if it is not given."""
    text = f"Messages per second, at most; evenly{text}."
    return option(section, "--rate", type=click.FloatRange(min=0, min_open=True), help=text)


def max_in_flight_option(section: str, text: str) -> Decorator:
    """`--max-in-flight`; the default is what brokers allow by default. Larger batches cost less for each message."""
    return option(section, "--max-in-flight", type=click.IntRange(min=1), default=2500, help=text)


def max_msg_size_option(section: str, text: str) -> Decorator:
    """`--max-msg-size`: a broker's limit; the default is that of brokers."""
    text = f"The broker's limit. {text}"
    type_, default = click.IntRange(min=1), 1024 * 1024
    return option(section, "--max-msg-size", type=type_, default=default, metavar="BYTES", help=text)


def delimiter_options(section: str, text: str, null_text: str) -> Decorator:
    """`--delimiter` and `--null`, as the parameters `separator` and `null`; `delimiter_of` says what they come to."""
    return all_of(
        option(
            section,
            "--delimiter",
            "-d",
            "separator",
            type=delimiter,
            default=r"\n",
            metavar="TEXT",
            help=rf"{text}. \n, \t, \0, \xNN and the like are understood.",
        ),
        option(section, "--null", "-0", is_flag=True, help=rf"The same as --delimiter '\0', {null_text}."),
    )


def delimiter_of(separator: bytes, null: bool) -> bytes:
    """The delimiter that `delimiter_options` ask for. Raises UsageError if both are given."""
    if null and separator != b"\n":
        raise click.UsageError("--null and --delimiter exclude each other.")
    return b"\0" if null else separator


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from trio_nsq.protocol.bulk import COMPILED

    how = "compiled" if COMPILED else "not compiled"
    click.echo(f"qcli {__version__} (Python {platform.python_version()}, {how})")
    ctx.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
"""`--version`: of what, and on what it runs; `compiled` is what makes a broker and a client faster."""
