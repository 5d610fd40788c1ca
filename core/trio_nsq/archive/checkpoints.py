"""Writes the checkpoints of an archive: copies of the data folder, made while the broker writes."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Final

from ..replication.catch_up import CatchUp, CaughtUp
from ..replication.link import encode_piece
from ..replication.recorder import RecordingFiles
from ..replication.stream import OperationStream
from ..storage import LeaseLost, Storage
from .content import encode_content
from .manifest import (
    ArchiveDamaged,
    Checkpoint,
    Manifest,
    change_manifest,
    checkpoint_folder,
    encode_record,
    list_stream,
    part_name,
    read_manifest,
    read_record,
    stream_folder,
)
from .owner import take_ownership
from .pruning import prune, prune_segments
from .segments import ArchivedSegments, encode_segments, read_segments, sealed_segments

logger: logging.Logger = logging.getLogger("trio_nsq.archive")

_PART_BYTES: Final = 8 * 1024 * 1024
_CLOCK_MS: Final = 60_000
"""Clocks of machines differ by less."""


class Checkpoints:
    """The checkpoints of one run of a broker. Blocking; one thread at a time.

    Args:
        run: Identifies the run.

    Attributes:
        newest: The last one of this run; None: none yet.
        segments: The archived segments that the data folder has.
        count: How many were written.
        owner: The id of the data folder; empty: not known yet.
        needs_after: A checkpoint that is being written needs the operations after this one; None: none is.
    """

    def __init__(
        self, files: RecordingFiles, operations: OperationStream, storage: Storage, run: str
    ) -> None:
        self.newest: Checkpoint | None = None
        self.segments: ArchivedSegments = ArchivedSegments(files, storage, {})
        self.count: int = 0
        self.owner: str = ""
        self.needs_after: int | None = None
        self._files = files
        self._operations = operations
        self._storage = storage
        self._run = run
        self._last_time_ms = 0
        self._time_lock = Lock()
        self._next_id: int | None = None  # in the manifest, since this run has begun

    def begin(self) -> None:
        """Learn what the archive has; the next checkpoint is the first one of a chain.

        Raises:
            ArchiveError: It is the archive of another data folder. ArchiveDamaged: its manifest cannot be understood.
            StorageError, OSError: It cannot be read.
        """
        self.newest = self._next_id = None
        self.owner = take_ownership(self._files, self._files.root, self._storage)
        manifest = read_manifest(self._storage).manifest
        known = {}
        if manifest.checkpoints:
            last = manifest.checkpoints[-1]
            stream = list_stream(self._storage, last).objects
            self._begin_times(stream[-1].about.time_ms if stream else last.time_ms)
            try:
                known = read_segments(self._storage, last)
            except ArchiveDamaged as exc:
                logger.warning("%s: segments are compared with those in the archive", exc)
        self.segments = ArchivedSegments(self._files, self._storage, known)

    def _begin_times(self, newest_ms: int) -> None:
        """Let no time be before the newest one that the archive has."""
        ahead_ms = newest_ms - int(time.time() * 1000)
        if ahead_ms > _CLOCK_MS:
            logger.warning(
                "the newest state in the archive %s has a time that is %d s ahead of this machine's clock: until then, "
                "all states get this time, and --until finds only the last of them",
                *(self._storage.shown, ahead_ms // 1000),
            )
        self._last_time_ms = max(self._last_time_ms, newest_ms)

    def time_ms(self) -> int:
        """Return the time, which never goes back in one archive. Any thread may ask."""
        with self._time_lock:
            self._last_time_ms = max(self._last_time_ms, int(time.time() * 1000))
            return self._last_time_ms

    def archive_segments(self, until_stored: Callable[[int], None], check: Callable[[], None]) -> bool:
        """Archive the segments that are sealed now. Returns what `ArchivedSegments.archive` returns.

        Args:
            until_stored: Returns when operations up to a number are archived: an archive has no segment whose messages
                a restored log would lack, and give to others.
            check: Called before each write; may raise to end it.
        """
        number, sealed = self._operations.last_number, list(sealed_segments(self._files, self._files.root))
        until_stored(number)
        return self.segments.archive(sealed, check)

    def expire(self, from_ms: int, in_use: Callable[[], set[str] | None]) -> None:
        """Remove states and segments that are older, except segments that the data folder has.

        Args:
            from_ms: Unix milliseconds.
            in_use: Returns the names of segments that logs read from the archive; None: not all are known, so that none
                is removed.

        Raises:
            ArchiveDamaged: The archive cannot be understood.
            StorageError, OSError, LogReadError: The archive or the folder cannot be read or written.
        """
        pruned = prune(self._storage, from_ms)
        # In this order: a file that is deleted from the disk meanwhile is in use then.
        on_disk = self.segments.names(sealed_segments(self._files, self._files.root))
        used = in_use()
        removed = 0 if used is None else prune_segments(self._storage, from_ms, on_disk | used)
        if pruned.checkpoints or removed:
            logger.info(
                "archive: removed %d old checkpoints and %d old segments", pruned.checkpoints, removed
            )

    def write(self, check: Callable[[], None]) -> Checkpoint:
        """Write a checkpoint.

        Args: See `archive_segments`.

        Raises:
            TooFarBehind: Operations came faster than the archive took them. Write another one.
            LeaseLost: Another broker has begun to write.
            StorageError, OSError: The archive cannot be written, or the folder cannot be read.
        """
        checkpoint_id = self._take_id()
        before = self.newest
        checkpoint = Checkpoint(
            checkpoint_id, self._run, 0, 0, None if before is None else before.id, parts=0, size_bytes=0
        )
        self.needs_after = self._operations.last_number
        try:
            checkpoint = self._copy_folder(checkpoint, check)
        finally:
            self.needs_after = None
        segments = self.segments.found.values()
        self._storage.put(checkpoint.segments_name, encode_segments(segments))
        checkpoint = replace(checkpoint, time_ms=self.time_ms())
        check()
        self._storage.put(checkpoint.record_name, encode_record(checkpoint, self.owner))
        change_manifest(self._storage, lambda found: self._with_checkpoint(found, checkpoint))
        self.newest = checkpoint
        self.count += 1
        logger.info(
            "archive: wrote checkpoint %d: %d bytes, and %d segments are archived",
            *(checkpoint_id, checkpoint.size_bytes, len(segments)),
        )
        return checkpoint

    def mend(self, check: Callable[[], None]) -> bool:
        """Look for the manifest and the objects of the newest checkpoint. Write the manifest and the record again if
        they are missing or damaged; return whether others are missing, so that another checkpoint is needed.

        Raises:
            LeaseLost: The manifest is an older one, or another broker has written it: begin anew.
            StorageError, OSError: The archive cannot be read or written.
        """
        newest = self.newest
        assert newest is not None
        try:
            read_record(self._storage, newest.record_name)
        except ArchiveDamaged as exc:
            check()
            logger.error("%s: it is written again", exc)
            self._storage.put(newest.record_name, encode_record(newest, self.owner))
        found = read_manifest(self._storage)
        check()
        if found.damage:
            logger.error("%s: it is written again", found.damage)
            change_manifest(self._storage, partial(self._mended, newest))
        else:
            self._check_alone(found.manifest)
        there = self._storage.names(checkpoint_folder(newest.id))
        unlisted = {*newest.part_names, newest.segments_name}.difference(there)
        # A listing may be old.
        missing = [name for name in sorted(unlisted) if self._storage.size(name) is None]
        for name in missing:
            logger.error("%s is missing: another checkpoint is written", self._storage.url_of(name))
        return bool(missing)

    def _mended(self, newest: Checkpoint, manifest: Manifest) -> Manifest:
        if self._next_id is not None and manifest.next_id <= self._next_id:
            manifest = replace(manifest, next_id=self._next_id)
        self._check_alone(manifest)
        checkpoints = manifest.checkpoints
        if newest not in checkpoints:
            checkpoints = (*checkpoints, newest)
        return replace(manifest, checkpoints=checkpoints, owner=self.owner)

    def _take_id(self) -> int:
        """Take an id that no object has: the manifest may have been removed, or be an older one."""
        step = 1
        while True:
            self._next_id = change_manifest(self._storage, partial(self._with_next_id, step)).next_id
            taken = self._next_id - 1
            if not any(self._storage.names(folder(taken)) for folder in (stream_folder, checkpoint_folder)):
                return taken
            step *= 2

    def _with_next_id(self, step: int, manifest: Manifest) -> Manifest:
        self._check_alone(manifest)
        return replace(manifest, next_id=manifest.next_id + step, owner=self.owner)

    def _with_checkpoint(self, manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
        self._check_alone(manifest)
        return replace(manifest, checkpoints=(*manifest.checkpoints, checkpoint))

    def _check_alone(self, manifest: Manifest) -> None:
        """Raise LeaseLost if another broker has begun a checkpoint: this process has not run for some time.

        Or this one has, in a request whose answer was lost: then it begins anew.
        """
        if self._next_id is not None and manifest.next_id != self._next_id:
            raise LeaseLost(
                f"another broker writes to {self._storage.shown}, or the answer to a request was lost"
            )

    def _copy_folder(self, checkpoint: Checkpoint, check: Callable[[], None]) -> Checkpoint:
        """Write the data folder without archived segments; returns the checkpoint with what is known then."""
        frames: list[bytes | memoryview] = []
        size = parts = size_bytes = number = 0

        def put() -> None:
            nonlocal parts, size_bytes
            check()
            parts += 1
            content = encode_content(frames, checkpoint.run)
            self._storage.put(part_name(checkpoint.id, parts), content)
            size_bytes += len(content)

        for piece in CatchUp(self._files, self._operations, self.segments).pieces():
            if isinstance(piece, CaughtUp):
                number = piece.number
                break
            encoded = encode_piece(piece)
            frames += encoded
            size += sum(map(len, encoded))
            if size >= _PART_BYTES:
                put()
                frames, size = [], 0
        if frames:
            put()
        return replace(checkpoint, number=number, parts=parts, size_bytes=size_bytes)
