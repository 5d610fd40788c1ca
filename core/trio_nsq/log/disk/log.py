"""The log on disk: a folder of segments; messages are appended to the last one."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeVar

from ..errors import LogReadError, LogWriteError, ReadWouldWaitError
from ..files import Files, OpenFiles, reasonable_limit
from ..interface import (
    PREFETCH_BYTES,
    READ_BYTES,
    DiskWork,
    LogFileFacts,
    NothingToSync,
    Rotation,
    SyncPoint,
    check_order,
)
from ..records import RawRecord, RecordBatch, RecordHeader, UnsyncedPart
from ..segment.identity import FILE_NAME as IDENTITY
from ..segment.identity import Identity
from ..segment.reader import Segment
from ..segment.unwritten import ALL_STABLE
from ..segment.writer import SegmentSync, SegmentWriter
from .carried_forward import CarriedForwardSegment, records_to_carry
from .history import ArchivedFile, History, SegmentArchive
from .opening import DEFAULT_SEGMENT_BYTES, OpenedFolder

_MAX_HINTS: Final = 1024
_MOST_UNSYNCED_BYTES: Final = 16 * 1024 * 1024
"""More is not left to a schedule, even if it is few messages: docs/decisions/0004."""
_LEAST_UNSYNCED_BYTES: Final = 1024 * 1024
"""A sync of less takes longer for the metadata than for the bytes."""
_BASE: Final = attrgetter("base_sequence")

_Record = TypeVar("_Record", RecordBatch, RawRecord)


class DiskLog:
    """The `Log` of a durable topic.

    Opening a log recovers it: checks every record of the last segment, and truncates an unfinished one. The first
    append creates the folder, so a topic without messages needs no file.

    Args:
        folder: The folder of the segments; all its files named `*.log` are segments.
        segment_bytes: Begin a new segment if the last one would exceed this size.
        first_sequence: The first sequence of a log that does not exist yet.
        files: The file system; a test may replace it.
        open_files: Shared with other logs, so that all of them together keep a limited number of files open. Its file
            system is used instead of `files`.
        now_ns: The wall clock, Unix nanoseconds: the creation time of segments.
        stable_end: As in `UnwrittenRecords`.
        archive: Gets each file before it can be discarded, and serves reads from then on; None: there is none.

    Raises:
        NotASegmentError: A file in the folder has the name of a segment but is not one.
        LogReadError, LogWriteError: The operating system failed to read or write.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        first_sequence: int = 0,
        files: Files | None = None,
        open_files: OpenFiles | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        stable_end: int = ALL_STABLE,
        archive: SegmentArchive | None = None,
    ) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._open_files = open_files or OpenFiles(files or Files(), reasonable_limit())
        self._files = self._open_files.files
        self._now_ns = now_ns
        self.writes: int = 0
        # Ends of the last reads, for sequential reading: next sequence -> (base sequence of the segment, offset).
        self._hints: dict[int, tuple[int, int]] = {}
        opened = OpenedFolder(folder, self._open_files, segment_bytes, now_ns, stable_end)
        history = self._history = None if archive is None else History(self._files, folder, archive)
        try:
            opened.open()
            if history is not None:
                history.load(opened.segments[0].base_sequence if opened.segments else 0)
        except BaseException:
            opened.close()
            raise
        # Replaced, never changed, because readers in other threads use the old tuple.
        self._segments = opened.segments
        self._carried_forward = opened.carried_forward
        self._writer = opened.writer  # of the last segment
        self._identity = opened.identity
        if self._segments:
            first_sequence = self._segments[-1].next_sequence
        self.next_sequence: int = first_sequence
        self.written_sequence: int = first_sequence
        if first_sequence and not self._segments:
            self.rotate()  # which stores the sequence

    @property
    def incarnation(self) -> bytes | None:
        return self._identity.incarnation if self._identity is not None else None

    @property
    def first_sequence(self) -> int:
        if self._history is not None and self._history.archived:
            return self._history.archived[0].base_sequence
        for segment in self._segments:
            return segment.base_sequence
        return self.next_sequence

    @property
    def disk_first_sequence(self) -> int:
        for segment in self._segments:
            return segment.base_sequence
        return self.next_sequence

    @property
    def archived_files(self) -> Sequence[ArchivedFile]:
        return self._history.archived if self._history is not None else ()

    @property
    def archived_bytes(self) -> int:
        return self._history.size_bytes if self._history is not None else 0

    @property
    def discardable_before(self) -> int:
        history = self._history
        found = history.first_unarchived(self._segments[:-1], self._identity) if history is not None else None
        return self.next_sequence if found is None else found.base_sequence

    @property
    def size_bytes(self) -> int:
        carried = self._carried_forward
        return sum(segment.size for segment in self._segments) + (carried.size if carried else 0)

    @property
    def failed_syncs(self) -> int:
        return self._writer.failed_syncs if self._writer is not None else 0

    @property
    def unsynced_bytes(self) -> int:
        return self._writer.unsynced_bytes if self._writer is not None else 0

    @property
    def files(self) -> Sequence[LogFileFacts]:
        return self._segments

    def bytes_from(self, sequence: int) -> int:
        segments = self._segments
        if sequence >= self.next_sequence or not segments:
            return 0
        at = max(0, bisect_right(segments, sequence, key=_BASE) - 1)
        size = segments[at].bytes_from(sequence) + sum(segment.size for segment in segments[at + 1 :])
        if sequence < segments[0].base_sequence:
            size += sum(file.bytes_from(sequence) for file in self.archived_files)
        return size

    def last_bytes(self, size: int) -> int:
        following = self.next_sequence
        for segment in reversed(self._segments):
            if segment.size > size:
                span = range(segment.base_sequence, following)
                return span.start + bisect_left(span, True, key=lambda at: segment.bytes_from(at) <= size)
            size -= segment.size
            following = segment.base_sequence
        return following

    def rotate_unless_empty(self) -> None:
        """As `rotate`, unless the last file is empty, so that it can be discarded later."""
        if self._segments and not self._segments[-1].is_empty:
            self.rotate()

    def needs_rotation(self, size: int) -> bool:
        writer = self._writer
        if writer is None or writer.segment.header.incarnation is None:
            return True  # segments of format 1 are never appended to
        return (
            writer.written_size + size > self._segment_bytes
            and writer.written_size > writer.segment.header.size
        )

    @property
    def wants_sync(self) -> bool:
        writer = self._writer
        if writer is None:
            return False
        # Less and less is unsynced towards the end of the file, so that its last sync is short.
        room = self._segment_bytes - writer.written_size
        return writer.unsynced_bytes >= min(_MOST_UNSYNCED_BYTES, max(_LEAST_UNSYNCED_BYTES, room // 2))

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        if self.needs_rotation(sum([batch.record_bytes for batch in batches])):
            check_order(batches, self.written_sequence)
            self.rotate()
        self.write(batches)
        if sync:
            try:
                self.sync()
            except BaseException:
                self.rollback()
                raise
        self.commit(self.written_sequence)

    def write(self, batches: Sequence[RecordBatch]) -> None:
        check_order(batches, self.written_sequence)
        assert self._writer is not None  # the caller has called `rotate`
        self._writer.write(batches)
        self.written_sequence = batches[-1].next_sequence
        self.writes += 1

    def commit(self, sequence: int) -> None:
        assert self._writer is not None
        self._writer.commit(sequence)
        self.next_sequence = sequence

    def rollback(self) -> None:
        assert self._writer is not None
        self._writer.rollback()
        self.written_sequence = self.next_sequence

    @property
    def has_unsynced_cut(self) -> bool:
        return self._writer is not None and self._writer.has_unsynced_cut

    def finish_cut(self) -> None:
        if self._writer is not None:
            self._writer.finish_cut()

    def rotate(self) -> None:
        """Sync the last file and begin a new one for the next writes. All writes must be committed. Blocks.

        Raises:
            LogWriteError: There is no new file.
        """
        self.finish_cut()
        self.sync()  # so that only the last segment can be torn
        rotation = self.rotation()
        rotation.create()
        rotation.use()
        rotation.finish()

    def rotation(self) -> Rotation:
        return _NewFile(self)

    def _begin_file(self) -> tuple[Identity, SegmentWriter]:
        """Create the file for the next writes, in any thread."""
        identity = self._identity or self._create_identity()
        writer = SegmentWriter.create(
            self._open_files, self.folder, self.next_sequence, self._now_ns(), identity.incarnation
        )
        return identity, writer

    def _use_file(self, identity: Identity, writer: SegmentWriter) -> None:
        self._identity = identity
        writer.failed_syncs = self.failed_syncs
        # An empty last segment of format 1 has the same base sequence: the new one replaces it.
        before = (each for each in self._segments if each.base_sequence < writer.segment.base_sequence)
        self._replace_segments((*before, writer.segment))
        self._replace_writer(writer)

    def _create_identity(self) -> Identity:
        identity = Identity()
        try:
            self._files.make_folder(self.folder)
            identity.create(self._files, self.folder)
        except OSError as exc:
            raise LogWriteError(self.folder / IDENTITY, exc) from exc
        return identity

    def _replace_writer(self, writer: SegmentWriter | None) -> SegmentWriter | None:
        """Set `_writer`; returns the old one, as `_replace_carried_forward`."""
        old, self._writer = self._writer, writer
        return old

    def _replace_segments(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Set `_segments`; returns the old ones, as `_replace_carried_forward`."""
        old, self._segments = self._segments, segments
        return old

    def pending_wal(self) -> UnsyncedPart | None:
        return self._writer.pending_wal() if self._writer is not None else None

    def mark_in_wal(self) -> None:
        if self._writer is not None:
            self._writer.mark_in_wal()

    def sync_point(self) -> SyncPoint:
        return self._writer.sync_point() if self._writer is not None else NothingToSync()

    def end_sync(self, point: SyncPoint, error: Exception | None) -> Exception | None:
        writer = self._writer
        if writer is None or not isinstance(point, SegmentSync) or point.segment is not writer.segment:
            return error  # the file was full, and synced before the next one was begun
        return writer.end_sync(point, error)

    def sync(self) -> None:
        """Return when all writes are on stable storage. Blocks.

        Raises:
            LogWriteError: They are not. Committed messages remain readable, and the next sync includes these writes.
        """
        if self._writer is not None:
            self._writer.sync()

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        return self._read(sequence, max_bytes, Segment.read)

    def read_cached(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        return self._read(sequence, max_bytes, Segment.read, waits=False)

    def prefetch(self, sequence: int) -> None:
        base, offset = self._hints.get(sequence, (-1, 0))
        segment = self._segment_holding(sequence)
        if segment is not None and segment.base_sequence == base:
            segment.prefetch(offset, PREFETCH_BYTES)

    def read_raw(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RawRecord]:
        return self._read(sequence, max_bytes, Segment.read_raw)

    def _read(
        self,
        sequence: int,
        max_bytes: int,
        read: Callable[[Segment, int, int, int, bool], tuple[list[_Record], int]],
        *,
        waits: bool = True,
    ) -> list[_Record]:
        while True:
            segment = self._segment_holding(sequence, waits=waits)
            if segment is None:
                return []
            sequence = max(sequence, segment.base_sequence)
            base, offset = self._hints.get(sequence, (-1, 0))
            following = segment.next_sequence
            try:
                if base != segment.base_sequence:
                    offset = segment.locate(sequence, waits=waits)
                records, offset = read(segment, sequence, offset, max_bytes, waits)
            except LogReadError:
                if self._still_has(segment):
                    raise
                continue  # the segment was discarded before this read began
            self._hints.pop(sequence, None)
            if records:
                if len(self._hints) >= _MAX_HINTS:
                    self._hints.clear()
                self._hints[records[-1].next_sequence] = (segment.base_sequence, offset)
                return records
            if following < self.next_sequence:
                segment.damage.messages_missing(sequence, following, segment.size)
            sequence = following  # the rest of this segment is damaged

    def _segment_holding(self, sequence: int, *, waits: bool = True) -> Segment | None:
        """Return the segment that holds a sequence, or the next one; None at the end. Raises LogReadError."""
        segments = self._segments
        if sequence >= self.next_sequence or not segments:  # none: the log was closed during a read
            return None
        if sequence < segments[0].base_sequence and self._history is not None and self._identity is not None:
            if not waits and self._history.file_after(sequence) is not None:
                raise ReadWouldWaitError(self.folder)
            archived = self._history.segment_after(sequence, self._identity)
            if archived is not None:
                return archived
        index = bisect_right(segments, sequence, key=_BASE) - 1
        return segments[max(index, 0)]

    def _still_has(self, segment: Segment) -> bool:
        """Whether a segment is not discarded: it is on the disk, or was opened in the archive."""
        return segment in self._segments or segment.path.parent != self.folder

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        while (segment := self._segment_holding(sequence)) is not None:
            following = segment.next_sequence
            try:
                for header in segment.headers(sequence):
                    yield header
                    sequence = header.next_sequence
            except LogReadError:
                if self._still_has(segment):
                    raise
                continue  # the segment was discarded before this read began
            sequence = max(sequence, following)

    def read_carried_forward(self, sequence: int) -> list[RecordBatch]:
        carried = self._carried_forward
        record = carried.read(sequence) if carried is not None else None
        return [record] if record is not None else []

    @property
    def has_carried_forward(self) -> bool:
        return self._carried_forward is not None

    def carry_forward(
        self, sequences: Sequence[int], max_bytes: int, keeps_metadata: Callable[[bytes], bool] = bool
    ) -> Callable[[], Callable[[], None] | None]:
        old, identity = self._carried_forward, self._identity

        def write() -> Callable[[], None] | None:
            records: list[RecordBatch] = []
            size = 0
            for record in records_to_carry(sequences, self._record_holding, keeps_metadata):
                records.append(record)
                size += record.record_bytes
                if size > max_bytes:
                    return None
            new: CarriedForwardSegment | None = None
            if records:
                assert identity is not None  # there are messages
                new = CarriedForwardSegment.replace(
                    self._open_files, self.folder, identity.incarnation, records, old
                )
            elif old is not None:
                old.remove()

            def use() -> None:
                self._replace_carried_forward(new)

            return use

        return write

    def _replace_carried_forward(self, new: CarriedForwardSegment | None) -> CarriedForwardSegment | None:
        """Set `_carried_forward`, and return the old one, so that the caller drops the last reference to it.

        Compiled code drops the old value of an attribute before it sets the new one. The end of a segment closes its
        file, and meanwhile other threads run: they would read an attribute whose object is being deleted.
        """
        old, self._carried_forward = self._carried_forward, new
        return old

    def _record_holding(self, sequence: int) -> RecordBatch | None:
        """Return the record with this message; None if it is damaged. Raises LogReadError."""
        is_on_disk = sequence >= self.disk_first_sequence
        found = self.read(sequence, 1) if is_on_disk else self.read_carried_forward(sequence)
        return found[0] if found and found[0].base_sequence <= sequence else None

    def discard_before(self, sequence: int) -> None:
        while (discard := self.discard_first(sequence)) is not None:
            discard()()

    def discard_first(self, sequence: int) -> DiskWork | None:
        if len(self._segments) < 2 or self._segments[1].base_sequence > sequence:
            return None
        segments = self._segments
        discarded, history = segments[0], self._history
        if history is not None:
            passed = (each for each, after in pairwise(segments) if after.base_sequence <= sequence)
            if not history.may_delete(passed, self._identity):
                return None

        def remove() -> Callable[[], None]:
            read_from_archive = history.take(discarded) if history is not None else None
            discarded.remove()

            def forget() -> None:
                if read_from_archive is not None:
                    read_from_archive()
                self._replace_segments(self._segments[1:])
                discarded.close()  # takes effect after the reads in progress

            return forget

        return remove

    def forget_archived(self, sequence: int) -> DiskWork | None:
        return self._history.forget_before(sequence) if self._history is not None else None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._replace_writer(None)
        for segment in self._segments:
            segment.close()
        self._replace_segments(())
        if self._carried_forward is not None:
            self._carried_forward.close()
            self._replace_carried_forward(None)


class _NewFile:
    """The beginning of a new file: a `Rotation`."""

    _created: tuple[Identity, SegmentWriter]  # by `create`

    def __init__(self, log: DiskLog) -> None:
        self._log = log
        self._full = log._writer.segment if log._writer is not None else None

    def create(self) -> None:
        self._created = self._log._begin_file()

    def use(self) -> None:
        self._log._use_file(*self._created)

    def finish(self) -> None:
        if self._full is not None:
            self._full.save_index()
