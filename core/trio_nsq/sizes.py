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
_SIZE = re.compile(rf"(\d{{1,15}})({'|'.join(_BYTES_PER_UNIT)})")
UNLIMITED = "unlimited"


def parse_size(text: str) -> int:
    """Parse a size such as `4096`, `500MB` or `10GiB` to bytes; `unlimited` is -1. Raises ValueError."""
    if text == UNLIMITED:
        return -1
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 4096, 500MB or 10GiB, nor {UNLIMITED}")
    return int(found[1]) * _BYTES_PER_UNIT[found[2]]


def size_text(size: int) -> str:
    """Format a size, in the largest unit that divides it, so that `parse_size` returns the same number."""
    if size < 0:
        return UNLIMITED
    units = sorted(_BYTES_PER_UNIT, key=lambda unit: _BYTES_PER_UNIT[unit], reverse=True)
    unit = next(unit for unit in units if size % _BYTES_PER_UNIT[unit] == 0)
    return f"{size // _BYTES_PER_UNIT[unit]}{unit}" if size else "0"
