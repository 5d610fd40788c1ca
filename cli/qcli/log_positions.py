"""Places in a log as a user writes them: a sequence, a time, or how long ago."""

from __future__ import annotations

import time
from datetime import datetime
from typing import NamedTuple

import click

from .params import duration

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


class Position(NamedTuple):
    """A sequence, or, if `is_time`, a time in Unix nanoseconds."""

    value: int
    is_time: bool


def position(text: str) -> Position:
    """A sequence such as `1000`, a time such as `2026-11-21T04:14`, or a time ago such as `15m`."""
    if text.isascii() and text.isdigit():
        return Position(int(text), False)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        pass
    else:
        whole_s = int(moment.replace(microsecond=0).timestamp())
        return Position(max(0, whole_s * _NS_PER_S + moment.microsecond * 1000), True)
    try:
        return Position(max(0, time.time_ns() - duration(text) * _NS_PER_MS), True)
    except click.BadParameter:
        raise click.BadParameter(
            f"{text!r} is neither a sequence such as 1000, nor a time such as 2026-11-21T04:14, nor a time ago such "
            "as 15m."
        ) from None


def moment(timestamp_ns: int) -> str:
    """A time for people, and for `position`: local, to the microsecond, with its distance from UTC."""
    seconds, ns = divmod(timestamp_ns, _NS_PER_S)
    try:
        whole = datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ns} ns"  # past the year 9999
    return whole.replace(microsecond=ns // 1000).isoformat(timespec="microseconds")
