"""RFC 3339 times beside the Unix nanoseconds of JSON records."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache

_NS_PER_S = 1_000_000_000
_SUFFIX = "_ns"


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=64)  # the messages of a batch have the same time
def rfc3339(time_ns: int) -> str | None:
    """Return Unix nanoseconds as `2026-11-23T00:34:50.123456789Z`; None: past the year 9999."""
    seconds, ns = divmod(time_ns, _NS_PER_S)
    try:
        return f"{_second(seconds)}.{ns:09d}Z"
    except (OverflowError, ValueError, OSError):
        return None


def with_times(record: Mapping[str, object]) -> dict[str, object]:
    """Return a JSON record with an RFC 3339 time after each Unix time: `due` after `due_ns`; null stays null.

    Every field whose name ends with `_ns` is a Unix time, also in objects inside the record.
    """
    result: dict[str, object] = {}
    for name, value in record.items():
        result[name] = with_times(value) if isinstance(value, dict) else value
        if name.endswith(_SUFFIX):
            result[name.removesuffix(_SUFFIX)] = rfc3339(value) if isinstance(value, int) else None
    return result
