"""What an archive has, and whether it is whole."""

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from ..log.disk.history import FILE_NAME as ARCHIVED_FILE
from ..log.disk.history import decode_archived
from ..log.inspection.findings import Kind
from ..log.inspection.segments import ScannedRecord, SegmentPath, scan_segment
from ..log.segment.format import segment_path
from ..log.segment.identity import FILE_NAME as INCARNATION_FILE
from ..log.segment.identity import Identity
from ..replication.catch_up import Block, FileBegin, Operations
from ..replication.operations import InvalidOperation, decode_all
from ..storage import Storage
from .content import Progress, read_pieces
from .manifest import (
    ArchiveDamaged,
    Checkpoint,
    begun_manifest,
    complete_checkpoints,
    later_in_chain,
    list_stream,
    read_record,
)
from .reading import ArchivedFiles, path_of
from .segment_names import ArchivedName, segment_object, segment_of
from .segments import ArchivedSegment, fetch_segment, read_segments

_LISTS: Final = (ARCHIVED_FILE, INCARNATION_FILE)


@dataclass(frozen=True, slots=True)
class CheckpointExtent:
    """A checkpoint, and what is behind it.

    Attributes:
        checkpoint: As in the manifest.
        until_ms: Restores are possible from the checkpoint's time to this one, Unix milliseconds.
        objects: How many objects have the operations behind it.
        segments, segment_bytes: The archived segments that it refers to.
        damage: Why these are not known, a sentence; empty: they are.
    """

    checkpoint: Checkpoint
    until_ms: int
    objects: int
    segments: int
    segment_bytes: int
    damage: str = ""


