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
    alone: str | None = None
    """The value of a flag without one; see `GroupedOption`."""
    writes: bool = False
    """Whether the value names a file that the server writes; of an address, the path of a unix socket."""


def number(range_: params.Integer, metavar: str = "N") -> Kind:
    return Kind(range_, metavar, (int, str), "an integer")


def duration(convert: Any) -> Kind:
    return Kind(
        convert, "DURATION", (int, str), 'a duration such as "1m30s", or an integer, milliseconds', "ms"
    )


TEXT = Kind(click.STRING, "TEXT")
HOST = Kind(params.host, "HOST")
HOST_PATTERN = Kind(params.host_pattern, "HOST")
METRIC_PREFIX = Kind(params.metric_prefix, "TEXT")
FILE = Kind(params.PathOrNothing(dir_okay=False), "FILE")
WRITTEN_FILE = FILE._replace(writes=True)
FOLDER = Kind(params.PathOrNothing(file_okay=False), "FOLDER")
BOOLEAN = Kind(params.Boolean(), "[=BOOL]", (bool, str), "true or false", alone="true")
COUNT = number(params.Integer(min=0))
POSITIVE = number(params.Integer(min=1))
COUNT_BYTES = number(params.Integer(min=0), "BYTES")
POSITIVE_BYTES = number(params.Integer(min=1), "BYTES")
MESSAGE_BYTES = number(params.Integer(1, 1024**3), "BYTES")
"""The size of a message or of several: sizes have 31 bits on the wire and in the log, with some bytes around them."""
PORT = number(params.Integer(0, 65535), "PORT")
DURATION = duration(params.duration)
POSITIVE_DURATION = duration(params.positive_duration)
