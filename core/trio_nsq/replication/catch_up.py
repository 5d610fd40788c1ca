"""Catch-up: the leader copies its data folder to a follower while it goes on writing.

The pieces are a copy made at different times, and all operations since its begin. The follower writes each block and
does each operation again as after a crash: see `Replica`. Before a block is read, all operations so far are sent, so
the block has them already, and perhaps later ones, which come again.

A second name, and a new name for something older than the begin, depend on what the follower has under the first name,
which may be newer, or no copy yet. So what has such names at the end is sent once more, as it is at one moment.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from os import fstat
from typing import NamedTuple, Protocol, TypeAlias

from .inventory import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    FileDigest,
    absolute,
    block_count,
    digest_of,
    list_folder,
)
from .names import NamesSince
from .operations import Kind, Operation, decode_all, joined, parent_of
from .recorder import RecordingFiles
from .stream import OperationStream

_ROUND_BYTES = 1024 * 1024
ONCE_MORE = 64
"""How many names are opened at one moment to be sent once more."""


class Operations(NamedTuple):
    """Operations to do again, in order; `data` as `encode` makes it."""

    data: bytes | memoryview
    last_number: int


class Folder(NamedTuple):
    """A folder, and the names of all that is in it; the path of the data folder itself is empty."""

    path: bytes
    names: frozenset[bytes]


class FileBegin(NamedTuple):
    """A file. The blocks that the follower lacks follow, and its end.

    Attributes:
        is_whole: All blocks follow. Otherwise the follower has the file, or the beginning of it.
    """

    path: bytes
    is_whole: bool


class Block(NamedTuple):
    """A part of the file that was begun."""

    path: bytes
    offset: int
    data: bytes | memoryview


class FileEnd(NamedTuple):
    """The file that was begun had at most this size; it may be shorter by operations that came since its last block."""

    path: bytes
    size: int


class CaughtUp(NamedTuple):
    """The folder has all operations up to this one, and nothing else."""

    number: int


Piece: TypeAlias = Operations | Folder | FileBegin | Block | FileEnd | CaughtUp


class Known(Protocol):
    """What the follower has."""

    def find(self, path: bytes) -> FileDigest | None:
        """Return what it has under a path; None: nothing that is known."""


class CatchUp:
    """The pieces for one follower.

    Args:
        files: Has recorded all changes since `stream` began.
        inventory: What the follower has.
        on_read: Called with the size of each block that was read; may wait.

    Attributes:
        done_bytes: Those of files that the follower has, or was sent. Any thread may ask.
        total_bytes: Those of all files at the begin; 0: not known yet.
    """

    def __init__(
        self,
        files: RecordingFiles,
        stream: OperationStream,
        inventory: Known,
        on_read: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._files = files
        self._root = files.root
        self._stream = stream
        self._inventory = inventory
        self._on_read = on_read
        self.done_bytes: int = 0
        self.total_bytes: int = 0
        self._before = 0  # `done_bytes` at the begin of the present file
        self._number = stream.last_number
        self._names = NamesSince()
        self._there: set[bytes] = set()  # folders that the follower has
        self._again: set[bytes] = set()  # names to send once more
        # The file that is compared with the follower's, and how much of its beginning is not compared.
        self._trusted = (b"", 0)
        self._has_changed = False  # an operation has changed that since the rest was compared

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces. Blocking. Raises OSError: a file cannot be read; TooFarBehind: begin anew."""
        self.total_bytes = self._size_below(b"")
        waiting = [b""]
        while waiting:
            folder = waiting.pop()
            yield from self._operations()
            found: tuple[list[bytes], list[bytes]] | None = None
            with self._files.names_unchanged():
                rest = list(self._operations())
                with suppress(FileNotFoundError, NotADirectoryError):
                    found = list_folder(self._files, self._root, folder, follows_links=True)
            yield from rest
            if found is None:
                continue  # an operation has removed or renamed it
            files, folders = found
            yield Folder(folder, frozenset(files + folders))
            self._there.add(folder)
            for name in files:
                yield from self._file(joined(folder, name))
            waiting += [joined(folder, name) for name in reversed(folders)]
        yield from self._once_more()
        yield CaughtUp(self._number)

    def _size_below(self, folder: bytes) -> int:
        """Return the bytes of all files below a folder, without those that are removed meanwhile."""
        size = 0
        with suppress(FileNotFoundError, NotADirectoryError):
            files, folders = list_folder(self._files, self._root, folder, follows_links=True)
            for name in files:
                with suppress(FileNotFoundError, NotADirectoryError):
                    size += absolute(self._root, joined(folder, name)).stat().st_size
            size += sum(self._size_below(joined(folder, name)) for name in folders)
        return size

    def _operations(self) -> Iterator[Piece]:
        """Yield the operations until now that are not sent; it ends, however many come meanwhile."""
        last = self._stream.last_number
        while self._number < last:
            self._number, pieces = self._stream.after(self._number, _ROUND_BYTES)
            data = b"".join(pieces)
            for operation in decode_all(data):
                self._note(operation)
            yield Operations(data, self._number)

    def _note(self, operation: Operation) -> None:
        """Note what must be sent once more because of an operation."""
        kind, path = operation.kind, operation.path
        trusted, below = self._trusted
        if path == trusted and kind in (Kind.WRITE, Kind.TRUNCATE) and operation.position < below:
            self._has_changed = True
        is_creation = kind in (Kind.CREATE, Kind.CREATE_FOLDER)
        if (
            is_creation
            and (parent := parent_of(path)) not in self._there
            and not self._names.is_created(parent)
        ):
            return  # the follower may not have the folder yet: then the operation does nothing there
        if self._names.add(operation):
            self._again.add(operation.to)

    # ------------------------------------------------------------------ one file

    def _file(self, path: bytes) -> Iterator[Piece]:
        """Yield what the follower lacks of a file."""
        try:
            fd = self._files.open_read_only(absolute(self._root, path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return  # an operation has removed or renamed it, or will
        size = self._files.size(fd)
        try:
            known = self._inventory.find(path)
            if known is not None:
                self._trusted, self._has_changed = (path, known.first_block * BLOCK_BYTES), False
                if not self._begins_with(fd, known):
                    known = None
            yield from self._operations()
            if self._has_changed:
                known = None
            if self._needs_copy(fd, path):
                yield FileBegin(path, is_whole=known is None)
                yield from self._blocks(fd, path, known or FileDigest(0, 0, b""))
        finally:
            self._before += size
            self.done_bytes = self._before
            self._files.close(fd)

    def _begins_with(self, fd: int, known: FileDigest) -> bool:
        """Whether the follower's file is the beginning of this one, as far as its blocks are known."""
        return self._files.size(fd) >= known.size and all(
            self._has_block(known, number, self._read(fd, _size_of(known, number), number * BLOCK_BYTES))
            for number in range(known.first_block, block_count(known.size))
        )

    def _read(self, fd: int, size: int, offset: int) -> bytes:
        data = self._files.read_fully(fd, size, offset)
        self._on_read(len(data))
        return data

    def _needs_copy(self, fd: int, path: bytes) -> bool:
        """Whether the operations do not give the whole content of the file, and this file still has its name."""
        if self._names.is_created(path):
            return False  # what the follower has is exact; a copy would not be, until its end
        try:
            now = absolute(self._root, path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (now.st_dev, now.st_ino) == (fstat(fd).st_dev, fstat(fd).st_ino)

    def _blocks(self, fd: int, path: bytes, known: FileDigest) -> Iterator[Piece]:
        number = known.first_block
        while True:
            yield from self._operations()
            if not self._needs_copy(fd, path):
                return
            at = number * BLOCK_BYTES
            block = self._read(fd, BLOCK_BYTES, at)
            self.done_bytes = self._before + at + len(block)
            if block and not self._has_block(known, number, block):
                yield Block(path, at, block)
            if len(block) < BLOCK_BYTES:
                yield FileEnd(path, at + len(block))
                return
            number += 1

    def _has_block(self, known: FileDigest, number: int, block: bytes) -> bool:
        at = (number - known.first_block) * DIGEST_BYTES
        return (
            len(block) == _size_of(known, number)
            and digest_of(block) == known.digests[at : at + DIGEST_BYTES]
        )

    # ------------------------------------------------------------------ the end

    def _once_more(self) -> Iterator[Piece]:
        """Yield whole files whose names the operations cannot give right, some of them at a time."""
        while True:
            with self._files.names_unchanged():
                # A name that another thread has changed is not recorded before this: files that were not found then
                # would be missing at the end.
                rest = list(self._operations())
            yield from rest
            if not self._again:
                return
            yield from self._some_once_more(sorted(self._again)[:ONCE_MORE])

    def _some_once_more(self, paths: Sequence[bytes]) -> Iterator[Piece]:
        """Yield these files as they are at one moment; from there on, the operations give them right."""
        opened: list[tuple[bytes, int]] = []
        folders: list[Folder] = []
        try:
            with self._files.names_unchanged():
                rest = list(self._operations())
                for path in paths:
                    self._open_below(path, opened, folders)
                self._again.difference_update(paths)
                self._names.created.update(path for path, _ in opened)
            yield from rest
            yield from folders
            for path, fd in opened:
                yield FileBegin(path, is_whole=True)
                size = 0
                while block := self._read(fd, BLOCK_BYTES, size):
                    yield Block(path, size, block)
                    size += len(block)
                yield FileEnd(path, size)
        finally:
            for _, fd in opened:
                self._files.close(fd)

    def _open_below(self, path: bytes, opened: list[tuple[bytes, int]], folders: list[Folder]) -> None:
        try:
            found, below = list_folder(self._files, self._root, path, follows_links=True)
        except NotADirectoryError:
            with suppress(FileNotFoundError, NotADirectoryError):  # it was renamed or removed
                opened.append((path, self._files.open_read_only(absolute(self._root, path))))
            return
        except FileNotFoundError:
            return  # it was renamed or removed; folders are removed while names are said to be unchanged, too
        folders.append(Folder(path, frozenset(found + below)))
        for name in found + below:
            self._open_below(joined(path, name), opened, folders)


def _size_of(known: FileDigest, number: int) -> int:
    """Return the size of a block."""
    return min(BLOCK_BYTES, known.size - number * BLOCK_BYTES)
