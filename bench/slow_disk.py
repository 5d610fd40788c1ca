"""Simulate a disk that takes 1 s for each read of a segment, without a page cache."""

import time
from pathlib import Path

from trio_nsq.log import Files

_READ_S = 1.0
_read = Files.read


def _slow_read(self: Files, fd: int, size: int, offset: int) -> bytes:
    if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".log":
        time.sleep(_READ_S)
    return _read(self, fd, size, offset)


def _nothing(self: Files, fd: int, size: int, offset: int) -> bytes | None:
    return None


Files.read = _slow_read  # type: ignore[method-assign]
Files.read_cached = _nothing  # type: ignore[method-assign]
