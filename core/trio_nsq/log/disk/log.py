"""A log on disk: a folder of segments, the last of which is appended to."""

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import TypeVar

from ...protocol import pack_messages
from ..errors import ForeignSegmentError, LogReadError, LogWriteError, UnusableSegmentError
from ..files import Files, OpenFiles, reasonable_limit, temporary_of
from ..interface import READ_BYTES, READ_SOON_BYTES, LogFileFacts, check_order
from ..records import RawRecord, RecordBatch, RecordHeader
from ..segment.format import SUFFIX
from ..segment.identity import FILE_NAME as IDENTITY
from ..segment.identity import Identity, base_in_name, owner_of
from ..segment.index import SUFFIX as INDEX_SUFFIX
from ..segment.reader import Segment
from .carried_forward import FILE_NAME as CARRIED_FORWARD
from .carried_forward import CarriedForwardSegment

logger = logging.getLogger("trio_nsq.log")

DEFAULT_SEGMENT_BYTES = 100 * 1024 * 1024
"""As nsqd's max-bytes-per-file."""
_MAX_HINTS = 1024
_FEWEST_BYTES = 4
"""Of a message: its size."""
_BASE = attrgetter("base_sequence")

_Record = TypeVar("_Record", RecordBatch, RawRecord)


class DiskLog:
    """The `Log` of a durable topic.

    Opening recovers: the last segment is checked record by record, and a torn tail cut off. The folder is made
    with the first append, so a topic without messages costs no file.

    Args:
        folder: Holds the segments and nothing else named `*.log`.
        segment_bytes: Begin a new segment once the last one would grow past this.
        first_sequence: Of a log that is not there yet.
        files: The file system; a test may bring its own.
        open_files: Shared with other logs, so that together they do not have too many files open; it has a file
            system of its own.
        now_ns: The wall clock, Unix nanoseconds; stamps new segments.

    Raises:
        NotASegmentError: A file in the folder is named like a segment and is none.
        LogReadError, LogWriteError: The operating system refused.
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
    ) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._open_files = open_files or OpenFiles(files or Files(), reasonable_limit())
        self._files = self._open_files.files
        self._now_ns = now_ns
        # Replaced, never changed: a reader in another thread keeps to the one it began with.
        self._segments: tuple[Segment, ...] = ()
        self._replacing = Lock()
        self._identity: Identity | None = None  # made with the first segment
        self._next_sequence = self._written_sequence = first_sequence
        self.writes = 0
        self._carried_forward: CarriedForwardSegment | None = None  # replaced, likewise
        # Where a reader left off: next sequence -> (segment's base, offset). Sequential reading needs no look-up.
        self._hints: dict[int, tuple[int, int]] = {}
        try:
            self._open()
            if first_sequence and not self._segments:
                self._begin_segment()  # which keeps the place
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            names = self._files.names(self.folder)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise LogReadError(self.folder, exc) from exc
        paths = [self.folder / name for name in sorted(names) if name.endswith(SUFFIX)]
        self._identify(paths, there=IDENTITY in names)
        if self._identity is None:
            return
        unusable: list[UnusableSegmentError] = []
        for path in paths:
            try:
                segment = Segment.open(self._open_files, path, self._identity)
            except UnusableSegmentError as exc:
                unusable.append(exc)
                continue
            if segment is not None and (not segment.is_empty or path == paths[-1]):
                self._segments += (segment,)
                continue
            logger.warning("%s: removed, it holds no record", path)
            try:
                self._files.unlink(path)
            except OSError as exc:
                raise LogWriteError(path, exc) from exc
        self._drop_left_over()
        if self._identity.note(segment.header for segment in self._segments):
            self._note(self._identity)
        if unusable:
            self._set_aside(unusable, self._identity.incarnation)
        if not self._segments:
            return
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            segment.next_sequence = following.base_sequence
        self._check_files_beside(set(names))
        if CARRIED_FORWARD in names:
            self._carried_forward = CarriedForwardSegment.open(
                self._open_files, self.folder, self._identity.incarnation
            )
        self._segments[-1].recover()
        self._next_sequence = self._written_sequence = self._segments[-1].next_sequence

    def _drop_left_over(self) -> None:
        """Remove an empty last file that was begun in vain: the file before it was written to afterwards."""
        if len(self._segments) < 2 or not self._segments[-1].is_empty:
            return
        before, last = self._segments[-2:]
        if not before.holds_beyond(last.base_sequence):
            return
        logger.warning("%s: removed, it holds no record, and the file before it goes on", last.path)
        try:
            self._files.unlink(last.path)
        except OSError as exc:
            raise LogWriteError(last.path, exc) from exc
        last.close()
        self._segments = self._segments[:-1]

    def _identify(self, paths: Sequence[Path], *, there: bool) -> None:
        """Find out which files are the log's own, and note it; `there`: that was noted before, be it damaged by now."""
        identity = Identity.read(self._files, self.folder)
        if identity is None and paths:
            if there:
                logger.error("%s: damaged, made again by what the segments say", self.folder / IDENTITY)
            identity = Identity.learn(self._files, paths)
            self._note(identity)
        self._identity = identity

    def _note(self, identity: Identity) -> None:
        try:
            self._files.replace(self.folder / IDENTITY, identity.encode())
        except OSError as exc:
            logger.warning("%s", LogWriteError(self.folder / IDENTITY, exc))  # the next start makes up for it

    def _set_aside(self, unusable: Sequence[UnusableSegmentError], incarnation: bytes) -> None:
        """Give other names to files that the log cannot have among its own.

        If they are the last, the log goes on behind all sequences that may have been used.
        """
        last = self._segments[-1] if self._segments else None
        if last is None or base_in_name(unusable[-1].path) > last.base_sequence:
            end = max(map(self._end_of, unusable))
            if last is not None:
                last.recover()  # it may be the one that was written to
                last.seal()
                end = max(end, last.next_sequence)
            # First: if they were gone, the sequences would be used again.
            new = Segment.create(self._open_files, self.folder, end, self._now_ns(), incarnation)
            self._segments += (new,)
        for error in unusable:
            reason = error.reason
            if isinstance(error, ForeignSegmentError):
                owner = owner_of(error.header, self._files, self.folder)
                reason += f", whose log is {owner}" if owner is not None else ""
            try:
                aside = self._files.set_aside(error.path, error.suffix)
            except OSError as exc:
                raise LogWriteError(error.path, exc) from exc
            logger.error("%s: set aside as %s: %s", error.path, aside.name, reason)

    def _end_of(self, error: UnusableSegmentError) -> int:
        """A sequence past all that were used in a file which cannot be read, or which took the place of one."""
        size = error.size
        if isinstance(error, ForeignSegmentError):
            size = max(size, self._segment_bytes)
        return base_in_name(error.path) + 1 + size // _FEWEST_BYTES

    def _check_files_beside(self, names: set[str]) -> None:
        """Remove the files that no segment needs, and make the indexes that are missing.

        What is left of a write that was cut off goes first: making the index anew would use the same temporary file.
        """
        needed = {segment.index_path.name for segment in self._segments}
        leftovers = {temporary_of(self.folder / name).name for name in (CARRIED_FORWARD, IDENTITY)}
        for name in sorted(names - needed):
            if INDEX_SUFFIX in name or name in leftovers:
                try:
                    self._files.unlink(self.folder / name)
                except OSError as exc:
                    raise LogWriteError(self.folder / name, exc) from exc
        for segment in self._segments[:-1]:
            if segment.index_path.name not in names and segment.is_worth_an_index:
                logger.info("%s: making its index, which is lost", segment.path)
                try:
                    segment.make_index()
                except LogReadError as exc:
                    logger.warning("%s: it goes without an index", exc)  # look-ups in it read more

    @property
    def first_sequence(self) -> int:
        for segment in self._segments:
            return segment.base_sequence
        return self._next_sequence

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    @property
    def written_sequence(self) -> int:
        return self._written_sequence

    @property
    def size_bytes(self) -> int:
        carried = self._carried_forward
        return sum(segment.size for segment in self._segments) + (carried.size if carried else 0)

    @property
    def files(self) -> Sequence[LogFileFacts]:
        return self._segments

    def bytes_from(self, sequence: int) -> int:
        segments = self._segments
        if sequence >= self._next_sequence or not segments:
            return 0
        at = max(0, bisect_right(segments, sequence, key=_BASE) - 1)
        return segments[at].bytes_from(sequence) + sum(segment.size for segment in segments[at + 1 :])

    def last_bytes(self, size: int) -> int:
        following = self._next_sequence
        for segment in reversed(self._segments):
            if segment.size > size:
                span = range(segment.base_sequence, following)
                return span.start + bisect_left(span, True, key=lambda at: segment.bytes_from(at) <= size)
            size -= segment.size
            following = segment.base_sequence
        return following

    def roll(self) -> None:
        if self._segments and not self._segments[-1].is_empty:
            self._begin_segment()

    def begins_file(self, size: int) -> bool:
        return not self._segments or not self._fits(size)

    def _fits(self, size: int) -> bool:
        last = self._segments[-1]
        if last.header.incarnation is None:
            return False  # of format 1: only programs that made such files append to them
        return last.written_size + size <= self._segment_bytes or last.written_size <= last.header.size

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        if self.begins_file(sum([batch.record_bytes for batch in batches])):
            check_order(batches, self._written_sequence)
            self.begin_file()
        self.write(batches)
        if sync:
            try:
                self.sync()
            except BaseException:
                self.take_back()
                raise
        self.commit(self._written_sequence)

    def write(self, batches: Sequence[RecordBatch]) -> None:
        check_order(batches, self._written_sequence)
        self._segments[-1].write(batches)
        self._written_sequence = batches[-1].next_sequence
        self.writes += 1

    def commit(self, sequence: int) -> None:
        self._segments[-1].commit(sequence)
        self._next_sequence = sequence

    def take_back(self) -> None:
        self._segments[-1].take_back()
        self._written_sequence = self._next_sequence

    def begin_file(self) -> None:
        self._begin_segment()

    def _begin_segment(self) -> Segment:
        if self._segments:
            self._segments[-1].seal()  # so that only the last segment can be torn
        if self._identity is None:
            identity = Identity()
            try:
                self._files.make_folder(self.folder)
                identity.create(self._files, self.folder)
            except OSError as exc:
                raise LogWriteError(self.folder / IDENTITY, exc) from exc
            self._identity = identity
        segment = Segment.create(
            self._open_files, self.folder, self._next_sequence, self._now_ns(), self._identity.incarnation
        )
        with self._replacing:
            # An empty file of format 1 has become the new one.
            before = (each for each in self._segments if each.base_sequence < segment.base_sequence)
            self._segments = (*before, segment)
        return segment

    def sync(self) -> None:
        if self._segments:
            self._segments[-1].sync()

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        return self._read(sequence, max_bytes, Segment.read)

    def read_now(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        return self._read(sequence, max_bytes, Segment.read_now, Segment.locate_now)

    def read_soon(self, sequence: int) -> None:
        base, offset = self._hints.get(sequence, (-1, 0))
        segment = self._segment_holding(sequence)
        if segment is not None and segment.base_sequence == base:
            segment.read_soon(offset, READ_SOON_BYTES)

    def read_raw(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RawRecord]:
        return self._read(sequence, max_bytes, Segment.read_raw)

    def _read(
        self,
        sequence: int,
        max_bytes: int,
        read: Callable[[Segment, int, int, int], tuple[list[_Record], int]],
        locate: Callable[[Segment, int], int] = Segment.locate,
    ) -> list[_Record]:
        while True:
            segment = self._segment_holding(sequence)
            if segment is None:
                return []
            sequence = max(sequence, segment.base_sequence)
            base, offset = self._hints.get(sequence, (-1, 0))
            following = segment.next_sequence
            try:
                if base != segment.base_sequence:
                    offset = locate(segment, sequence)
                records, offset = read(segment, sequence, offset, max_bytes)
            except LogReadError:
                if segment is self._segment_holding(sequence):
                    raise
                continue  # it was discarded before this began to read
            self._hints.pop(sequence, None)
            if records:
                self._remember(records[-1].next_sequence, segment, offset)
                return records
            if following < self._next_sequence:
                segment.report_missing(sequence)
            sequence = following  # all that was left of this segment is damaged

    def _remember(self, sequence: int, segment: Segment, offset: int) -> None:
        if len(self._hints) >= _MAX_HINTS:
            self._hints.clear()
        self._hints[sequence] = (segment.base_sequence, offset)

    def _segment_holding(self, sequence: int) -> Segment | None:
        segments = self._segments
        if sequence >= self._next_sequence or not segments:  # closed: the topic is deleted under a reader
            return None
        index = bisect_right(segments, sequence, key=_BASE) - 1
        return segments[max(index, 0)]

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        while (segment := self._segment_holding(sequence)) is not None:
            following = segment.next_sequence
            try:
                for header in segment.headers(sequence):
                    yield header
                    sequence = header.next_sequence
            except LogReadError:
                if segment is self._segment_holding(sequence):
                    raise
                continue  # it was discarded before this began to read
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
    ) -> bool:
        """As `Log.carry_forward`."""
        old = self._carried_forward
        records: list[RecordBatch] = []
        size = 0
        for record in self._records_to_carry(sequences, keeps_metadata):
            records.append(record)
            size += record.record_bytes
            if size > max_bytes:
                return False
        if records:
            assert self._identity is not None  # there are messages
            incarnation = self._identity.incarnation
            self._carried_forward = CarriedForwardSegment.replace(
                self._open_files, self.folder, incarnation, records, old
            )
        elif old is not None:
            old.remove()
            self._carried_forward = None
        return True

    def _records_to_carry(
        self, sequences: Sequence[int], keeps_metadata: Callable[[bytes], bool]
    ) -> Iterator[RecordBatch]:
        """Records that hold these messages, which ascend, and not much else."""
        record: RecordBatch | None = None
        bodies: Sequence[bytes] = ()
        for sequence in sequences:
            if record is None or sequence >= record.next_sequence:
                record, bodies = self._holding(sequence), ()
                if record is not None and not keeps_metadata(record.metadata):
                    record = replace(record, metadata=b"")
                if record is not None and (record.metadata or record.count == 1):
                    yield record  # metadata is about all of its messages
            if record is None or record.metadata or record.count == 1:
                continue
            if not bodies:
                bodies = record.messages.bodies()
            at = sequence - record.base_sequence
            alone = pack_messages([bodies[at]])
            yield RecordBatch(sequence, record.first_id + at, record.timestamp_ns, record.due_ns, alone)

    def _holding(self, sequence: int) -> RecordBatch | None:
        """The record with this message; None if it is damaged. Raises LogReadError."""
        found = (
            self.read(sequence, 1) if sequence >= self.first_sequence else self.read_carried_forward(sequence)
        )
        return found[0] if found and found[0].base_sequence <= sequence else None

    def discard_before(self, sequence: int) -> None:
        """As `Log.discard_before`: whole segments go, never the last. Raises LogWriteError."""
        while len(self._segments) > 1 and self._segments[1].base_sequence <= sequence:
            discarded = self._segments[0]
            discarded.remove()
            with self._replacing:
                self._segments = self._segments[1:]
            discarded.close()  # who is reading it may finish

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = ()
        if self._carried_forward is not None:
            self._carried_forward.close()
            self._carried_forward = None
