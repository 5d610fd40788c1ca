"""Writing parts to a file, compiled: a small write calls this for each topic and round."""

import os
from collections.abc import Sequence
from typing import Final

_IOV_MAX: Final[int] = os.sysconf("SC_IOV_MAX")


def write_all(fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts one after the other from `offset` on, continuing partial writes. Raises OSError."""
    for start in range(0, len(parts), _IOV_MAX):
        group = parts[start : start + _IOV_MAX] if len(parts) > _IOV_MAX else parts
        size = 0
        for part in group:
            size += len(part)
        written = os.pwritev(fd, group, offset)
        if written < size:
            rest = memoryview(b"".join(group))
            while written < size:
                written += os.pwrite(fd, rest[written:], offset + written)
        offset += size
