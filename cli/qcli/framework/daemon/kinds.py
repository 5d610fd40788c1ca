"""Kinds of values that settings have: how they are written on a command line and in a configuration file."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from .. import params


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
