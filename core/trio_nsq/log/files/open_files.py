"""Files that can be used at any time although only so many are open: a topic may have thousands of segments."""

import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from errno import EBADF, EMFILE
from pathlib import Path
from threading import RLock

from .file_system import Files

_FEWEST = 16
_MOST = 4096
_CLOSED = -1


def reasonable_limit() -> int:
    """How many files a broker's logs may keep open: a quarter of what the process may, the rest is its clients'."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if limit == resource.RLIM_INFINITY else max(_FEWEST, min(_MOST, limit // 4))


class LogFile:
    """A file; made by `OpenFiles`.

    `with` gives a descriptor that is good for as long as the block lasts. Threads may do so side by side, and one of
    them within the block, too. It raises OSError if the file cannot be opened again, or was closed.
    """

    def __init__(self, path: Path, open_files: "OpenFiles") -> None:
        self.path = path
        self._open_files = open_files
        # The rest is for OpenFiles, under its lock.
        self.fd = _CLOSED
        self.users = 0
        self.held = False
        self.given_back = False

    def __enter__(self) -> int:
        return self._open_files.use(self)

    def __exit__(self, *exc_info: object) -> None:
        self._open_files.unuse(self)

    @property
    def is_open(self) -> bool:
        """Whether `with` finds a descriptor, unless that is closed in the meantime."""
        return self.fd != _CLOSED

    def hold(self, held: bool) -> None:
        """Keep the descriptor, or do so no longer.

        What was written to one descriptor can be synced by another, but only the first is sure to be told if the
        kernel could not write it. And a file that is unlinked cannot be opened again.
        """
        self._open_files.hold(self, held)

    def close(self) -> None:
        """Give the file back; who is using it may finish."""
        self._open_files.give_back(self)


class OpenFiles:
    """The files that are open; the one that was not used for longest is closed when there are too many.

    Args:
        files: The file system.
        most: So many, but for those that are in use or held.
    """

    def __init__(self, files: Files, most: int) -> None:
        self.files = files
        self._most = most
        # Reentrant: a segment that nobody has any more gives its file back from within the garbage collector.
        self._lock = RLock()
        self._count = 0
        self._idle: OrderedDict[LogFile, None] = OrderedDict()  # these may be closed, the first of them first

    def create(self, path: Path) -> LogFile:
        """Make a new file. Raises OSError."""
        return self._first_opened(path, self.files.create)

    def open(self, path: Path) -> LogFile:
        """Open a file. Raises OSError."""
        return self._first_opened(path, self.files.open)

    def _first_opened(self, path: Path, how: Callable[[Path], int]) -> LogFile:
        file = LogFile(path, self)
        with self._lock:
            self._open(file, how)
            self._settle(file)
        return file

    def _open(self, file: LogFile, how: Callable[[Path], int]) -> None:
        try:
            file.fd = how(file.path)
        except OSError as exc:
            if exc.errno != EMFILE or not self._idle:
                raise
            self._close_idle(0)  # the process has too many of other kinds
            file.fd = how(file.path)
        self._count += 1

    def use(self, file: LogFile) -> int:
        """See `LogFile`."""
        with self._lock:
            if file.fd == _CLOSED:
                if file.given_back:
                    raise OSError(EBADF, os.strerror(EBADF))
                self._open(file, self.files.open)
            file.users += 1
            if not file.held:  # then it is not idle
                self._settle(file)
            return file.fd

    def unuse(self, file: LogFile) -> None:
        """The end of a `use`."""
        with self._lock:
            file.users -= 1
            if not file.held or file.given_back:
                self._settle(file)

    def hold(self, file: LogFile, held: bool) -> None:
        """See `LogFile.hold`. Raises OSError if it cannot be opened."""
        if file.held == held:
            return
        with self._lock:
            if held and file.fd == _CLOSED:
                self._open(file, self.files.open)
            file.held = held
            self._settle(file)

    def give_back(self, file: LogFile) -> None:
        """See `LogFile.close`."""
        with self._lock:
            file.given_back = True
            self._settle(file)

    def _settle(self, file: LogFile) -> None:
        self._idle.pop(file, None)
        if file.fd != _CLOSED and not file.users:
            if file.given_back:
                self._close(file)
            elif not file.held:
                self._idle[file] = None
        self._close_idle(self._most)

    def _close_idle(self, down_to: int) -> None:
        while self._count > down_to and self._idle:
            file, _ = self._idle.popitem(last=False)
            self._close(file)

    def _close(self, file: LogFile) -> None:
        fd, file.fd = file.fd, _CLOSED
        self._count -= 1
        self.files.close(fd)
