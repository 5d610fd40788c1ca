"""Settings of a command that runs a server: a flag, an environment variable and a configuration key each."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from ..errors import ExitCode, Failure
from ..options import OTHER_OPTIONS, GroupedOption
from ..params import Word
from . import kinds

PREFIX = "QCLI_"
"""The prefix of the environment variables."""
SERVE_PREFIX = "QCLI_SERVE_"
"""The prefix of the variables that `lookupd` does not read."""

PROBLEMS = "qcli.problems"
"""Key in a context's `meta`: with `--check-config`, the problems found while values are processed."""

LOG_LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50}


class Problem(NamedTuple):
    """What is wrong with a configuration, and the exit code for it."""

    code: ExitCode
    text: str


class Setting(GroupedOption):
    """One option, with its environment variable and its key in a configuration file.

    Args:
        flag: The name on the command line, without dashes.
        kind: The format of its values.
        default: The default as text; None: no default, and the help says what applies.
        field: The field of `BrokerOptions` or `Limits` that it sets; by default the flag's name with underscores, and
            the suffix `_ms` for a duration.
        key: The key in a configuration file; by default the field without its unit.
        ignored: Why the option has no effect here; such an option is accepted, and hidden in --help. None: it has one.
        commas: With `multiple`: whether a flag may have several values with commas between them, too. The environment
            always may.
        alone: See `GroupedOption`.
    """

    def __init__(
        self,
        flag: str,
        kind: kinds.Kind,
        default: str | int | tuple[str, ...] | None = None,
        *,
        field: str | None = None,
        key: str | None = None,
        ignored: str | None = None,
        commas: bool = False,
        **attributes: Any,
    ) -> None:
        attributes.setdefault("alone", kind.alone)
        name = field or flag.replace("-", "_") + ("_ms" if kind.unit == "ms" else "")
        super().__init__(
            [f"--{flag}", name],
            type=kind.type,
            metavar=kind.metavar,
            default=default,
            envvar=PREFIX + flag.replace("-", "_").upper(),
            hidden=ignored is not None,
            **attributes,
        )
        self.kind = kind
        self._of_serve = SERVE_PREFIX + flag.replace("-", "_").upper()
        self.key = key or name.removesuffix("_ms")
        self.ignored = ignored
        self.commas = commas

    def variables(self, ctx: click.Context) -> tuple[str, ...]:
        """Return the variables of this option: `serve` has one more than `lookupd`, for itself alone."""
        variables = super().variables(ctx)
        return (self._of_serve, *variables) if ctx.command.name == "serve" else variables

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Convert the value, or several with commas between them."""
        if self.commas:
            value = [text.strip() for each in value or () for text in each.split(",")]
        return super().type_cast_value(ctx, value)

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Process the value. With `--check-config`, record what is wrong, and use the default."""
        if "check_config" not in opts or ctx.resilient_parsing:
            return super().handle_parse_result(ctx, opts, args)
        problems: list[Problem] = ctx.meta.setdefault(PROBLEMS, [])
        try:
            return super().handle_parse_result(ctx, opts, args)
        except click.UsageError as error:
            problems.append(Problem(ExitCode.USAGE, error.format_message()))
        except Failure as error:
            problems.append(Problem(error.exit_code, error.message))
        assert self.name is not None
        value = ctx.params[self.name] = self.type_cast_value(ctx, self.default)
        return value, args


def settings_of(ctx: click.Context) -> list[Setting]:
    return [param for param in ctx.command.params if isinstance(param, Setting)]


LOG_SETTINGS = [
    Setting(
        "log-level",
        kinds.Kind(Word(list(LOG_LEVELS)), None),
        "info",
        help="Log this level and above, on standard error.",
    ),
    Setting(
        "log-format",
        kinds.Kind(Word(["text", "json"]), None),
        "text",
        help="Write the log as nsqd does, or as JSON lines.",
        brief=True,
    ),
    Setting(
        "log-prefix", kinds.TEXT, "[qcli] ", help="Begin every line of a text log with this.", brief=True
    ),
]


def verbose_setting() -> Setting:
    """Return `--verbose`, an option of NSQ's servers that has no effect here."""
    return Setting("verbose", kinds.BOOLEAN, ignored="see --log-level", help="See --log-level.")


def under_headings(*table: Setting | str) -> list[Setting]:
    """Return the settings of a table, each under the last heading before it."""
    settings: list[Setting] = []
    heading = OTHER_OPTIONS
    for each in table:
        if isinstance(each, str):
            heading = each
        else:
            each.section = heading
            settings.append(each)
    return settings


def fields_of(options: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(options) if field.name in values}
