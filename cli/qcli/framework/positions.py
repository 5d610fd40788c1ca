"""Positions in a log as a user writes them: a sequence, a time, or how long ago."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import NamedTuple

import click

from .params import duration

FORMS = (
    "a sequence such as 1000, nor a time such as 2026-11-21T04:14 or @1700000000.5 (Unix seconds), nor a time ago such "
    "as 15m"
)

NOTHING_BETWEEN = "--from lies behind --to: there is nothing between them."

NOW = "now"
"""The same as `latest`, in every command."""

_NO_END = 2**64
_UNIX_S = re.compile(r"([0-9]{1,11})(?:\.([0-9]{1,9}))?")
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


class Position(NamedTuple):
    """A sequence, or, if `is_time`, a time in Unix nanoseconds."""

    value: int
    is_time: bool


def position(text: str) -> Position:
    """A sequence, a time or how long ago; also as HTTP clients write them: `@TIME`, `-DURATION`, `latest`."""
    if text.isascii() and text.isdigit():
        return Position(int(text), False)
    if text == "earliest":
        return Position(0, False)
    if text in ("latest", NOW):
        return Position(_NO_END, False)
    found = _time(text.removeprefix("@"), unix=text.startswith("@"))
    if found is None:
        try:
            found = time.time_ns() - duration(text.removeprefix("-")) * _NS_PER_MS
        except click.BadParameter:
            raise click.BadParameter(f"{text!r} is neither {FORMS}.") from None
    return Position(max(0, found), True)


def _time(text: str, *, unix: bool) -> int | None:
    """Unix nanoseconds of a time, local if it does not say, or of Unix seconds; None if it is neither."""
    if unix and (found := _UNIX_S.fullmatch(text)):
        seconds, fraction = found.groups(default="")
        return int(seconds) * _NS_PER_S + int(fraction.ljust(9, "0"))
    try:
        moment = datetime.fromisoformat(text)
        whole_s = int(moment.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError):
        return None
    return whole_s * _NS_PER_S + moment.microsecond * 1000


def moment(timestamp_ns: int) -> str:
    """A time for people, and for `position`: local, to the microsecond, with its distance from UTC."""
    seconds, ns = divmod(timestamp_ns, _NS_PER_S)
    try:
        whole = datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ns} ns"  # past the year 9999
    return whole.replace(microsecond=ns // 1000).isoformat(timespec="microseconds")
