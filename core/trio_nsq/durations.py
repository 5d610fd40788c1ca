"""Parse durations in Go's format, for HTTP and command lines."""

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


def parse_duration_ns(text: str) -> int:
    """Parse a duration in Go's format, such as `500ms` or `1m30s`; return nanoseconds. Raises ValueError."""
    if text == "0":
        return 0
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration such as 500ms, 2s or 1m30s")
    total_ns = 0
    for whole, fraction, unit in _DURATION_PART.findall(text):
        total_ns += int(whole + fraction) * _NS_PER_UNIT[unit] // 10 ** len(fraction)
    return total_ns
