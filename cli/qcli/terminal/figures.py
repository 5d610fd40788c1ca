"""Figures in few characters, for screens: counts, rates, ages, and bars for a series of numbers."""

import os
from collections.abc import Sequence
from math import ceil

_BARS = "▁▂▃▄▅▆▇"  # the full block would touch the line above
_ASCII_BARS = "_.:-=+#"


def speaks_unicode() -> bool:
    """Return whether the user's locale is UTF-8, so that the terminal can show more than ASCII."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return "utf8" in next(filter(None, names), "").lower().replace("-", "")


def short_count(number: float) -> str:
    """Format a count in at most four characters, such as `9999`, `12k`, `1.2M`; it is rounded down."""
    if number < 10_000:
        return f"{int(number)}"
    for unit in "kMGTP":
        number /= 1000
        if number < 10:
            return f"{int(number * 10) / 10}{unit}"
        if number < 1000:
            return f"{int(number)}{unit}"
    return "many"


def short_size(count: float) -> str:
    """Format bytes in at most four characters, such as `999B`, `1.5G`, `112G` (binary units); it is rounded down."""
    for unit in "BKMGTP":
        if count < 10 and unit != "B":
            return f"{int(count * 10) / 10}{unit}"
        if count < 1000:
            return f"{int(count)}{unit}"
        count /= 1024
    return "many"


def short_rate(per_second: float) -> str:
    """Format a rate in at most four characters; below 10 with a decimal."""
    return f"{per_second:.1f}" if 0 < per_second < 9.95 else short_count(per_second)


def short_age(age_ms: float) -> str:
    """Format an age in at most four characters, such as `0.3s`, `59s`, `23h`, `400d`; it is rounded down."""
    if 0 < age_ms < 10_000:
        return f"{int(age_ms / 100) / 10:.1f}s"
    seconds = int(age_ms / 1000)
    for unit, unit_s, next_s in (("s", 1, 60), ("m", 60, 3600), ("h", 3600, 86_400)):
        if seconds < next_s:
            return f"{seconds // unit_s}{unit}" if seconds else "0"
    days = seconds // 86_400
    return f"{days}d" if days < 1000 else f"{days // 365}y"


def age(age_ms: float) -> str:
    """Format an age with two units, such as `3m12s` or `4h05m`; below a minute as `short_age`."""
    seconds = int(age_ms / 1000)
    for unit, unit_s, part, part_s in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= unit_s:
            return f"{seconds // unit_s}{unit}{seconds % unit_s // part_s:02}{part}"
    return short_age(age_ms)


def shortened(text: str, width: int, *, unicode: bool = True) -> str:
    """Cut the middle of a name, because names often differ at the end only."""
    if len(text) <= width:
        return text
    if width <= 0:
        return ""
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}{'…' if unicode else '~'}{text[len(text) - end :]}"


def sparkline(series: Sequence[float | None], width: int, *, unicode: bool = True) -> str:
    """Draw the last `width` numbers as bars up to the largest of them; a blank for None. Right-aligned."""
    bars = _BARS if unicode else _ASCII_BARS
    last = series[-width:] if width > 0 else ()
    most = max((number for number in last if number is not None), default=0) or 1

    def bar(number: float | None) -> str:
        return " " if number is None else bars[ceil(number / most * (len(bars) - 1))]

    return "".join(map(bar, last)).rjust(width)
