"""Options of commands: grouped under headings, with several values, or all values of a command as one object."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from .output import write
from .params import Integer, Number, delimiter, duration, long_duration, positive_duration

OTHER_OPTIONS = "Options"

CONNECTION_OPTIONS = "Connection"

IGNORED_VARIABLES = "qcli.ignored_variables"
"""Key in a context's `meta`: the names of parameters that are not read from the environment."""
DEFAULTS_ORIGIN = "qcli.defaults_origin"
"""Key in a context's `meta`: where the values of click's `default_map` are from, such as `context prod`."""
VERBOSE = "qcli.verbose"
"""Key in a context's `meta`: whether `--verbose` is given."""

F = TypeVar("F", bound=Callable[..., Any])
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


class Decorator(Protocol):
    """Adds an option to a command's function."""

    def __call__(self, command: F, /) -> F: ...


class GroupedOption(click.Option):
    """An option under a heading of `--help`.

    The default is shown unless it is None or empty. By default the metavar of a number is N, of a duration DURATION.

    Args:
        section: The heading.
        alone: The value of an option that is given without one. Then a value is accepted after `=` only, and the
            command must be a `GoFlagsCommand`. None: the option needs a value, or is one of click's flags.
        brief: Whether `--help` only names the option, and leaves the explanation to the manual page.
        records: Of `--format`: the types of the records that are written as JSON.
    """

    def __init__(
        self,
        *args: Any,
        section: str = OTHER_OPTIONS,
        alone: str | None = None,
        brief: bool = False,
        records: tuple[type, ...] = (),
        **kwargs: Any,
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
        self.brief = brief
        self.records = records

    def variables(self, ctx: click.Context) -> tuple[str, ...]:
        """Return the environment variables that set this option of a command; the first one that is set counts."""
        if self.name in ctx.meta.get(IGNORED_VARIABLES, ()):
            return ()
        return (self.envvar,) if isinstance(self.envvar, str) else ()

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the text in the environment; an empty one counts as none."""
        variable = self.variable_in_use(ctx)
        return os.environ[variable] if variable else None

    def variable_in_use(self, ctx: click.Context) -> str:
        """Return the environment variable that sets this option; "": none is set, or the variables are ignored."""
        return next(filter(os.environ.get, self.variables(ctx)), "")

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Return the text in the environment, split at commas if the option takes several values."""
        if not self.multiple:
            return super().value_from_envvar(ctx)
        text = self.resolve_envvar_value(ctx)
        return None if text is None else text.split(",")

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Convert the value. A NUL character, which only a file can have, is an error: no path or address has one."""
        if any("\0" in text for text in (value if isinstance(value, list | tuple) else [str(value)])):
            raise click.BadParameter("It has a NUL character.", ctx, self)
        return super().type_cast_value(ctx, value)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return where the user gave a bad value: the option, or its environment variable."""
        source = ctx.get_parameter_source(self.name) if ctx and self.name else None
        if ctx and source is ParameterSource.ENVIRONMENT:
            return f"'{self.variable_in_use(ctx)}' in the environment"
        # click.Option would name the variable in either case.
        hint = click.Parameter.get_error_hint(self, ctx)
        if ctx and source is ParameterSource.DEFAULT_MAP and DEFAULTS_ORIGIN in ctx.meta:
            return f"{hint} of the {ctx.meta[DEFAULTS_ORIGIN]}"
        return hint

    def origin(self, ctx: click.Context) -> str:
        """Return where the value is from, for people."""
        source = ctx.get_parameter_source(self.name) if self.name else None
        if source is ParameterSource.ENVIRONMENT:
            return self.variable_in_use(ctx)
        if source is ParameterSource.DEFAULT_MAP:
            return str(ctx.meta[DEFAULTS_ORIGIN])
        return "command line" if source is ParameterSource.COMMANDLINE else "default"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and help. click writes a blank before a metavar such as `[=BOOL]`; this removes it."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


def option(section: str, *names: str, **attributes: Any) -> Decorator:
    """Return `click.option` under the heading `section`."""
    return click.option(*names, cls=GroupedOption, section=section, **attributes)


def all_of(*options: Decorator) -> Decorator:
    """Combine several options into one decorator; the help shows them in this order."""

    def decorate(command: F) -> F:
        for each in reversed(options):  # the last decorator is the first option
            command = each(command)
        return command

    return decorate


class SeveralOption(GroupedOption):
    """An option that takes several values: it may be given several times, and each time with commas.

    The parameter is a tuple without duplicates.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, multiple=True, **kwargs)

    def type_cast_value(self, ctx: click.Context, value: Any) -> tuple[Any, ...]:
        """Convert each value. Raises BadParameter: a value is wrong, or is given twice."""
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
    """Pass all parameters to a command's function as one object; its fields have the parameters' names."""

    def decorate(function: Callable[[_Options], _Result]) -> Callable[..., _Result]:
        @functools.wraps(function)
        def run(**values: Any) -> _Result:
            return function(cls(**values))

        return run

    return decorate


def given(*names: str) -> list[str]:
    """Return which of these parameters of the current command are on the command line, in this order."""
    ctx = click.get_current_context()
    return [name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def given_flags(*names: str) -> list[str]:
    """Return the flags of these parameters that are on the command line, in the order of declaration."""
    params = click.get_current_context().command.params
    typed = given(*names)
    return [param.opts[0] for param in params if param.name in typed]


def output_format(text: str, *formats: str, records: Sequence[type]) -> Decorator:
    """`--format`; the first of the formats is the default.

    Args:
        text: The help.
        records: The types of the records of `json`, from `qcli.records`.
    """
    choice = click.Choice(formats)
    return option(
        "Output", "--format", "form", type=choice, default=formats[0], help=text, records=tuple(records)
    )


def verbose_option(text: str) -> Decorator:
    """`--verbose`: a failure is shown with its causes. It is no parameter of the command."""

    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[VERBOSE] = value

    return option(
        "Output", "--verbose", is_flag=True, brief=True, expose_value=False, callback=remember, help=text
    )


def count_option(
    section: str, text: str, *, least: int = 1, most: int | None = None, default: int | None = None
) -> Decorator:
    """`-n`, `--count`: a maximum; without a default, the parameter is None if the option is not given."""
    return option(section, "-n", "--count", type=Integer(least, most), default=default, help=text)


def rate_option(section: str) -> Decorator:
    """`--rate`: the maximum of messages per second; None if it is not given."""
    text = "Publish at most N messages per second, evenly."
    return option(section, "--rate", type=Number(min=0, min_open=True), help=text)


def max_in_flight_option(section: str, text: str) -> Decorator:
    """`--max-in-flight`; the default is the brokers' default limit, as larger batches cost less per message."""
    type_ = Integer(min=1)
    return option(section, "--max-in-flight", type=type_, default=2500, brief=True, help=text)


def max_msg_size_option(section: str, text: str) -> Decorator:
    """`--max-msg-size`: a broker's limit; the default is that of brokers."""
    text = f"Set the maximum size of a message, the broker's limit. {text}"
    type_, default = Integer(min=1), 1024 * 1024
    return option(
        section, "--max-msg-size", type=type_, default=default, metavar="BYTES", brief=True, help=text
    )


def delimiter_options(section: str, text: str, null_text: str) -> Decorator:
    """`--delimiter` and `--null`, as the parameters `separator` and `null`; `delimiter_of` combines them."""
    return all_of(
        option(
            section,
            "--delimiter",
            "-d",
            "separator",
            type=delimiter,
            default=r"\n",
            metavar="TEXT",
            help=rf"{text}. Escapes: \n, \t, \0, \xNN and so on.",
        ),
        option(section, "--null", "-0", is_flag=True, help=rf"The same as --delimiter '\0', {null_text}."),
    )


def delimiter_of(separator: bytes, null: bool) -> bytes:
    """Return the delimiter that `delimiter_options` select. Raises UsageError if both options are given."""
    if null and separator != b"\n":
        raise click.UsageError("--null and --delimiter exclude each other.")
    return b"\0" if null else separator


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from .version import version_line

    write(version_line())
    ctx.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
"""`--version`. See `version_line`."""
