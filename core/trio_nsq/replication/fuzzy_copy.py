"""The follower's side of a catch-up: see `CatchUp`."""

import stat
from pathlib import Path
from typing import Final

from ..log.files import Files
from .catch_up import Block, FileBegin, FileEnd, Folder, Operations, Piece
from .changed_files import ChangedFiles
from .earlier import EarlierContent
from .names import NamesSince
from .operations import Kind, Operation, decode_all, is_shared, joined, parent_of

WRITE_BACK_BYTES: Final = 8 * 1024 * 1024
"""So often, the disk begins to write a file that is copied; otherwise it would wait for the sync at the end."""
KEPT_BYTES: Final = 32 * 1024 * 1024
"""So much of it is kept in memory. What is older is on the disk by then, and what comes next takes its memory: a write
to memory that was not used before takes twice as long."""


class FuzzyCopy:
    """Takes the pieces of a catch-up, in order. After an OSError it begins anew.

    What is in the folder at the begin was copied by catch-ups that were not finished.

    Args:
        root: The data folder.
        changed: Changes its files.
        earlier: What it had before the first of them; set aside.
        epoch: Of the leader.

    Attributes:
        epoch: As given.
    """

    def __init__(
        self, files: Files, root: Path, changed: ChangedFiles, earlier: EarlierContent, epoch: int
    ) -> None:
        self._files = files
        self._root = root
        self._changed = changed
        self._earlier = earlier
        self.epoch = epoch
        self._names = NamesSince()

    def add(self, piece: Piece) -> None:
        """Take the next piece, but `CaughtUp`. Raises OSError, InvalidOperation."""
        match piece:
            case Operations(data):
                for operation in decode_all(data):
                    self.redo(operation)
            case Folder(path, names):
                self._take_folder(path, names)
            case FileBegin(path, is_whole):
                self._begin(path, is_whole=is_whole)
            case Block(path, offset, data):
                self._changed.write(path, offset, data)
                if (end := offset + len(data)) % WRITE_BACK_BYTES == 0:
                    begin = max(0, end - KEPT_BYTES - WRITE_BACK_BYTES)
                    self._changed.write_back(path, end - begin, begin)
            case FileEnd(path, size):
                self._changed.cut(path, size)
        self._changed.sync_if_many()

    def redo(self, operation: Operation) -> None:
        """Do an operation of a piece. Raises OSError."""
        self._make_room_for(operation)
        self._changed.redo(operation, names_older=self._names.add(operation))

    def _take_folder(self, path: bytes, names: frozenset[bytes]) -> None:
        if path:
            self._make_room(path, stat.S_IFDIR)
            if not self._changed.mode(path):
                self._changed.create_folder(path)
        for name in self._files.names(self._changed.path(path)):
            below = joined(path, name.encode(errors="surrogateescape"))
            if is_shared(below) and below.rpartition(b"/")[2] not in names:
                self._remove(below)

    def _begin(self, path: bytes, *, is_whole: bool) -> None:
        self._make_room(path, stat.S_IFREG)
        if is_whole:
            self._changed.create(path)
        elif not self._changed.mode(path):
            self._earlier.take(self._changed, path)

    # ------------------------------------------------------------------ what is in the way

    def _make_room_for(self, operation: Operation) -> None:
        """Remove what has another kind than the operation assumes: it is from a catch-up that was not finished."""
        kind, path, to = operation.kind, operation.path, operation.to
        is_folder = kind in (Kind.CREATE_FOLDER, Kind.REMOVE_FOLDER)
        if kind is Kind.RENAME:
            is_folder = stat.S_ISDIR(self._changed.mode(path))
        expected = stat.S_IFDIR if is_folder else stat.S_IFREG
        self._make_room(path, expected)
        if to:
            self._make_room(to, expected)

    def _make_room(self, path: bytes, expected: int) -> None:
        """Remove what is not of the expected type at a path, and what is no folder above it."""
        if parent := parent_of(path):
            self._make_room(parent, stat.S_IFDIR)
        if self._changed.mode(path) not in (0, expected):
            self._remove(path)

    def _remove(self, path: bytes) -> None:
        if stat.S_ISDIR(self._changed.mode(path)):
            self._changed.remove_folder(path)
        else:
            self._changed.unlink(path)
