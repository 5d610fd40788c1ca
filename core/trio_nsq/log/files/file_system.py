"""The file operations of the log, in one class, so that tests can record each of them or make it fail."""

import os
import shutil
import stat
import threading
import time
from collections.abc import Sequence
from errno import EFBIG, EISDIR, ELOOP, ENXIO
from pathlib import Path
from typing import NamedTuple

from .write_all import write_all

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_KEPT_BYTES = 1024 * 1024
NO_FILE = frozenset((EISDIR, ELOOP, ENXIO))
"""Errors of `Files.open_read_only` and `Files.content` if the path is not a regular file."""
_OTHER_KINDS = {
    stat.S_IFDIR: (EISDIR, "a folder"),
    stat.S_IFIFO: (ENXIO, "a named pipe"),
    stat.S_IFSOCK: (ENXIO, "a socket"),
}
_making_folders = threading.Lock()
"""Held while a folder is created and synced: another thread must not use it before it is durable."""


def temporary_of(path: Path) -> Path:
    """Return the temporary file that `Files.replace` writes the new content to."""
    return path.with_name(path.name + ".tmp")


def _no_file(status: os.stat_result) -> OSError:
    errno, kind = _OTHER_KINDS.get(stat.S_IFMT(status.st_mode), (ENXIO, "a device"))
    return OSError(errno, f"it is {kind}, not a file")


class Space(NamedTuple):
    """The space of a file system, for a user without root's reserve."""

    free_bytes: int
    total_bytes: int


class Files:
    """The real file system. Every method raises OSError as the operating system does.

    Attributes:
        is_read_only: Whether another process owns the files. Then readers do not log damage, and do not wait for blocks
            that cannot be read.
        writes_zeros_ahead: Whether a log may write zeros after its records, which later writes replace.
    """

    is_read_only = False
    writes_zeros_ahead = True
    _buffer = bytearray()  # for `read_cached`: allocating a buffer takes as long as the read

    def create(self, path: Path) -> int:
        """Create a file, private to the user, for reading and writing; it must not exist."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """Open a file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def open_read_only(self, path: Path) -> int:
        """Open a file for reading; anything but a regular file is an error of `NO_FILE`."""
        try:
            # Without O_NONBLOCK the open of a named pipe waits for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            if exc.errno == ENXIO:
                raise _no_file(path.stat()) from exc
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise _no_file(status)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write all parts one after the other from `offset` on, continuing partial writes."""
        write_all(fd, offset, parts)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read up to `size` bytes from `offset` on; fewer at the end of the file."""
        return os.pread(fd, size, offset)

    def read_fully(self, fd: int, size: int, offset: int) -> bytes:
        """Read `size` bytes from `offset` on; fewer only at the end of the file."""
        data = b""
        while len(data) < size and (more := self.read(fd, size - len(data), offset + len(data))):
            data += more
        return data

    def content(self, path: Path, most: int) -> bytes:
        """Read a whole file; if it has more than `most` bytes, raise EFBIG."""
        fd = self.open_read_only(path)
        try:
            size = self.size(fd)
            if size > most:
                raise OSError(EFBIG, f"it has {size:,} bytes; the maximum is {most:,}")
            return self.read_fully(fd, size, 0)
        finally:
            self.close(fd)

    def read_cached(self, fd: int, size: int, offset: int) -> bytes | None:
        """As `read`, without waiting for the disk: only bytes in the page cache. For one thread only.

        Returns:
            None if the first byte is not in memory, cannot be read, or the file system cannot tell.
        """
        if _NOWAIT is None:
            return None
        buffer = self._buffer
        if len(buffer) < size:
            buffer = bytearray(size)
            if size <= _KEPT_BYTES:
                self._buffer = buffer
        room = memoryview(buffer)[:size]
        try:
            count = os.preadv(fd, [room], offset, _NOWAIT)
        except OSError:
            return None
        return bytes(room[:count])

    def prefetch(self, fd: int, size: int, offset: int) -> None:
        """Ask the operating system to load these bytes into memory."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def write_back(self, fd: int, size: int, offset: int) -> None:
        """Ask the operating system to write these bytes to the disk soon, and to keep them in memory no longer.

        It only begins to write what is not on the disk: that is kept until it is asked once more.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def monotonic_s(self) -> float:
        """Return the time of a monotonic clock, seconds. Used to measure for how long a block cannot be read."""
        return time.monotonic()

    def size(self, fd: int) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(fd).st_size

    def space(self, path: Path) -> Space:
        """Return the space of the file system that has this path."""
        found = os.statvfs(path)
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve space for `size` bytes, which read as zeros."""
        os.posix_fallocate(fd, 0, size)

    def sync(self, fd: int) -> None:
        """Return when the file's data, and the metadata needed to read it, is on stable storage."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in this folder are on stable storage."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def kind(self, path: Path | bytes) -> int:
        """Return the type of what has this path, a constant of `stat`; 0: nothing. Links are not followed."""
        try:
            return stat.S_IFMT(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def names(self, path: Path) -> list[str]:
        """Return the names in this folder."""
        return [entry.name for entry in path.iterdir()]

    def create_folder(self, path: Path) -> None:
        """Create a folder, private to the user; it must not exist."""
        path.mkdir(mode=0o700)

    def make_folder(self, path: Path) -> None:
        """Create the folder durably, private to the user, unless it exists. Thread-safe."""
        with _making_folders:
            if not path.is_dir():
                self.create_folder(path)
                try:
                    self.sync_folder(path.parent)
                except OSError:
                    self.remove_folder(path)  # otherwise the next attempt would assume that it is durable
                    raise

    def create_or_empty(self, path: Path) -> int:
        """Create a file, private to the user, or empty the existing one, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file or a folder, replacing a file of the new name."""
        path.replace(to)

    def set_aside(self, path: Path, suffix: str) -> Path:
        """Durably append `suffix` to a file's name, with a number if that name exists, and return the new path."""
        aside, number = path.with_name(path.name + suffix), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}{suffix}-{number}")
        self.rename(path, aside)
        self.sync_folder(path.parent)
        return aside

    def replace(self, path: Path, content: bytes) -> None:
        """Replace the content of a file atomically and durably: temporary file, sync, rename.

        After an error the file has the old or the new content, and the temporary file is removed.
        """
        temporary = temporary_of(path)
        fd = self.create_or_empty(temporary)
        try:
            try:
                self.write(fd, 0, [content])
                self.sync(fd)
            finally:
                self.close(fd)
            self.rename(temporary, path)
        except BaseException:
            try:
                self.unlink(temporary)
            except OSError:
                pass  # the next replacement overwrites it
            raise
        self.sync_folder(path.parent)

    def extend(self, path: Path, offset: int, content: bytes) -> None:
        """Write durably at the end of a file, which is at `offset`. After an error, the file may have a part of it."""
        fd = self.open(path)
        try:
            self.write(fd, offset, [content])
            self.sync(fd)
        finally:
            self.close(fd)

    def link(self, path: Path, to: Path) -> None:
        """Give a file a second name, which must not exist."""
        os.link(path, to)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and its content, as far as that is possible."""
        shutil.rmtree(path, ignore_errors=True)
