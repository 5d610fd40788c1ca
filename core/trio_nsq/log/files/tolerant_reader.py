"""Reading files: past bad blocks of the disk, and through a buffer for consecutive records."""

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable
from errno import EIO

from ..errors import ReadWouldWaitError
from .file_system import Files
from .open_files import LogFile

logger: logging.Logger = logging.getLogger("trio_nsq.log")

PATIENCE_S = 10.0
"""Time after which a block that cannot be read counts as damaged. Network storage may recover within it. Without this
limit, one bad sector would make all later records unreachable."""
_BLOCK_BYTES = 4096


class TolerantReader:
    """Reads a file past bad blocks: after `PATIENCE_S` it returns them as zeros, which are not a valid record.

    A file that is only read is not waited for.
    """

    def __init__(self, files: Files, file: LogFile) -> None:
        self._files = files
        self._file = file
        self._failing: dict[int, float] = {}  # blocks that cannot be read: time of the first failure
        self._skipped: list[tuple[int, int]] = []  # [start, end), ascending

    def read(self, size: int, offset: int, needed: int, file_end: int) -> bytes:
        """Read at most `size` bytes from `offset` on, and at least `needed` unless the file ends before.

        `file_end` is the end of the part of the file that matters.

        Raises:
            OSError: The operating system failed to read, and `PATIENCE_S` have not passed.
        """
        data = b""
        while len(data) < max(1, needed):
            at = offset + len(data)
            start, end = self._next_skipped(at)
            if start <= at:
                data += bytes(min(end, offset + size) - at)
                continue
            try:
                with self._file as fd:
                    more = self._files.read(fd, min(start, offset + size) - at, at)
            except OSError as exc:
                if exc.errno != EIO or not self._skip(at, file_end):
                    raise
                continue
            if not more:
                break
            data += more
            for block in [block for block in self._failing if at <= block < at + len(more)]:
                del self._failing[block]
        return data

    def read_cached(self, size: int, offset: int, needed: int) -> bytes:
        """As `read`, without waiting for the disk. Raises ReadWouldWaitError."""
        data = b""
        while len(data) < max(1, needed):
            more = None
            if self._file.is_open and not self._failing and not self._skipped:
                with self._file as fd:
                    more = self._files.read_cached(fd, size - len(data), offset + len(data))
            if more is None:
                raise ReadWouldWaitError(self._file.path)
            if not more:
                break
            data = data + more if data else more
        return data

    def _next_skipped(self, offset: int) -> tuple[int, int]:
        """Return the first skipped range that ends after `offset`."""
        index = bisect_right(self._skipped, offset, key=lambda skipped: skipped[1])
        return self._skipped[index] if index < len(self._skipped) else (sys.maxsize, sys.maxsize)

    def _skip(self, offset: int, file_end: int) -> bool:
        """Skip the block at `offset`, and the bad blocks after it, if it has failed for `PATIENCE_S`."""
        start = offset - offset % _BLOCK_BYTES
        now_s = self._files.monotonic_s()
        patience_s = 0.0 if self._files.is_read_only else PATIENCE_S
        if now_s - self._failing.setdefault(start, now_s) < patience_s:
            return False
        del self._failing[start]
        # Steps double, because each attempt may take the disk seconds. So a range of bad blocks loses at most as many
        # good blocks after it.
        end, step = start + _BLOCK_BYTES, _BLOCK_BYTES
        while end < file_end and not self._is_readable(end):
            step *= 2
            end += step
        end = min(end, file_end)
        if not self._files.is_read_only:
            what = "%s: the disk cannot read bytes %d to %d, skipped as damaged"
            logger.error(what, self._file.path, start, end)
        self._skipped.append((start, end))
        self._skipped.sort()
        return True

    def _is_readable(self, offset: int) -> bool:
        try:
            with self._file as fd:
                self._files.read(fd, 1, offset)
        except OSError as exc:
            if exc.errno != EIO:
                raise
            return False
        return True


class Window:
    """A read buffer, so that one system call serves many records.

    Args:
        read: `read(size, offset, needed)` returns at most `size` bytes, and at least `needed` unless the file ends.
        at_a_time: Minimum bytes per read.
    """

    __slots__ = ("_at_a_time", "_read", "_start", "data")

    def __init__(self, read: Callable[[int, int, int], bytes], at_a_time: int) -> None:
        self.data: bytes = b""
        self._start = 0
        self._read = read
        self._at_a_time = at_a_time

    def at(self, offset: int, size: int) -> int:
        """Buffer `size` bytes from `offset` on, and return the position of the first one in `data`."""
        position = offset - self._start
        if position < 0 or position + size > len(self.data):
            self.data = self._read(max(size, self._at_a_time), offset, size)
            self._start, position = offset, 0
        return position

    def clear(self) -> None:
        """Empty the buffer, because the file may have changed."""
        self.data = b""
