"""Positions in a topic's log, as HTTP clients write them.

    1000         the message with this sequence
    earliest     the oldest message in the log
    latest       the end of the log
    -1h30m       a time in the past
    @1700000000.5, @2026-11-21T04:14:05Z     a time: Unix seconds, or RFC 3339

A time means the first message published at that time or later.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from ..durations import parse_duration_ns
from .interface import Log, sequence_at

FORMS = "a sequence, earliest, latest, -DURATION such as -1h30m, or @TIME: Unix seconds or RFC 3339"

_SEQUENCE = re.compile(r"[0-9]{1,20}")
_UNIX_S = re.compile(r"([0-9]{1,11})(?:\.([0-9]{1,9}))?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a log.

    Attributes:
        kind: The meaning of `value`, which is unused for `earliest` and `latest`.
        value: A sequence, or Unix nanoseconds.
    """

    kind: Literal["sequence", "time", "earliest", "latest"]
    value: int = 0

    def sequence_in(self, log: Log) -> int:
        """Resolve to a sequence in this log now, from its first to its end. May read; raises LogReadError."""
        if self.kind == "time":
            return sequence_at(log, self.value)
        first, end = log.first_sequence, log.next_sequence
        return {"earliest": first, "latest": end}.get(self.kind, max(first, min(self.value, end)))


EARLIEST, LATEST = Position("earliest"), Position("latest")


def parse_position(text: str, now_ns: int) -> Position:
    """Parse a position; `now_ns` is the wall clock. Raises ValueError if the text is not a position."""
    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if _SEQUENCE.fullmatch(text):
        return Position("sequence", int(text))
    if text.startswith("-"):
        return Position("time", max(0, now_ns - parse_duration_ns(text[1:])))
    if text.startswith("@"):
        return Position("time", _parse_time_ns(text[1:]))
    raise ValueError(f"{text!r} is not {FORMS}")


def _parse_time_ns(text: str) -> int:
    if unix := _UNIX_S.fullmatch(text):
        return int(unix[1]) * 10**9 + int((unix[2] or "").ljust(9, "0"))
    try:
        # In a query string a plus sign means a blank; a client that does not escape it still gets its offset.
        time = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither Unix seconds nor a time such as 2026-11-21T04:14:05Z"
        ) from None
    if time.tzinfo is None:
        raise ValueError(f"{text!r} has no UTC offset: write {text}Z, or {text}%2B01:00")
    since = time - _EPOCH
    return max(0, (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)
