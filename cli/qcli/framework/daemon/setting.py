"""Settings of a command that runs a server: a flag, an environment variable and a configuration key each."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import click

from ..options import OTHER_OPTIONS, GroupedOption
from ..params import Boolean, Integer, PathOrNothing, Word, duration, optional_text, positive_duration

PREFIX = "QCLI_"
"""What the names of environment variables begin with."""

LOG_LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50}

MIB = 1024**2


class Kind(NamedTuple):
    """How values of one kind are written."""

    type: Any
    """Makes the value from text, for click."""
    metavar: str | None
    toml: tuple[type, ...] = (str,)
    """What it may be in a configuration file; a number there means what the same digits mean as text."""
    wanted: str = "a string"
    """In words, what it has to be there."""
    unit: str = ""
    """What is put behind a number in a configuration file to make it the text of a flag."""


def number_kind(range_: Integer, metavar: str = "N") -> Kind:
    return Kind(range_, metavar, (int, str), "an integer")


def duration_kind(convert: Any) -> Kind:
    return Kind(
        convert, "DURATION", (int, str), 'a duration such as "1m30s", or an integer, milliseconds', "ms"
    )


TEXT = Kind(click.STRING, "TEXT")

HOST = Kind(optional_text, "HOST")

FILE = Kind(PathOrNothing(dir_okay=False), "FILE")

FOLDER = Kind(PathOrNothing(file_okay=False), "FOLDER")

BOOLEAN = Kind(Boolean(), "[=BOOL]", (bool, str), "true or false")

COUNT = number_kind(Integer(min=0))

POSITIVE = number_kind(Integer(min=1))

COUNT_BYTES = number_kind(Integer(min=0), "BYTES")

POSITIVE_BYTES = number_kind(Integer(min=1), "BYTES")

PORT = number_kind(Integer(0, 65535), "PORT")

DURATION = duration_kind(duration)

POSITIVE_DURATION = duration_kind(positive_duration)

LISTEN = "HOST:PORT|PATH"


class Setting(GroupedOption):
    """One option, with its environment variable and its key in a configuration file.

    Args:
        flag: The name on the command line, without dashes.
        kind: How its values are written.
        default: As it would be written; None: there is none, and the help says what then holds.
        field: The field of `BrokerOptions` or `Limits` it sets; as a rule the flag's name with underscores, and
            `_ms` behind that of a duration.
        key: The key, as a rule the field without its unit.
        ignored: Why it has no effect here; None: it has one.
        alone: See `GroupedOption`.
    """

    def __init__(
        self,
        flag: str,
        kind: Kind,
        default: str | int | None = None,
        *,
        field: str | None = None,
        key: str | None = None,
        ignored: str | None = None,
        **attributes: Any,
    ) -> None:
        name = field or flag.replace("-", "_") + ("_ms" if kind.unit == "ms" else "")
        super().__init__(
            [f"--{flag}", name],
            type=kind.type,
            metavar=kind.metavar,
            default=default,
            envvar=PREFIX + flag.replace("-", "_").upper(),
            **attributes,
        )
        self.kind = kind
        self.key = key or name.removesuffix("_ms")
        self.ignored = ignored


LOG_SETTINGS = [
    Setting(
        "log-level", Kind(Word(list(LOG_LEVELS)), None), "info", help="How much is logged, on standard error."
    ),
    Setting("log-prefix", TEXT, "[qcli] ", help="What every line of the log begins with."),
]


def verbose_setting() -> Setting:
    """`--verbose`, which NSQ's servers have and which has no effect here."""
    kind = Kind(click.STRING, "[=BOOL]", (bool, str), "true or false")
    return Setting("verbose", kind, alone="true", ignored="see --log-level", help="See --log-level.")


def under_headings(*table: Setting | str) -> list[Setting]:
    """The settings of a table, each under the heading that stands last before it."""
    settings: list[Setting] = []
    heading = OTHER_OPTIONS
    for each in table:
        if isinstance(each, str):
            heading = each
        else:
            each.section = heading
            settings.append(each)
    return settings


def field_names(options: Any) -> set[str]:
    """The fields of a dataclass."""
    return {field.name for field in dataclasses.fields(options)}
