"""Does again what an archive has recorded: the pieces of a checkpoint, and the operations behind it."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..log.files import Files
from ..replication.catch_up import Block, FileBegin, FileEnd, Folder, Operations, Piece
from ..replication.changed_files import ChangedFiles
from ..replication.earlier import EarlierContent
from ..replication.fuzzy_copy import FuzzyCopy
from ..replication.operations import Kind, Operation, decode_all, is_at_or_below
from ..storage import Storage
from .content import Progress, decode_pieces, read_contents
from .manifest import ArchiveDamaged, Checkpoint, StreamObject

TOPICS: Final = b"topics"
_TOPIC_FOLDER: Final = re.compile(rb"(.*)\.topic(-[^.]*)?", re.DOTALL)
"""Also the folder of a topic that is deleted or imported."""


class WantedTopics:
    """Whether a path is not in a topic's folder, or in that of a wanted one.

    Args:
        is_wanted: Whether the topic of this name is wanted; None: all are.
    """

    def __init__(self, is_wanted: Callable[[str], bool] | None) -> None:
        self._is_wanted = is_wanted
        self._wanted: dict[bytes, bool] = {}  # by name of a topic's folder

    def __call__(self, path: bytes) -> bool:
        if self._is_wanted is None or not is_at_or_below(path, TOPICS) or path == TOPICS:
            return True
        folder = path.split(b"/")[1]
        if folder not in self._wanted:
            found = _TOPIC_FOLDER.fullmatch(folder)
            self._wanted[folder] = found is None or self._is_wanted(os.fsdecode(found[1]))
        return self._wanted[folder]


class ArchiveReplay:
    """Makes files what an archive has of them.

    Args:
        files: The file layer of the folder.
        folder: Exists, and has nothing that the broker uses.
        wants: Whether what has a path is made; the folders above it are, too.
        fetch: Makes an archived segment in a copy, which has this path.
        on_read: See `Progress`.

    Attributes:
        number: The last operation that was done.
        changed: The files that it changes.
        copy: Takes pieces of the checkpoint.
        missing: Paths of files that could not be made: nothing is done with them.
    """

    def __init__(
        self,
        storage: Storage,
        files: Files,
        folder: Path,
        *,
        wants: Callable[[bytes], bool],
        fetch: Callable[[FuzzyCopy, bytes], None],
        on_read: Progress = lambda size: None,
    ) -> None:
        self.number: int = 0
        self._run = ""
        self.changed: ChangedFiles = ChangedFiles(files, folder)
        self.copy: FuzzyCopy = FuzzyCopy(files, folder, self.changed, EarlierContent(files, folder), epoch=0)
        self.missing: set[bytes] = set()
        self._storage = storage
        self._wants = wants
        self._fetch = fetch
        self._on_read = on_read

    def do_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make the files of a checkpoint. Raises ArchiveDamaged, StorageError, OSError, and the errors of `fetch`."""
        self._run = checkpoint.run
        for name, content in self._contents(checkpoint.part_names):
            for piece in decode_pieces(self._storage, name, checkpoint.run, content):
                self._add(piece)
        self.number = checkpoint.number

    def _add(self, piece: Piece) -> None:
        match piece:
            case Operations(data):
                for operation in decode_all(data):
                    if self._is_wanted(operation):
                        self.copy.redo(operation)
            case Folder(path, names):
                if self._wants(path):
                    self.copy.add(Folder(path, names))
            case FileBegin(path, is_whole):
                if not self._wants(path):
                    return
                if is_whole:
                    self.copy.add(piece)
                else:
                    self._fetch(self.copy, path)
            case Block(path) | FileEnd(path):
                if self._wants(path) and path not in self.missing:
                    self.copy.add(piece)

    def do_stream(self, objects: Sequence[StreamObject]) -> Iterator[StreamObject]:
        """Do the operations of objects that follow `number`; yield each object when that is done.

        After ArchiveDamaged, `number` is that of the last operation that was done.

        Raises ArchiveDamaged, StorageError, OSError.
        """
        contents = self._contents([each.name for each in objects])
        for found, (_, content) in zip(objects, contents, strict=True):
            self._do_operations(found, content)
            yield found

    def _contents(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        for name, content in zip(names, read_contents(self._storage, names), strict=True):
            self._on_read(len(content))
            yield name, content

    def _do_operations(self, found: StreamObject, content: bytes) -> None:
        name, about = found
        for piece in decode_pieces(self._storage, name, self._run, content):
            if not isinstance(piece, Operations):
                raise ArchiveDamaged(f"{self._storage.url_of(name)} is damaged: it has other frames")
            for operation in decode_all(piece.data):
                if operation.number > self.number:
                    self._do(operation, name)
        if self.number != about.last:
            raise ArchiveDamaged(
                f"{self._storage.url_of(name)} is damaged: it ends with operation {self.number}"
            )

    def _do(self, operation: Operation, name: str) -> None:
        if operation.number != self.number + 1:
            raise ArchiveDamaged(
                f"{self._storage.url_of(name)} is damaged: operation {self.number + 1} is missing"
            )
        if self._is_wanted(operation) and operation.path not in self.missing:
            try:
                self.changed.do(operation)
            except (FileNotFoundError, NotADirectoryError) as exc:
                what = f"operation {operation.number} ({operation.kind.name}) does not fit: {exc}"
                raise ArchiveDamaged(f"{self._storage.url_of(name)}: {what}") from exc
        self.number = operation.number

    def _is_wanted(self, operation: Operation) -> bool:
        is_wanted = self._wants(operation.path)
        return is_wanted and (operation.kind is not Kind.LINK or self._wants(operation.to))
