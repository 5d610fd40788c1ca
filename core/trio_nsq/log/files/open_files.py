"""A bounded set of open files, which reopens closed files on use. A topic may have thousands of segments."""

import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from errno import EBADF, EMFILE
from pathlib import Path
from threading import RLock
from typing import Final

from .file_system import Files

_FEWEST: Final = 16
_MOST: Final = 4096
_CLOSED: Final = -1


def reasonable_limit() -> int:
    """Return how many files a broker's logs may keep open: 1/4 of the process's limit, to leave the rest to clients."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if limit == resource.RLIM_INFINITY else max(_FEWEST, min(_MOST, limit // 4))


class LogFile:
    """A file, created by `OpenFiles`.

    `with` returns a descriptor that is valid inside the block. It is thread-safe, and blocks may be nested. It raises
    OSError if the file cannot be reopened, or was closed.
    """

    def __init__(self, path: Path, open_files: "OpenFiles") -> None:
        self.path = path
        self._open_files = open_files
        # Used only by OpenFiles, under its lock.
        self.fd = _CLOSED
        self.users = 0
        self.held = False
        self.closing = False

    def __enter__(self) -> int:
        return self._open_files.use(self)

    def __exit__(self, *exc_info: object) -> None:
        self._open_files.unuse(self)

    @property
    def is_open(self) -> bool:
        """Whether the file has a descriptor now; another thread may close it."""
        return self.fd != _CLOSED

    def hold(self, held: bool) -> None:
        """Keep the descriptor open, or stop doing so.

        Data written through one descriptor can be synced through another, but only the first is guaranteed to get the
        kernel's write errors. An unlinked file cannot be reopened.
        """
        self._open_files.hold(self, held)

    def close(self) -> None:
        """Close the file when no `with` block uses it."""
        self._open_files.close(self)


class OpenFiles:
    """The open files. If there are too many, closes the least recently used one.

    Args:
        most: Maximum number of open files, unless more are in use or held.
    """

    def __init__(self, files: Files, most: int) -> None:
        self.files = files
        self._most = most
        # Reentrant: the garbage collector may close the file of a collected segment at any point.
        self._lock = RLock()
        self._count = 0
        self._idle: OrderedDict[LogFile, None] = (
            OrderedDict()
        )  # files that may be closed, least recently used first

    def create(self, path: Path) -> LogFile:
        """Create a file. Raises OSError."""
        return self._open_first(path, self.files.create)

    def open(self, path: Path) -> LogFile:
        """Open a file. Raises OSError."""
        return self._open_first(path, self.files.open)

    def _open_first(self, path: Path, how: Callable[[Path], int]) -> LogFile:
        file = LogFile(path, self)
        with self._lock:
            self._open(file, how)
            self._update(file)
        return file

    def _open(self, file: LogFile, how: Callable[[Path], int]) -> None:
        try:
            file.fd = how(file.path)
        except OSError as exc:
            if exc.errno != EMFILE or not self._idle:
                raise
            self._close_idle(0)  # other files of the process use up the limit
            file.fd = how(file.path)
        self._count += 1

    def use(self, file: LogFile) -> int:
        """See `LogFile`."""
        with self._lock:
            if file.fd == _CLOSED:
                if file.closing:
                    raise OSError(EBADF, os.strerror(EBADF))
                self._open(file, self.files.open)
            file.users += 1
            if not file.held:  # a held file is never idle
                self._update(file)
            return file.fd

    def unuse(self, file: LogFile) -> None:
        """End a `use`."""
        with self._lock:
            file.users -= 1
            if not file.held or file.closing:
                self._update(file)

    def hold(self, file: LogFile, held: bool) -> None:
        """See `LogFile.hold`. Raises OSError if it cannot be opened."""
        if file.held == held:
            return
        with self._lock:
            if held and file.fd == _CLOSED:
                self._open(file, self.files.open)
            file.held = held
            self._update(file)

    def close(self, file: LogFile) -> None:
        """See `LogFile.close`."""
        with self._lock:
            file.closing = True
            self._update(file)

    def _update(self, file: LogFile) -> None:
        self._idle.pop(file, None)
        if file.fd != _CLOSED and not file.users:
            if file.closing:
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
