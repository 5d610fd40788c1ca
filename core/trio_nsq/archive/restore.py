"""Brings a data folder back from an archive."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..log.files import Files
from ..replication.catch_up import Block, FileBegin, FileEnd, Folder, Operations, Piece
from ..replication.changed_files import ChangedFiles
from ..replication.earlier import EarlierContent
from ..replication.fuzzy_copy import FuzzyCopy
from ..replication.operations import Operation, decode_all, is_at_or_below
from ..storage import Storage
from .content import Progress, read_pieces
from .manifest import (
    ArchiveDamaged,
    ArchiveError,
    Checkpoint,
    StreamObject,
    complete_checkpoints,
    list_stream,
    stream_folder,
)
from .segments import ArchivedSegment, fetch_segment, read_segments

_TOPICS: Final = b"topics"
_TOPIC_FOLDER: Final = re.compile(rb"(.*)\.topic(-[^.]*)?", re.DOTALL)
"""Also the folder of a topic that is deleted or imported."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A state of the data folder that an archive has.

    Attributes:
        checkpoint: It begins with this one.
        stream: The objects with the operations behind it, in order.
        time_ms: When the folder was in this state, Unix milliseconds; at most one interval of archiving earlier.
    """

    checkpoint: Checkpoint
    stream: tuple[StreamObject, ...]

    @property
    def time_ms(self) -> int:
        return self.stream[-1].about.time_ms if self.stream else self.checkpoint.time_ms


def find_restore_point(storage: Storage, until_ms: int | None = None) -> RestorePoint:
    """Return the newest state that an archive has, or the newest one not after a time.

    Args:
        until_ms: Unix milliseconds; None: no limit.

    Raises:
        ArchiveError: There is none. ArchiveDamaged: operations before it are missing.
        StorageError, OSError: The archive cannot be read.
    """
    checkpoints = complete_checkpoints(storage)
    usable = [each for each in checkpoints if until_ms is None or each.time_ms <= until_ms]
    if not usable:
        raise ArchiveError(
            f"the archive {storage.shown} begins later, at {shown_time(checkpoints[0].time_ms)}"
        )
    stream = list_stream(storage, usable[-1], until_ms)
    point = RestorePoint(usable[-1], stream.objects)
    if stream.gap is not None:
        raise ArchiveDamaged(
            f"{storage.url_of(stream_folder(usable[-1].id))}: the object with operation {stream.gap} is missing, and "
            f"later ones are there. The state before it is that of {shown_time(point.time_ms)}"
        )
    return point


def shown_time(time_ms: int) -> str:
    """Return a time for messages, RFC 3339; what parses it finds the same millisecond."""
    return (
        datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class Restorer:
    """Writes a state of an archive into a data folder.

    Args:
        folder: Exists, and has nothing that the broker uses.
        is_wanted: Whether the topic of this name is restored; None: all are.
        on_read: See `Progress`.

    Attributes:
        damage: Sentences about archived segments that are missing or damaged. Their messages are missing, or only those
            that the broker cannot read; everything else is restored.
    """

    def __init__(
        self,
        storage: Storage,
        folder: Path,
        *,
        is_wanted: Callable[[str], bool] | None = None,
        on_read: Progress = lambda size: None,
    ) -> None:
        files = Files()
        self.damage: list[str] = []
        self._storage = storage
        self._changed = ChangedFiles(files, folder)
        self._copy = FuzzyCopy(files, folder, self._changed, EarlierContent(files, folder), epoch=0)
        self._is_wanted = is_wanted
        self._on_read = on_read
        self._segments: dict[bytes, ArchivedSegment] = {}
        self._wanted: dict[bytes, bool] = {}  # by name of a topic's folder
        self._missing: set[bytes] = set()  # paths of segments

    def restore(self, point: RestorePoint) -> None:
        """Write all files, durably.

        Raises:
            ArchiveDamaged: An object other than a segment is missing or damaged.
            StorageError, OSError: The archive cannot be read, or the folder cannot be written.
        """
        try:
            self._segments = read_segments(self._storage, point.checkpoint)
            for name in point.checkpoint.part_names:
                for piece in self._pieces(name):
                    self._add(piece)
            number = point.checkpoint.number
            for name, about in point.stream:
                for piece in self._pieces(name):
                    if not isinstance(piece, Operations):
                        raise ArchiveDamaged(f"{self._storage.url_of(name)} is damaged: it has other frames")
                    number = self._do(piece, number, name)
                if number != about.last:
                    raise ArchiveDamaged(
                        f"{self._storage.url_of(name)} is damaged: it ends with operation {number}"
                    )
            self._changed.sync()
        finally:
            self._changed.close()

    def _pieces(self, name: str) -> Iterator[Piece]:
        return read_pieces(self._storage, name, self._on_read)

    # ------------------------------------------------------------------ the checkpoint

    def _add(self, piece: Piece) -> None:
        match piece:
            case Operations(data):
                for operation in decode_all(data):
                    if self._wants(operation.path):
                        self._copy.redo(operation)
            case Folder(path, names):
                if self._wants(path):
                    self._copy.add(Folder(path, names))
            case FileBegin(path, is_whole):
                if not self._wants(path):
                    return
                if is_whole:
                    self._copy.add(piece)
                else:
                    self._fetch(path)
            case Block(path) | FileEnd(path):
                if self._wants(path) and path not in self._missing:
                    self._copy.add(piece)

    def _fetch(self, path: bytes) -> None:
        """Write an archived segment."""
        segment = self._segments.get(path)
        if segment is None:
            raise ArchiveDamaged(f"the checkpoint has no segment {path!r}")
        is_begun = False
        try:
            for offset, data in fetch_segment(self._storage, segment):
                if not is_begun:
                    self._copy.add(FileBegin(path, is_whole=True))
                    is_begun = True
                self._on_read(len(data))
                self._copy.add(Block(path, offset, data))
        except ArchiveDamaged as exc:
            self.damage.append(str(exc))
        if not is_begun:
            self._missing.add(path)

    # ------------------------------------------------------------------ operations behind it

    def _do(self, operations: Operations, number: int, name: str) -> int:
        """Do those operations that follow this number; returns that of the last one."""
        for each in decode_all(operations.data):
            if each.number <= number:
                continue
            if each.number != number + 1:
                raise ArchiveDamaged(
                    f"{self._storage.url_of(name)} is damaged: operation {number + 1} is missing"
                )
            number = each.number
            if self._wants(each.path) and each.path not in self._missing:
                self._do_one(each, name)
        return number

    def _do_one(self, operation: Operation, name: str) -> None:
        try:
            self._changed.do(operation)
        except (FileNotFoundError, NotADirectoryError) as exc:
            what = f"operation {operation.number} ({operation.kind.name}) does not fit: {exc}"
            raise ArchiveDamaged(f"{self._storage.url_of(name)}: {what}") from exc

    def _wants(self, path: bytes) -> bool:
        """Whether what has this path is restored: it is not in a topic's folder, or in that of a wanted one."""
        if self._is_wanted is None or not is_at_or_below(path, _TOPICS) or path == _TOPICS:
            return True
        folder = path.split(b"/")[1]
        if folder not in self._wanted:
            found = _TOPIC_FOLDER.fullmatch(folder)
            self._wanted[folder] = found is None or self._is_wanted(os.fsdecode(found[1]))
        return self._wanted[folder]
