"""The kinds of values of settings, on a command line and in a configuration file."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from .. import params


class Kind(NamedTuple):
    """The format of one kind of values."""

    type: Any
    """Converts text to the value, for click."""
    metavar: str | None
    toml: tuple[type, ...] = (str,)
    """The types it may have in a configuration file; a number means the same as its digits as text."""
    wanted: str = "a string"
    """The allowed types in words, for errors."""
    unit: str = ""
    """The unit of a number in a configuration file; a flag's text needs it as a suffix."""


def number(range_: params.Integer, metavar: str = "N") -> Kind:
    return Kind(range_, metavar, (int, str), "an integer")


def duration(convert: Any) -> Kind:
    return Kind(
        convert, "DURATION", (int, str), 'a duration such as "1m30s", or an integer, milliseconds', "ms"
    )


TEXT = Kind(click.STRING, "TEXT")
HOST = Kind(params.optional_text, "HOST")
FILE = Kind(params.PathOrNothing(dir_okay=False), "FILE")
FOLDER = Kind(params.PathOrNothing(file_okay=False), "FOLDER")
BOOLEAN = Kind(params.Boolean(), "[=BOOL]", (bool, str), "true or false")
COUNT = number(params.Integer(min=0))
POSITIVE = number(params.Integer(min=1))
COUNT_BYTES = number(params.Integer(min=0), "BYTES")
POSITIVE_BYTES = number(params.Integer(min=1), "BYTES")
PORT = number(params.Integer(0, 65535), "PORT")
DURATION = duration(params.duration)
POSITIVE_DURATION = duration(params.positive_duration)
