"""Settings of a command that runs a server: a flag, an environment variable and a configuration key each."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import click

from ..options import GroupedOption
from ..params import Boolean, Integer, PathOrNothing, Word, duration, optional_text, positive_duration

PREFIX = "QCLI_"
"""What the names of environment variables begin with."""

LOG_LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50}

MIB = 1024**2

ADDRESSES = "Addresses"

STORAGE = "Storage"

CONFIGURATION = "Configuration"

LOGGING = "Logging"


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


def _number(range_: Integer, metavar: str = "N") -> Kind:
    return Kind(range_, metavar, (int, str), "an integer")


def _duration(convert: Any) -> Kind:
    return Kind(
        convert, "DURATION", (int, str), 'a duration such as "1m30s", or an integer, milliseconds', "ms"
    )


TEXT = Kind(click.STRING, "TEXT")

HOST = Kind(optional_text, "HOST")

FILE = Kind(PathOrNothing(dir_okay=False), "FILE")

FOLDER = Kind(PathOrNothing(file_okay=False), "FOLDER")

BOOLEAN = Kind(Boolean(), "[=BOOL]", (bool, str), "true or false")

COUNT = _number(Integer(min=0))

POSITIVE = _number(Integer(min=1))

COUNT_BYTES = _number(Integer(min=0), "BYTES")

POSITIVE_BYTES = _number(Integer(min=1), "BYTES")

PORT = _number(Integer(0, 65535), "PORT")

DURATION = _duration(duration)

POSITIVE_DURATION = _duration(positive_duration)

LISTEN = "HOST:PORT|PATH"


class Setting(GroupedOption):
    """One option, with its environment variable and its key in a configuration file.

    Args:
        flag: The name on the command line, without dashes.
        section: The heading it stands under.
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
        section: str,
        kind: Kind,
        default: str | int | None = None,
        *,
        field: str | None = None,
        key: str | None = None,
        ignored: str | None = None,
        **attributes: Any,
    ) -> None:
        name = field or flag.replace("-", "_") + ("_ms" if kind.unit == "ms" else "")
        if default is not None:
            attributes["default"] = default
        super().__init__(
            [f"--{flag}", name],
            section=section,
            type=kind.type,
            metavar=kind.metavar,
            envvar=PREFIX + flag.replace("-", "_").upper(),
            show_default=default not in (None, ""),
            **attributes,
        )
        self.kind = kind
        self.key = key or name.removesuffix("_ms")
        self.ignored = ignored


LOG_SETTINGS = [
    Setting(
        "log-level",
        LOGGING,
        Kind(Word(list(LOG_LEVELS)), None),
        "info",
        help="How much is logged, on standard error.",
    ),
    Setting("log-prefix", LOGGING, TEXT, "[qcli] ", help="What every line of the log begins with."),
]


def verbose_setting(section: str) -> Setting:
    """`--verbose`, which NSQ's servers have and which is accepted without effect."""
    return Setting(
        "verbose",
        section,
        Kind(click.STRING, "[=BOOL]", (bool, str), "true or false"),
        alone="true",
        ignored="see --log-level",
        help="See --log-level.",
    )


def field_names(options: Any) -> set[str]:
    """The fields of a dataclass."""
    return {field.name for field in dataclasses.fields(options)}
