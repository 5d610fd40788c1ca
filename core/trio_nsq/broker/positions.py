"""Places in a topic's log, as HTTP clients write them.

    1000         the message of this sequence
    earliest     the oldest message that is kept
    latest       the end
    -1h30m       what was published so long ago
    @1700000000.5, @2026-11-21T04:14:05Z     what was published at this time: Unix seconds, or RFC 3339

A time stands for the first message that was published then or later.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from ..durations import parse_duration_ns
from ..log import Log
from ..log.interface import sequence_at

FORMS = "a sequence, earliest, latest, -DURATION such as -1h30m, or @TIME: Unix seconds or RFC 3339"

_SEQUENCE = re.compile(r"[0-9]{1,20}")
_UNIX_S = re.compile(r"([0-9]{1,11})(?:\.([0-9]{1,9}))?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a log.

    Attributes:
        kind: What `value` is; it has no meaning for `earliest` and `latest`.
        value: A sequence, or Unix nanoseconds.
    """

    kind: Literal["sequence", "time", "earliest", "latest"]
    value: int = 0

    def sequence_in(self, log: Log) -> int:
        """The sequence that it is in this log now, from its first one to its end. May read; raises LogReadError."""
        if self.kind == "time":
            return sequence_at(log, self.value)
        first, end = log.first_sequence, log.next_sequence
        return {"earliest": first, "latest": end}.get(self.kind, max(first, min(self.value, end)))


EARLIEST, LATEST = Position("earliest"), Position("latest")


def parse_position(text: str, now_ns: int) -> Position:
    """The position; `now_ns` is the wall clock. Raises ValueError if it is none."""
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
        # In a query a plus sign means a blank, and few think of that.
        time = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither Unix seconds nor a time such as 2026-11-21T04:14:05Z"
        ) from None
    if time.tzinfo is None:
        raise ValueError(f"{text!r} does not say how far it is from UTC: write {text}Z, or {text}%2B01:00")
    since = time - _EPOCH
    return max(0, (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)
