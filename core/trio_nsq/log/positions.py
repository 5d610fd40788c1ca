"""Positions in a topic's log, as HTTP clients write them, and as people type them.

    1000         the message with this sequence
    earliest     the oldest message in the log
    latest       the end of the log
    -1h30m       a time in the past
    @1700000000.5, @2026-11-21T04:14:05Z     a time: Unix seconds, or RFC 3339

People also type `now`, `1h30m` or `7d` for a time in the past, and times without `@` and without an offset from UTC.

A time means the first message published at that time or later.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Literal

from ..text.durations import parse_duration_ns, parse_long_duration_ms
from .interface import TimedLog, sequence_at

FORMS = "a sequence, earliest, latest, -DURATION such as -1h30m, or @TIME: Unix seconds or RFC 3339"

_SEQUENCE = re.compile(r"[0-9]{1,20}")
_UNIX_S = re.compile(r"([0-9]{1,11})(?:\.([0-9]{1,9}))?")
_MORE_DIGITS = re.compile(r"[.,]\d{6}(\d{1,3})")
_NS_PER_S = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a log.

    Attributes:
        kind: The meaning of `value`, which is unused for `earliest` and `latest`.
        value: A sequence, or Unix nanoseconds; for `ago`, nanoseconds before now.
    """

    kind: Literal["sequence", "time", "ago", "earliest", "latest"]
    value: int = 0

    def __str__(self) -> str:
        """Return the position as HTTP clients write it."""
        if self.kind == "time":
            seconds, ns = divmod(self.value, _NS_PER_S)
            return f"@{seconds}.{ns:09d}"
        return {"sequence": str(self.value), "ago": f"-{self.value // 10**6}ms"}.get(self.kind, self.kind)

    def at(self, now_ns: int) -> "Position":
        """Return the position with a time instead of how long ago that is."""
        return Position("time", max(0, now_ns - self.value)) if self.kind == "ago" else self

    def sequence_in(self, log: TimedLog) -> int:
        """Resolve to a sequence in this log now, from its first to its end. May read; raises LogReadError."""
        assert self.kind != "ago"
        if self.kind == "time":
            return sequence_at(log, self.value)
        first, end = log.first_sequence, log.next_sequence
        return {"earliest": first, "latest": end}.get(self.kind, max(first, min(self.value, end)))


EARLIEST, LATEST = Position("earliest"), Position("latest")


def sequence_of(text: str) -> int | None:
    """Return the sequence that a position is; None: it is another kind of position, or none."""
    return int(text) if _SEQUENCE.fullmatch(text) else None


def parse_position(text: str, now_ns: int) -> Position:
    """Parse a position; `now_ns` is the wall clock. Raises ValueError if the text is not a position."""
    if text in ("earliest", "latest"):
        return EARLIEST if text == "earliest" else LATEST
    if (sequence := sequence_of(text)) is not None:
        return Position("sequence", sequence)
    if text.startswith("-"):
        return Position("ago", parse_duration_ns(text[1:])).at(now_ns)
    if text.startswith("@"):
        return Position("time", _parse_time_ns(text[1:]))
    raise ValueError(f"{text!r} is not {FORMS}")


def parse_typed_position(text: str, zone: tzinfo | None = None) -> Position:
    """Parse a position as people type it.

    Args:
        zone: The zone of a time that has none; None: the local one.

    Raises:
        ValueError: The text is not a position.
    """
    if text in ("earliest", "latest", "now"):
        return EARLIEST if text == "earliest" else LATEST
    if (sequence := sequence_of(text)) is not None:
        return Position("sequence", sequence)
    time_ns = _typed_time_ns(text.removeprefix("@"), zone, is_unix=text.startswith("@"))
    if time_ns is not None:
        return Position("time", max(0, time_ns))
    return Position("ago", parse_long_duration_ms(text.removeprefix("-")) * 10**6)


def _typed_time_ns(text: str, zone: tzinfo | None, *, is_unix: bool) -> int | None:
    """Return Unix nanoseconds of a time, or of Unix seconds; None if the text is neither."""
    if is_unix and (unix := _UNIX_S.fullmatch(text)):
        return _unix_ns(unix)
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            time = time.replace(tzinfo=zone)
        whole_s = int(time.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError):
        return None
    more = _MORE_DIGITS.search(text)  # Python reads microseconds
    return whole_s * _NS_PER_S + time.microsecond * 1000 + (int(more[1].ljust(3, "0")) if more else 0)


def _unix_ns(unix: re.Match[str]) -> int:
    return int(unix[1]) * _NS_PER_S + int((unix[2] or "").ljust(9, "0"))


def _parse_time_ns(text: str) -> int:
    if unix := _UNIX_S.fullmatch(text):
        return _unix_ns(unix)
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
