"""Positions in a log, for files and for a broker: a sequence, a time, or how long ago; and their options."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from .options import Decorator, all_of, option

if TYPE_CHECKING:
    from trio_nsq.log.positions import Position as LogPosition

FORMS = (
    "a sequence such as 1000, nor a time such as 2026-11-21T04:14 or @1700000000.5 (Unix seconds), nor a time ago such "
    "as 15m"
)

NOTHING_BETWEEN = "--from is after --to: the range is empty."

_NO_END = 2**64
_NS_PER_S = 1_000_000_000


class Position(NamedTuple):
    """A sequence, or, if `is_time`, a time in Unix nanoseconds."""

    value: int
    is_time: bool


def position(text: str) -> Position:
    """Parse a sequence, a time or how long ago; also the HTTP forms `@TIME`, `-DURATION` and `latest`."""
    try:
        found = _typed(text).at(time.time_ns())
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither {FORMS}.") from None
    value = {"earliest": 0, "latest": _NO_END}.get(found.kind, found.value)
    return Position(value, found.kind == "time")


def moment(timestamp_ns: int) -> str:
    """Return a time that `position` parses: local, in microseconds, with its offset from UTC."""
    seconds, ns = divmod(timestamp_ns, _NS_PER_S)
    try:
        whole = datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ns} ns"  # past the year 9999
    return whole.replace(microsecond=ns // 1000).isoformat(timespec="microseconds")


def short_time(timestamp_ns: int) -> str:
    """Return a time for a table: UTC, in seconds, such as `2026-11-23 00:34:50`."""
    try:
        return f"{datetime.fromtimestamp(timestamp_ns // _NS_PER_S, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ns} ns"  # past the year 9999


_WORDS = ("earliest", "latest")

POSITIONS_NOTE = (
    "A position is a sequence, such as 1000 (a topic's messages are counted from 0); a time, such as 2026-11-21T04:14 "
    "or 2026-11-21T04:14:05.5Z, local unless it has a zone, or @1700000000.5 in Unix seconds; how long ago, "
    "such as 15m, 2h or 7d; earliest, the oldest retained message; or latest (or now), the end. Times are times of "
    "publishing. If the clock was set back, several positions may match a time; one of them is used."
)
"""The explanation of positions in help and manual pages."""


class BrokerPosition(click.ParamType[str]):
    """Converts a position from the command line to the form of the broker's HTTP interface."""

    name = "position"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text to send. The broker computes how long ago something was, by its own clock."""
        try:
            return str(_typed(str(value)))
        except ValueError:
            self.fail(f"{str(value)!r} is neither {FORMS}, nor earliest or latest.", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in _WORDS if word.startswith(incomplete)]


_FOR_BROKER = BrokerPosition()


def refuse_sequence(text: str | None, addresses: Sequence[str]) -> None:
    """Raises UsageError if a position is a sequence and there are several brokers, as each counts its own."""
    if text is not None and len(addresses) > 1 and text.isdecimal():
        raise click.UsageError(
            f"{text} is a sequence, and each broker has its own sequences: give a time, or one broker."
        )


def check_range(first: str | None, end: str | None) -> None:
    """Raises UsageError if the range between two positions is always empty."""
    if first is None or end is None:
        return
    begins, ends = _typed(first), _typed(end)
    is_reversed = begins.value < ends.value if begins.kind == "ago" else begins.value > ends.value
    if begins.kind == ends.kind and is_reversed:  # otherwise only the broker can compare them
        raise click.UsageError(NOTHING_BETWEEN)


def time_of(text: str, now_ns: int) -> int | None:
    """Return the time of a `BrokerPosition` in Unix nanoseconds, relative to `now_ns`; None if it is no time."""
    found = _typed(text).at(now_ns)
    return found.value if found.kind == "time" else None


def is_in_future(text: str, now_s: float) -> bool:
    """Return whether a position is a time in the future."""
    found = _typed(text)
    return found.kind == "time" and found.value > now_s * _NS_PER_S


def _typed(text: str) -> "LogPosition":
    from trio_nsq.log.positions import parse_typed_position

    return parse_typed_position(text)


def from_option(section: str, text: str, convert: Any = _FOR_BROKER) -> Decorator:
    """Return `--from`, or `--since`. By default `convert` makes a position for a request to a broker."""
    return option(section, "--from", "--since", "first", type=convert, metavar="POSITION", help=text)


def to_option(section: str, text: str, convert: Any = _FOR_BROKER) -> Decorator:
    """Return `--to`, or `--until`; see `from_option`."""
    return option(section, "--to", "--until", "end", type=convert, metavar="POSITION", help=text)


def range_options(section: str) -> Decorator:
    """Return `--from` and `--to` of a command that reads all messages by default."""
    begin = "Begin at this position: see 'qcli help positions'. By default begin at the oldest message."
    end = "End before this position. By default end at the newest message."
    return all_of(from_option(section, begin), to_option(section, end))
