"""Numbers, sizes and times as text, and text of strangers as HTML: the filters of templates."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from ...fleet.cluster import progress_of
from ...text.wording import count_of
from ..messages.visible import visible

UNKNOWN = "\N{EN DASH}"
_MAX_HTML = 8000
"""Characters of the HTML of one text. The escape of a character is about 80 times as long as it."""
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Return a number with commas; one below 10 that is not whole with a decimal."""
    if value is None:
        return UNKNOWN
    if value != int(value) and abs(value) < 10:
        return f"{value:.1f}"
    return f"{round(value):,}"


def short(value: float) -> str:
    """Return a number with at most four characters: `7.5`, `1,204` as `1.2k`, `3M`."""
    for limit, divisor, unit in ((1000, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if abs(value) < limit:
            count = value / divisor
            digits = 0 if abs(count) >= 100 else 1 if abs(count) >= 1 else 2
            text = f"{count:.{digits}f}"
            return (text.rstrip("0").rstrip(".") if digits else text) + unit
    return f"{value:.0e}"


def size(value: float | None) -> str:
    """Return a number of bytes with its unit."""
    if value is None:
        return UNKNOWN
    for unit in _SIZES:
        if abs(value) < 1024 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def age(value_ms: float | None) -> str:
    """Return a duration in milliseconds as `350 ms`, `4.2 s`, `5 min`, `3 h` or `8 d`."""
    if value_ms is None:
        return UNKNOWN
    seconds = value_ms / 1000
    for limit, divisor, unit in (
        (1, 0.001, "ms"),
        (120, 1, "s"),
        (7200, 60, "min"),
        (172_800, 3600, "h"),
    ):
        if seconds < limit:
            count = seconds / divisor
            return f"{count:.1f} {unit}" if unit == "s" and count < 10 else f"{count:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.1f} %"


def quantile(value: float) -> str:
    """Return 0.99 as `p99`, 0.999 as `p99.9`, and 1 as `max`."""
    return "max" if value == 1 else f"p{value * 100:g}"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Return a count with its noun: `1 topic`, `2 topics`."""
    return f"{count:,} {plural_noun}" if plural_noun and count != 1 else count_of(count, noun)


def moment(unix_s: float | None) -> str:
    """Return a time in UTC; `UNKNOWN` for None and 0."""
    if not unix_s:
        return UNKNOWN
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def nanoseconds(value_ns: int | None) -> str:
    """Return a time in Unix nanoseconds in UTC, with microseconds."""
    if value_ns is None or not 0 <= value_ns < 253_402_300_800 * 10**9:
        return UNKNOWN
    whole = datetime.fromtimestamp(value_ns // 10**9, UTC)
    return f"{whole:%Y-%m-%d %H:%M:%S}.{value_ns % 10**9 // 1000:06d}"


def since(unix_s: float | None) -> str:
    """Return the time that has passed since a moment."""
    return age((time.time() - unix_s) * 1000) if unix_s else UNKNOWN


def visible_text(text: Any) -> Markup:
    """Return text of strangers as HTML, with its invisible characters escaped and marked."""
    html, shown = visible(str(text), _MAX_HTML)
    return html if shown == len(str(text)) else html + "…"


FILTERS: dict[str, Callable[..., Any]] = {
    "number": number,
    "bytes": size,
    "age": age,
    "percent": percent,
    "progress": progress_of,
    "quantile": quantile,
    "plural": plural,
    "moment": moment,
    "since": since,
    "nanoseconds": nanoseconds,
    "visible": visible_text,
}
