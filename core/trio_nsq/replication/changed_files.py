"""The files and folders that a replica has changed and not synced."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from errno import ELOOP
from pathlib import Path
from typing import Final

from ..log.files import Files, reasonable_limit
from .inventory import absolute
from .operations import MOST_DATA_BYTES, Kind, Operation, is_at_or_below, parent_of

MOST_CHANGED: Final = 512


class ChangedFiles:
    """Changes files below a folder. Paths are relative, as operations have them. Methods may raise OSError.

    A changed file stays open until it is synced: only then does the kernel report its write errors.
    """

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._root = root
        self._prefix = os.fsencode(root) + b"/"
        self._most = min(MOST_CHANGED, reasonable_limit())
        self._open: dict[bytes, int] = {}
        self._folders: set[bytes] = set()  # names in them were changed

    def path(self, path: bytes) -> Path:
        """Return the absolute path. Raises OSError: a symbolic link is in it, which may lead out of the folder."""
        found = self._name(path)
        self._check(path, found)
        return found

    def _name(self, path: bytes) -> Path:
        """As `path`, for changes of the name: it may be that of a symbolic link."""
        found, at = absolute(self._root, path), path
        while at := parent_of(at):
            self._check(at, found)
        return found

    def _check(self, at: bytes, path: Path) -> None:
        if stat.S_ISLNK(self.mode(at)):
            raise OSError(ELOOP, "it is, or leads over, a symbolic link", str(path))

    def mode(self, path: bytes) -> int:
        """Return the type of what has this path, a constant of `stat`; 0: nothing."""
        return self._files.kind(self._prefix + path)

    def sync_if_many(self) -> None:
        """Sync if many files are changed, because they are open."""
        if len(self._open) + len(self._folders) >= self._most:
            self.sync()

    # ------------------------------------------------------------------ operations

    def do(self, operation: Operation) -> None:
        """Do an operation. Raises FileNotFoundError, NotADirectoryError: what it changes is not there."""
        self.sync_if_many()
        path = operation.path
        match operation.kind:
            case Kind.WRITE:
                self.write(path, operation.position, operation.data)
            case Kind.CREATE:
                self.create(path)
            case Kind.TRUNCATE:
                self.truncate(path, operation.position)
            case Kind.ALLOCATE:
                self.allocate(path, operation.position)
            case Kind.RENAME:
                self.rename(path, operation.to)
            case Kind.LINK:
                self.copy(path, operation.to)
            case Kind.UNLINK:
                self.unlink(path)
            case Kind.CREATE_FOLDER:
                self.create_folder(path)
            case Kind.REMOVE_FOLDER:
                self.remove_folder(path)

    def redo(self, operation: Operation, *, names_older: bool) -> None:
        """Do an operation that may be done already, in whole or in part, and later ones, too.

        Args:
            names_older: The result of `NamesSince.add`.
        """
        is_folder = stat.S_ISDIR(self.mode(operation.path))
        if is_folder and operation.kind is Kind.CREATE_FOLDER:
            self.remove_folder(operation.path)  # a later one, or with what comes later
        if is_folder and operation.kind is Kind.RENAME and not names_older:
            self.remove_folder(operation.to)  # otherwise the folder cannot get the name again
        with suppress(FileNotFoundError, NotADirectoryError):
            self.do(operation)

    # ------------------------------------------------------------------ changes

    def write(self, path: bytes, offset: int, *data: bytes | memoryview) -> None:
        self._files.write(self._descriptor(path), offset, data)

    def write_back(self, path: bytes, size: int, offset: int) -> None:
        """Have bytes that were written reach the disk soon; those that are there are kept in memory no longer."""
        self._files.write_back(self._descriptor(path), size, offset)

    def truncate(self, path: bytes, size: int) -> None:
        self._files.truncate(self._descriptor(path), size)

    def cut(self, path: bytes, size: int) -> None:
        """As `truncate`; a file that is shorter stays so."""
        if self._files.size(self._descriptor(path)) > size:
            self.truncate(path, size)

    def allocate(self, path: bytes, size: int) -> None:
        """As `Files.allocate`; a file that is larger stays as it is."""
        fd = self._descriptor(path)
        if self._files.size(fd) < size:
            self._files.allocate(fd, size)

    def _descriptor(self, path: bytes) -> int:
        fd = self._open.get(path)
        if fd is None:
            fd = self._open[path] = self._files.open(self.path(path))
        return fd

    def create(self, path: bytes) -> None:
        """Create an empty file, or empty the existing one."""
        self._close(path)
        self._open[path] = self._files.create_or_empty(self.path(path))
        self._change_name(path)

    def copy(self, path: bytes, to: bytes) -> None:
        """Copy a file, replacing a file of that name."""
        pieces = self.content(path)
        first = next(pieces, None)  # before the copy is created: there may be no such file
        self.create(to)
        for offset, data in (first, *pieces) if first is not None else ():
            self.write(to, offset, data)

    def content(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the content of a file, each piece with its offset."""
        fd = self._files.open_read_only(self.path(path))
        try:
            offset = 0
            while data := self._files.read_fully(fd, MOST_DATA_BYTES, offset):
                yield offset, data
                offset += len(data)
        finally:
            self._files.close(fd)

    def create_folder(self, path: bytes) -> None:
        self._files.create_folder(self.path(path))
        self._change_name(path)

    def rename(self, path: bytes, to: bytes) -> None:
        self._files.rename(self._name(path), self._name(to))
        self._close(to)
        for each in [each for each in self._open if is_at_or_below(each, path)]:
            self._open[to + each[len(path) :]] = self._open.pop(each)
        for each in [each for each in self._folders if is_at_or_below(each, path)]:
            self._folders.remove(each)
            self._folders.add(to + each[len(path) :])
        self._change_name(path)
        self._change_name(to)

    def unlink(self, path: bytes) -> None:
        self._files.unlink(self._name(path))
        self._close(path)
        self._change_name(path)

    def remove_folder(self, path: bytes) -> None:
        """Remove a folder, and what is in it; does nothing if there is none."""
        self._files.remove_folder(self.path(path))
        for each in [each for each in self._open if is_at_or_below(each, path)]:
            self._close(each)
        self._folders = {each for each in self._folders if not is_at_or_below(each, path)}
        self._change_name(path)

    def _change_name(self, path: bytes) -> None:
        self._folders.add(parent_of(path))

    # ------------------------------------------------------------------ syncs

    def sync(self) -> None:
        """Make all changes durable, and close all files."""
        for path in list(self._open):
            self._files.sync(self._open[path])
            self._close(path)
        # A folder is synced before the one that has its name; the order makes no difference after all of it.
        for path in sorted(self._folders, reverse=True):
            self._files.sync_folder(self.path(path))
        self._folders.clear()

    def sync_below(self, path: bytes) -> None:
        """Make the changes at and below a path durable."""
        for each in [each for each in self._open if is_at_or_below(each, path)]:
            self._files.sync(self._open[each])
            self._close(each)
        for each in [each for each in self._folders if is_at_or_below(each, path)]:
            self._files.sync_folder(self.path(each))
            self._folders.remove(each)

    def _close(self, path: bytes) -> None:
        if (fd := self._open.pop(path, None)) is not None:
            self._files.close(fd)

    def close(self) -> None:
        """Close all files."""
        for path in list(self._open):
            self._close(path)
