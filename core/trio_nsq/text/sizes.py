"""Parse and format sizes in bytes, as people write them."""

import re

_BYTES_PER_UNIT = {
    "": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# Not in any mix of cases: Mb are megabits.
_UNITS = {
    written: factor
    for unit, factor in _BYTES_PER_UNIT.items()
    for written in (unit, unit.upper(), unit.lower())
}
_SIZE = re.compile(rf"([0-9]{{1,18}})({'|'.join(_UNITS)})")
UNLIMITED = "unlimited"


def parse_size(text: str) -> int:
    """Parse a size such as `4096`, `500MB` or `10GiB` to bytes; `unlimited` is -1. Raises ValueError."""
    if text == UNLIMITED:
        return -1
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 4096, 500MB or 10GiB, nor {UNLIMITED}")
    size = int(found[1]) * _UNITS[found[2]]
    if size >= 2**63:
        raise ValueError(f"{text!r} is 8 EiB or more")
    return size


def size_text(size: int) -> str:
    """Format a size, in the largest unit that divides it, so that `parse_size` returns the same number."""
    if size < 0:
        return UNLIMITED
    units = sorted(_BYTES_PER_UNIT, key=lambda unit: _BYTES_PER_UNIT[unit], reverse=True)
    unit = next(unit for unit in units if size % _BYTES_PER_UNIT[unit] == 0)
    return f"{size // _BYTES_PER_UNIT[unit]}{unit}" if size else "0"
