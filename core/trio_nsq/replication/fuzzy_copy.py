"""The follower's side of a catch-up: see `CatchUp`."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..log.files import Files
from .catch_up import Block, FileBegin, FileEnd, Folder, Operations, Piece
from .changed_files import ChangedFiles
from .inventory import SEGMENT_SUFFIX, list_folder
from .names import NamesSince
from .operations import decode_all, joined

_REMAINS: Final = re.compile(rb"\.tmp\Z|\.topic-(deleted-[0-9]+|importing)\Z")
"""Names of what is left of unfinished work: it is not kept."""


class FuzzyCopy:
    """Takes the pieces of a catch-up, in order. After an OSError it begins anew.

    Args:
        root: The data folder.
        changed: Changes its files.
        epoch: Of the leader.

    Attributes:
        epoch: As given.
    """

    def __init__(self, files: Files, root: Path, changed: ChangedFiles, epoch: int) -> None:
        self._files = files
        self._root = root
        self._changed = changed
        self.epoch = epoch
        self._aside = b"diverged-%d" % epoch
        self._names = NamesSince()

    def set_write_ahead_aside(self) -> None:
        """Move away what a leader, which this folder was before, had not synced: a start would bring it back."""
        for name in self._files.names(self._root):
            if name.startswith("write-ahead."):
                self._set_aside(name.encode())

    def add(self, piece: Piece) -> None:
        """Take the next piece, but `CaughtUp`. Raises OSError, InvalidOperation."""
        match piece:
            case Operations(data):
                for operation in decode_all(data):
                    self._changed.redo(operation, names_older=self._names.add(operation))
            case Folder(path, names):
                self._take_folder(path, names)
            case FileBegin():
                self._begin(piece)
            case Block(path, offset, data):
                self._changed.write(path, offset, data)
            case FileEnd(path, size):
                self._changed.cut(path, size)
        self._changed.sync_if_many()

    def _take_folder(self, path: bytes, names: frozenset[bytes]) -> None:
        if path and not self._changed.path(path).is_dir():
            self._set_aside(path)
            self._changed.create_folder(path)
        files, folders = list_folder(self._files, self._root, path)
        for name in files + folders:
            if name not in names:
                self._set_aside(joined(path, name))

    def _begin(self, file: FileBegin) -> None:
        path = self._changed.path(file.path)
        if path.is_dir():
            self._set_aside(file.path)
        elif file.has_diverged and file.path.endswith(SEGMENT_SUFFIX):
            with suppress(FileNotFoundError):
                self._changed.copy(file.path, self._place_for(file.path))
        if file.is_whole or not path.exists():
            self._changed.create(file.path)

    def _set_aside(self, path: bytes) -> None:
        """Move what the leader does not have out of the shared part of the folder."""
        at = self._changed.path(path)
        if not at.exists():
            return
        if not _REMAINS.search(path):
            self._changed.rename(path, self._place_for(path))
        elif at.is_dir():
            self._changed.remove_folder(path)
        else:
            self._changed.unlink(path)

    def _place_for(self, path: bytes) -> bytes:
        """Return an unused path in the folder of what has diverged, and create the folders above it."""
        *folders, name = path.split(b"/")
        place = self._aside
        self._make_folder(place)
        for each in folders:
            place = joined(place, each)
            self._make_folder(place)
        found, number = joined(place, name), 1
        while self._changed.path(found).exists():
            number += 1
            found = joined(place, name + b"-%d" % number)
        return found

    def _make_folder(self, path: bytes) -> None:
        if not self._changed.path(path).is_dir():
            self._changed.create_folder(path)
