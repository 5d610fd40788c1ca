"""What an archive has, and whether it is whole."""

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from ..log.disk.history import FILE_NAME as ARCHIVED_FILE
from ..log.disk.history import decode_archived
from ..log.segment.format import segment_path
from ..log.segment.identity import FILE_NAME as INCARNATION_FILE
from ..log.segment.identity import Identity
from ..replication.catch_up import Block, FileBegin, Operations
from ..replication.operations import InvalidOperation, decode_all
from ..storage import Storage
from .content import Progress, read_pieces
from .manifest import ArchiveDamaged, Checkpoint, complete_checkpoints, later_in_chain, list_stream
from .segment_names import segment_object
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
    """

    checkpoint: Checkpoint
    until_ms: int
    objects: int
    segments: int
    segment_bytes: int


def checkpoints_of(storage: Storage) -> list[CheckpointExtent]:
    """Return the complete checkpoints of an archive, oldest first.

    Raises:
        ArchiveError: It is no archive, or has no complete checkpoint; ArchiveDamaged.
        StorageError, OSError: It cannot be read.
    """
    found = []
    for checkpoint in complete_checkpoints(storage):
        stream = list_stream(storage, checkpoint).objects
        segments = read_segments(storage, checkpoint).values()
        found.append(
            CheckpointExtent(
                checkpoint,
                stream[-1].about.time_ms if stream else checkpoint.time_ms,
                len(stream),
                len(segments),
                sum(each.size for each in segments),
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
        all_checkpoints: Otherwise only the newest checkpoint, and what is behind it, is read.

    Raises:
        ArchiveError: It is no archive, or has no complete checkpoint.
        StorageError, OSError: It cannot be read.
    """
    checkpoints = complete_checkpoints(storage)
    checked: set[str] = set()
    for checkpoint in checkpoints if all_checkpoints else checkpoints[-1:]:
        later = later_in_chain(checkpoints, checkpoint)[:1]
        for what in _check(storage, checkpoint, later, on_read, checked):
            yield ArchiveFinding(checkpoint.id, what)


def _check(
    storage: Storage,
    checkpoint: Checkpoint,
    later: Sequence[Checkpoint],
    on_read: Progress,
    checked: set[str],
) -> Iterator[str]:
    try:
        segments = read_segments(storage, checkpoint)
    except ArchiveDamaged as exc:
        yield str(exc)
    else:
        yield from _check_parts(storage, checkpoint, segments, on_read, checked)
        yield from _check_segments(storage, segments.values(), on_read, checked)
    yield from _check_stream(storage, checkpoint, later, on_read, checked)


def _check_parts(
    storage: Storage,
    checkpoint: Checkpoint,
    segments: Container[bytes],
    on_read: Progress,
    checked: set[str],
) -> Iterator[str]:
    small: dict[bytes, bytearray] = {}  # the content of files, by path
    for name in checkpoint.part_names:
        try:
            for piece in read_pieces(storage, name, checkpoint.run, on_read):
                if isinstance(piece, Block) and PurePosixPath(os.fsdecode(piece.path)).name in _LISTS:
                    content = small.setdefault(piece.path, bytearray())
                    content[piece.offset : piece.offset + len(piece.data)] = piece.data
                elif isinstance(piece, FileBegin) and not piece.is_whole and piece.path not in segments:
                    what = f"refers to an archived segment that is not listed: {piece.path!r}"
                    yield f"{storage.url_of(name)} {what}"
        except ArchiveDamaged as exc:
            yield str(exc)

    yield from _check_history(storage, small, checked)


def _check_history(storage: Storage, lists: Mapping[bytes, bytearray], checked: set[str]) -> Iterator[str]:
    """Check that segments are there that only the archive has: lists of them are in the folders of topics."""
    for path, content in lists.items():
        file = PurePosixPath(os.fsdecode(path))
        identity = Identity.decode(bytes(lists.get(os.fsencode(file.with_name(INCARNATION_FILE)), b"")))
        if file.name != ARCHIVED_FILE or identity is None:
            continue
        for each in decode_archived(bytes(content)):
            at = segment_path(Path(file.parent), each.base_sequence)
            name = segment_object(at, identity.incarnation, each.next_sequence)
            if name not in checked:
                checked.add(name)
                if (size := storage.size(name)) != each.size:
                    what = "is missing" if size is None else "has another size than when it was archived"
                    yield f"{storage.url_of(name)} {what}; the broker reads messages from it"


def _check_segments(
    storage: Storage, segments: Iterable[ArchivedSegment], on_read: Progress, checked: set[str]
) -> Iterator[str]:
    for segment in segments:
        if segment.name not in checked:
            checked.add(segment.name)
            try:
                for _, data in fetch_segment(storage, segment):
                    on_read(len(data))
            except ArchiveDamaged as exc:
                yield str(exc)


def _check_stream(
    storage: Storage,
    checkpoint: Checkpoint,
    later: Sequence[Checkpoint],
    on_read: Progress,
    checked: set[str],
) -> Iterator[str]:
    stream = list_stream(storage, checkpoint, later=later)
    if stream.gap is not None:
        yield f"the object with operation {stream.gap} is missing behind checkpoint {checkpoint.id}"
    for name, about in stream.objects:
        if name in checked:
            continue
        checked.add(name)
        url = storage.url_of(name)
        try:
            numbers = [
                operation.number
                for piece in read_pieces(storage, name, checkpoint.run, on_read)
                for operation in (decode_all(piece.data) if isinstance(piece, Operations) else ())
            ]
            if numbers != list(range(about.first, about.last + 1)):
                yield f"{url} is damaged: it has other operations than its name says"
        except ArchiveDamaged as exc:
            yield str(exc)
        except InvalidOperation as exc:
            yield f"{url} is damaged: {exc}"
