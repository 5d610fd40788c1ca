"""Writing parts to a file, compiled: a small write calls this for each topic and round."""

import os
from collections.abc import Sequence
from typing import Final

_IOV_MAX: Final[int] = os.sysconf("SC_IOV_MAX")


def write_all(fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts one after the other from `offset` on, continuing partial writes. Raises OSError."""
    if len(parts) <= _IOV_MAX:
        _write_group(fd, offset, parts)
        return
    for start in range(0, len(parts), _IOV_MAX):
        offset = _write_group(fd, offset, parts[start : start + _IOV_MAX])


def _write_group(fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> int:
    """Write as many parts as one system call takes, and return the offset after them."""
    size = 0
    for part in parts:
        size += len(part)
    written = os.pwritev(fd, parts, offset)
    if written < size:
        rest = memoryview(b"".join(parts))
        while written < size:
            written += os.pwrite(fd, rest[written:], offset + written)
    return offset + size
