"""Removes old states from an archive."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from ..storage import Storage
from .manifest import (
    CHECKPOINTS,
    RECORD_SUFFIX,
    ArchiveDamaged,
    Checkpoint,
    FoundManifest,
    Manifest,
    StreamName,
    begun_manifest,
    change_manifest,
    checkpoint_folder,
    read_manifest,
    stream_folder,
)
from .segment_names import ARCHIVED_SUFFIX, segment_of
from .segments import read_segments


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, or would be.

    Attributes:
        checkpoints: How many checkpoints, with those that were not finished.
        objects: How many objects, with those of the checkpoints.
        from_ms: Since when states can be restored now, Unix milliseconds.
    """

    checkpoints: int
    objects: int
    from_ms: int


def prune(storage: Storage, from_ms: int, *, dry_run: bool = False) -> Pruned:
    """Remove what is not needed to restore the states since a time. Archived segments stay.

    A broker may be writing to the archive. A restore of an older state that runs fails.

    Args:
        from_ms: Unix milliseconds. The newest checkpoint always stays.

    Raises:
        ArchiveError: It is no archive, or has no complete checkpoint; ArchiveDamaged.
        StorageError, OSError: It cannot be read or written.
    """
    manifest = _whole(begun_manifest(storage))
    first = _first_needed(manifest.checkpoints, from_ms)
    ids = range(manifest.first_id, first.id)
    if not dry_run:
        # Before the objects are removed: what is in the manifest is complete.
        change_manifest(storage, lambda found: _without_older(found, first))
    records = {f"{checkpoint_folder(each)}{RECORD_SUFFIX}" for each in ids}
    records.intersection_update(storage.names(CHECKPOINTS))
    objects = len(records)
    if not dry_run:
        storage.remove(records)  # before the others: a checkpoint with a record is complete
    for checkpoint_id in ids:
        names = [
            *storage.names(checkpoint_folder(checkpoint_id)),
            *_old_operations(storage, checkpoint_id, first),
        ]
        objects += len(names)
        if not dry_run:
            storage.remove(names)
    if not dry_run:
        needed = first.id if first.previous is None else first.previous
        change_manifest(storage, lambda found: replace(found, first_id=max(found.first_id, needed)))
    return Pruned(len(ids), objects, first.time_ms)


def prune_segments(storage: Storage, from_ms: int, kept: Set[str]) -> int:
    """Remove archived segments that were archived before a time; returns how many.

    Those that a checkpoint in the manifest refers to stay.

    Args:
        from_ms: Unix milliseconds, by the clock of the archive.
        kept: Names of others that stay.

    Raises:
        ArchiveDamaged: The manifest, or a list of segments, cannot be understood.
        StorageError, OSError: It cannot be read or written.
    """
    kept = set(kept)
    for checkpoint in _whole(read_manifest(storage)).checkpoints:
        kept.update(segment.name for segment in read_segments(storage, checkpoint).values())
    old = [
        name
        for name, written_s in storage.ages()
        if written_s * 1000 < from_ms and (found := segment_of(name)) is not None and found not in kept
    ]
    storage.remove(old)
    return sum(name.endswith(ARCHIVED_SUFFIX) for name in old)


def _whole(found: FoundManifest) -> Manifest:
    """Return the manifest. Raises ArchiveDamaged: checkpoints may be missing in it, which need objects."""
    if not found.is_whole:
        raise ArchiveDamaged(found.damage)
    return found.manifest


def _first_needed(checkpoints: tuple[Checkpoint, ...], from_ms: int) -> Checkpoint:
    """Return the last checkpoint that is not later than a time; the first one, if all are."""
    return next((each for each in reversed(checkpoints) if each.time_ms <= from_ms), checkpoints[0])


def _without_older(manifest: Manifest, first: Checkpoint) -> Manifest:
    return replace(manifest, checkpoints=tuple(each for each in manifest.checkpoints if each.id >= first.id))


def _old_operations(storage: Storage, checkpoint_id: int, first: Checkpoint) -> Iterator[str]:
    """Yield the objects with operations of an earlier checkpoint that are not behind the first needed one."""
    for name in storage.names(stream_folder(checkpoint_id)):
        about = StreamName.parse(name.rpartition("/")[2])
        is_behind = checkpoint_id == first.previous and about is not None and about.last > first.number
        if not is_behind:
            yield name