def checkpoints_of(storage: Storage) -> list[CheckpointExtent]:
    """Return the complete checkpoints of an archive, oldest first.

    Raises:
        ArchiveError: It is no archive, or has no complete checkpoint. ArchiveDamaged: As `read_manifest`.
        StorageError, OSError: It cannot be read.
    """
    found = []
    for checkpoint in complete_checkpoints(storage):
        stream, damage = list_stream(storage, checkpoint).objects, ""
        segments: list[ArchivedSegment] = []
        try:
            segments += read_segments(storage, checkpoint).values()
        except ArchiveDamaged as exc:
            damage = str(exc)
        found.append(
            CheckpointExtent(
                checkpoint,
                stream[-1].about.time_ms if stream else checkpoint.time_ms,
                len(stream),
                len(segments),
                sum(each.size for each in segments),
                damage,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class ArchiveFinding:
    """Something that is missing or damaged in an archive.

    Attributes:
        checkpoint: The id of the checkpoint that needs it, or that it is behind.
        what: A sentence.
    """

    checkpoint: int
    what: str


def verify(storage: Storage, on_read: Progress, *, all_checkpoints: bool) -> Iterator[ArchiveFinding]:
    """Read an archive, and yield what is missing or damaged.

    Args:
        on_read: See `Progress`.
        all_checkpoints: Check all checkpoints, and read all archived segments. Otherwise only the newest checkpoint
            and what is behind it are read, and of segments that only the archive has, the size is checked.

    Raises:
        ArchiveError: It is no archive, or has no complete checkpoint.
        StorageError, OSError: It cannot be read.
    """
    found = begun_manifest(storage)
    checkpoints = found.manifest.checkpoints
    if found.damage:
        yield ArchiveFinding(checkpoints[-1].id, found.damage)
    check = _Check(storage, on_read)
    for checkpoint in checkpoints if all_checkpoints else checkpoints[-1:]:
        later = later_in_chain(checkpoints, checkpoint)[:1]
        for what in check.checkpoint(checkpoint, later):
            yield ArchiveFinding(checkpoint.id, what)
    if all_checkpoints:
        for what in check.segments():
            yield ArchiveFinding(checkpoints[-1].id, what)


class _Check:
    """One check of an archive."""

    def __init__(self, storage: Storage, on_read: Progress) -> None:
        self._storage = storage
        self._on_read = on_read
        self._checked: set[str] = set()  # names of objects
        self._history: set[str] = set()  # names of segments whose size is checked

    def checkpoint(self, checkpoint: Checkpoint, later: Sequence[Checkpoint]) -> Iterator[str]:
        """Yield what is wrong with a checkpoint, and with the operations behind it."""
        try:
            if read_record(self._storage, checkpoint.record_name)[1] != checkpoint:
                yield f"{self._storage.url_of(checkpoint.record_name)} says something else than the manifest"
        except ArchiveDamaged as exc:
            yield str(exc)
        try:
            segments = read_segments(self._storage, checkpoint)
        except ArchiveDamaged as exc:
            yield str(exc)
        else:
            yield from self._check_parts(checkpoint, segments)
            yield from self._check_segments(segments.values())
        yield from self._check_stream(checkpoint, later)

    def segments(self) -> Iterator[str]:
        """Yield what is wrong with archived segments that were not read yet: retention has deleted them on the disk."""
        found = self._storage.files()
        for name in sorted(each.name for each in found) if isinstance(found, list) else []:
            if segment_of(name) == name and name not in self._checked:
                yield from self._check_content(name)

    def _check_content(self, name: str) -> Iterator[str]:
        path, about = path_of(name), ArchivedName.parse(name.rpartition("/")[2])
        assert about is not None
        for found in scan_segment(SegmentPath(path, about.last + 1), ArchivedFiles(self._storage)):
            if isinstance(found, ScannedRecord):
                self._on_read(found.header.record_bytes)
            elif found.kind is Kind.DAMAGE:
                # What follows the semicolon is what a broker does with such a file on its disk.
                what = found.what.partition(";")[0]
                yield f"{self._storage.url_of(name)} is damaged at byte {found.offset:,}: {what}"

    def _check_parts(self, checkpoint: Checkpoint, segments: Container[bytes]) -> Iterator[str]:
        small = dict[bytes, bytearray]()  # the content of files, by path
        for name in checkpoint.part_names:
            try:
                for piece in read_pieces(self._storage, name, checkpoint.run, self._on_read):
                    if isinstance(piece, Block) and PurePosixPath(os.fsdecode(piece.path)).name in _LISTS:
                        content = small.setdefault(piece.path, bytearray())
                        content[piece.offset : piece.offset + len(piece.data)] = piece.data
                    elif isinstance(piece, FileBegin) and not piece.is_whole and piece.path not in segments:
                        what = f"refers to an archived segment that is not listed: {piece.path!r}"
                        yield f"{self._storage.url_of(name)} {what}"
            except ArchiveDamaged as exc:
                yield str(exc)

        yield from self._check_history(small)

    def _check_history(self, lists: Mapping[bytes, bytearray]) -> Iterator[str]:
        """Check that segments are there that only the archive has: lists of them are in the folders of topics."""
        for path, content in lists.items():
            file = PurePosixPath(os.fsdecode(path))
            identity = Identity.decode(bytes(lists.get(os.fsencode(file.with_name(INCARNATION_FILE)), b"")))
            if file.name != ARCHIVED_FILE or identity is None:
                continue
            for each in decode_archived(bytes(content)):
                at = segment_path(Path(file.parent), each.base_sequence)
                name = segment_object(at, identity.incarnation, each.next_sequence)
                if name not in self._history:
                    self._history.add(name)
                    if (size := self._storage.size(name)) != each.size:
                        what = "is missing" if size is None else "has another size than when it was archived"
                        yield f"{self._storage.url_of(name)} {what}; the broker reads messages from it"
                        self._checked.add(name)

    def _check_segments(self, segments: Iterable[ArchivedSegment]) -> Iterator[str]:
        for segment in segments:
            if segment.name not in self._checked:
                self._checked.add(segment.name)
                try:
                    for _, data in fetch_segment(self._storage, segment):
                        self._on_read(len(data))
                except ArchiveDamaged as exc:
                    yield str(exc)

    def _check_stream(self, checkpoint: Checkpoint, later: Sequence[Checkpoint]) -> Iterator[str]:
        stream = list_stream(self._storage, checkpoint, later=later)
        if stream.gap is not None:
            yield f"the object with operation {stream.gap} is missing behind checkpoint {checkpoint.id}"
        for name, about in stream.objects:
            if name in self._checked:
                continue
            self._checked.add(name)
            url = self._storage.url_of(name)
            try:
                numbers = [
                    operation.number
                    for piece in read_pieces(self._storage, name, checkpoint.run, self._on_read)
                    for operation in (decode_all(piece.data) if isinstance(piece, Operations) else ())
                ]
                if numbers != list(range(about.first, about.last + 1)):
                    yield f"{url} is damaged: it has other operations than its name says"
            except ArchiveDamaged as exc:
                yield str(exc)
            except InvalidOperation as exc:
                yield f"{url} is damaged: {exc}"
