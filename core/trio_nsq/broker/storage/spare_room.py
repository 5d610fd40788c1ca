"""Room on the disk that is kept for what lets a full disk become empty again."""

from errno import EDQUOT, ENOSPC
from pathlib import Path
from threading import Lock

from ...log import Files

SPARE_BYTES = 1024 * 1024
"""A state of some ten thousand unfinished messages fits in, and nobody misses it on a disk of today."""


class SpareRoom:
    """A file that holds nothing and takes up room, so that small files can be replaced when there is no other.

    The files of a log are deleted once everything in them is finished, and that is saved. So if the last block of a
    disk were taken by messages, no consumer could ever make room for others.

    Args:
        path: The file. It is gone while the disk is too full for it.
        files: The file system.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self._lock = Lock()
        self._there = False

    def replace(self, path: Path, content: bytes) -> None:
        """As `Files.replace`, in the spare room if there is no other. Raises OSError."""
        try:
            self._files.replace(path, content)
        except OSError as exc:
            if exc.errno not in (ENOSPC, EDQUOT):
                raise
            with self._lock:
                self._give()
                self._files.replace(path, content)  # what it replaces makes room for the next time
                self._take()
        else:
            if not self._there:
                with self._lock:
                    self._take()

    def _give(self) -> None:
        self._there = False
        try:
            self._files.unlink(self._path)
        except OSError:
            pass  # there is none, or it stays where it is

    def _take(self) -> None:
        try:
            fd = self._files.create_or_empty(self._path)
            try:
                self._files.allocate(fd, SPARE_BYTES)
            finally:
                self._files.close(fd)
        except OSError:
            self._give()  # what it got of it
        else:
            self._there = True
