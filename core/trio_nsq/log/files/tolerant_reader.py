"""Reading a file on a disk that may fail here and there."""

import logging
import sys
from bisect import bisect_right
from errno import EIO
from time import monotonic

from ..errors import ReadWouldWaitError
from .file_system import Files
from .open_files import LogFile

logger = logging.getLogger("trio_nsq.log")

PATIENCE_S = 10.0
"""A place that the disk has not been able to read for so long is given up, as damaged. Not at once, for storage at the
other end of a network may come back; and not never, for one bad sector would hold up all that lies behind it."""
_BLOCK_BYTES = 4096


class TolerantReader:
    """Reads a file past the places that cannot be read: they count as zeros, which are no record.

    Args:
        files: The file system.
        file: The file.
    """

    def __init__(self, files: Files, file: LogFile) -> None:
        self._files = files
        self._file = file
        self._failing: dict[int, float] = {}  # blocks that cannot be read, and since when by `monotonic`
        self._given_up: list[tuple[int, int]] = []  # [start, end), ascending

    def read(self, size: int, offset: int, needed: int, file_end: int) -> bytes:
        """The bytes from `offset` on: not more than `size`, nor less than `needed` unless the file ends before.

        `file_end` is where what is of interest in the file ends.

        Raises:
            OSError: The operating system refused, and it is too early to give up the place.
        """
        data = b""
        while len(data) < max(1, needed):
            at = offset + len(data)
            start, end = self._next_given_up(at)
            if start <= at:
                data += bytes(min(end, offset + size) - at)
                continue
            try:
                with self._file as fd:
                    more = self._files.read(fd, min(start, offset + size) - at, at)
            except OSError as exc:
                if exc.errno != EIO or not self._give_up(at, file_end):
                    raise
                continue
            if not more:
                break
            data += more
            for block in [block for block in self._failing if at <= block < at + len(more)]:
                del self._failing[block]
        return data

    def read_now(self, size: int, offset: int, needed: int) -> bytes:
        """As `read`, without waiting for the disk. Raises ReadWouldWaitError."""
        data = b""
        while len(data) < max(1, needed):
            more = None
            if self._file.is_open and not self._failing and not self._given_up:
                with self._file as fd:
                    more = self._files.read_now(fd, size - len(data), offset + len(data))
            if more is None:
                raise ReadWouldWaitError(self._file.path)
            if not more:
                break
            data = data + more if data else more
        return data

    def _next_given_up(self, offset: int) -> tuple[int, int]:
        """The first place given up that ends after `offset`."""
        index = bisect_right(self._given_up, offset, key=lambda place: place[1])
        return self._given_up[index] if index < len(self._given_up) else (sys.maxsize, sys.maxsize)

    def _give_up(self, offset: int, file_end: int) -> bool:
        """Give up the block at `offset`, and those like it that follow, if it has been failing for long enough."""
        start = offset - offset % _BLOCK_BYTES
        now_s = monotonic()
        if now_s - self._failing.setdefault(start, now_s) < PATIENCE_S:
            return False
        del self._failing[start]
        # Further and further ahead: each attempt may take a disk seconds. So a stretch of bad blocks costs at most as
        # many good ones behind it.
        end, step = start + _BLOCK_BYTES, _BLOCK_BYTES
        while end < file_end and not self._is_readable(end):
            step *= 2
            end += step
        end = min(end, file_end)
        logger.error(
            "%s: the disk cannot read bytes %d to %d, passed over as damaged", self._file.path, start, end
        )
        self._given_up.append((start, end))
        self._given_up.sort()
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
