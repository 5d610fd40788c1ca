"""Parse and format durations, for HTTP and command lines: Go's format, and the same with days."""

import re

_NS_PER_UNIT = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_PART = re.compile(r"(?=\.?[0-9])([0-9]{0,18})(?:\.([0-9]{0,18}))?(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_MS_PER_DAY = 24 * 3600 * 1000
_MS_PER_UNIT = {"d": _MS_PER_DAY, "h": 3600 * 1000, "m": 60 * 1000, "s": 1000, "ms": 1}
FOREVER = "forever"
MAX_DURATION_MS = 36_525 * _MS_PER_DAY
"""100 years, the limit of a duration: times in nanoseconds since 1970 must fit into 63 bits. Go's is 292 years."""


def parse_duration_ns(text: str) -> int:
    """Parse a duration in Go's format, such as `500ms` or `1m30s`; return nanoseconds. Raises ValueError."""
    if text == "0":
        return 0
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration such as 500ms, 2s or 1m30s")
    total_ns = 0
    for whole, fraction, unit in _DURATION_PART.findall(text):
        total_ns += int(whole + fraction) * _NS_PER_UNIT[unit] // 10 ** len(fraction)
    _refuse_too_long(text, total_ns // 10**6)
    return total_ns


def parse_duration_ms(text: str) -> int:
    """Parse a duration in Go's format to whole milliseconds. Raises ValueError, also for a shorter one."""
    _refuse_number(text, "ms, m, h")
    total_ns = parse_duration_ns(text)
    if 0 < total_ns < 10**6:
        raise ValueError(f"{text!r} is less than a millisecond")
    return round(total_ns / 10**6)


def parse_long_duration_ms(text: str, besides: str = "") -> int:
    """Parse a duration that may begin with days, `7d` or `1d12h`, to milliseconds.

    Args:
        besides: The end of the error message.

    Raises:
        ValueError: It is not such a duration.
    """
    _refuse_number(text, "ms, m, h, d")
    days = re.match(r"([0-9]{1,18})d", text)
    rest = text[days.end() :] if days else text
    if (rest or not days) and rest != "0" and not _DURATION.fullmatch(rest):
        raise ValueError(f"{text!r} is not a duration such as 500ms, 1m30s, 12h, 7d or 1d12h{besides}")
    rest_ms = parse_duration_ms(rest) if rest else 0
    total_ms = rest_ms + (int(days[1]) * _MS_PER_DAY if days else 0)
    _refuse_too_long(text, total_ms)
    return total_ms


def parse_retention_ms(text: str) -> int:
    """Parse a duration as `parse_long_duration_ms` does; `forever` is -1. Raises ValueError."""
    return -1 if text == FOREVER else parse_long_duration_ms(text, f", nor {FOREVER}")


def duration_text(value_ms: int) -> str:
    """Format a duration that `parse_long_duration_ms` parses."""
    text = ""
    for unit, unit_ms in _MS_PER_UNIT.items():
        count, value_ms = divmod(value_ms, unit_ms)
        text += f"{count}{unit}" if count else ""
    return text or "0"


def retention_text(value_ms: int) -> str:
    """Format a value that `parse_retention_ms` parses."""
    return FOREVER if value_ms < 0 else duration_text(value_ms)


def _refuse_too_long(text: str, value_ms: int) -> None:
    if value_ms > MAX_DURATION_MS:
        raise ValueError(f"{text!r} is longer than 100 years, the limit")


def _refuse_number(text: str, units: str) -> None:
    if _NUMBER.fullmatch(text) and text != "0":
        raise ValueError(f"{text!r} has no unit: write {text}s for seconds, or {units}")
