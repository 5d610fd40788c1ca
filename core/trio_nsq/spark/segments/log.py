"""One topic's log, read from its segments instead of from a broker.

The files are those of a stopped broker, of a backup, or of a running broker; nothing is written. The log has the
messages that a broker would have after a start with these files, with one exception: messages that only the
carried-forward segment has are not read, because brokers do not return them by sequence either.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path

from ...client.reading.batches import Found, batches_and_gaps
from ...client.reading.broker_log import Bounds, LogReplaced
from ...log.disk.opening import end_of_unusable
from ...log.errors import LogReadError, UnusableSegmentError
from ...log.files import Files
from ...log.gaps import Span, gaps
from ...log.inspection.findings import Finding, Kind
from ...log.inspection.segments import (
    ScannedRecord,
    SegmentPath,
    find_identity,
    scan_segment,
    segment_bytes,
    segment_paths,
)
from ...log.inspection.selection import select_batches
from ...log.positions import parse_position
from ...log.records import HEADER_BYTES, RecordBatch, RecordHeader, decode_header, decode_payload
from ...log.segment.format import FILE_HEADER_BYTES, base_in_name
from ...log.segment.identity import find_header
from ...log.segment.seed_search import Read
from ...log.selection import Selection
from ..storage import Storage
from .archive import ArchivedName
from .files import StoredFiles


class SegmentLog:
    """The log of one topic in a folder of segments. Every call lists the folder again.

    Args:
        folder: The topic's folder, with its segments and the file `incarnation`.
        files: The file system of the folder; None: the local one.
        shown: The folder for messages; None: its path.
        incarnation: The topic's incarnation; reading another one fails. None: not checked.
    """

    def __init__(
        self,
        folder: Path,
        files: Files | None = None,
        shown: str | None = None,
        incarnation: bytes | None = None,
    ) -> None:
        self._folder = folder
        self._files = files or Files()
        self._shown = str(folder) if shown is None else shown
        self._incarnation = incarnation
        self._ends: dict[tuple[Path, int], int] = {}  # the end of the log, by last segment and its size

    # ------------------------------------------------------------------ the log

    def bounds(self, at: str = "latest") -> Bounds:
        """Return the bounds of the log, and the sequence of a position.

        Args:
            at: A position, see docs/how-to/read-and-replay.md.

        Raises:
            LogReplaced: The folder has another incarnation of the topic.
            LogReadError, StorageError: The segments cannot be read.
            ValueError: `at` is not a position.
        """
        position = parse_position(at, time.time_ns())
        segments = self._segments()
        if not segments:
            return Bounds(0, 0, 0, 0)
        first, end = base_in_name(segments[0].path), self._end(segments)
        if position.kind == "time":
            sequence = min(self._sequence_at(segments, position.value), end)
        elif position.kind == "sequence":
            sequence = max(first, min(position.value, end))
        else:
            sequence = first if position.kind == "earliest" else end
        sizes = [segment_bytes(segment, self._files) for segment in segments]
        starts = [*(base_in_name(segment.path) for segment in segments), end]
        from_at = sum(
            size * (following - max(start, min(sequence, following))) // max(1, following - start)
            for size, (start, following) in zip(sizes, pairwise(starts), strict=True)
        )
        return Bounds(first, end, sum(sizes), sequence, from_at)

    def id_at(self, sequence: int) -> str | None:
        """See `Log.id_at`; None also if the message is damaged. Raises the errors of `bounds`."""
        for found in self._batches(self._segments(), Span(sequence, sequence + 1)):
            return f"{found.first_id + sequence - found.base_sequence:016x}"
        return None

    def read(self, span: Span) -> Iterator[Found]:
        """Read the records and the gaps of a span, in order. Each record's checksums are verified.

        Raises:
            LogReplaced: The folder has another incarnation of the topic, or the log ends before the span.
            LogReadError, StorageError: The segments cannot be read.
        """
        segments = self._segments()
        at, kept_from = span.first, _first_of(segments, span)
        for batch in self._batches(segments, span):
            if batch.base_sequence > at:
                # A running broker may have deleted segments meanwhile.
                kept_from = max(kept_from, _first_of(self._segments(), span))
            for found in batches_and_gaps([batch], at, span.end, kept_from):
                yield found
                at = found.next_sequence
        if at < span.end:
            segments = self._segments()
            end = self._end(segments) if segments else 0
            if end < span.end:
                raise LogReplaced(
                    f"the log in {self._shown} ends before message {end}, and had message {span.end - 1}: it is "
                    "another log, or lost its last messages"
                )
            yield from gaps(at, span.end, max(kept_from, _first_of(segments, span)))

    def starts(self) -> list[int]:
        """Return the first sequence of each segment, in order: a task that reads whole segments reads least."""
        return [base_in_name(segment.path) for segment in self._segments()]

    # ------------------------------------------------------------------ segments

    def _segments(self) -> list[SegmentPath]:
        """List the segments, oldest first. Raises the errors of `read`."""
        segments = self._list()
        if self._incarnation is not None:
            identity, _ = find_identity(self._files, self._folder)
            if identity is not None and identity.incarnation != self._incarnation:
                raise LogReplaced(
                    f"the log in {self._shown} is not the one that was planned: the topic was deleted and recreated"
                )
        if len(segments) > 1 and self._is_unused(segments[-1], segments[-2]):
            return [*segments[:-2], SegmentPath(segments[-2].path, None)]
        return segments

    def _list(self) -> list[SegmentPath]:
        return segment_paths(self._folder, self._files)[0]

    def _is_unused(self, last: SegmentPath, before: SegmentPath) -> bool:
        """Whether the last segment has no record and the one before was written to later, as after a failed write."""
        if segment_bytes(last, self._files) > FILE_HEADER_BYTES:
            return False
        base_sequence = base_in_name(last.path)
        headers = self._headers(SegmentPath(before.path, None), base_sequence - 1)
        return any(header.next_sequence > base_sequence for header in headers)

    def _end(self, segments: Sequence[SegmentPath]) -> int:
        """Return the sequence after the last message, as a broker's recovery of the last segment finds it."""
        last = segments[-1]
        if last.limit is not None:
            return last.limit
        version = (last.path, segment_bytes(last, self._files))
        if version not in self._ends:
            self._ends = {version: self._read_end(last)}
        return self._ends[version]

    def _read_end(self, last: SegmentPath) -> int:
        try:
            with self._opened(last.path) as fd:
                read, size = partial(self._files.read, fd), self._files.size(fd)
                identity, _ = find_identity(self._files, self._folder)
                head = find_header(read, size, last.path, identity)
                return self._end_of_batches(last, read, size, head.seed if head is not None else 0)
        except UnusableSegmentError as exc:
            return end_of_unusable(exc)

    def _end_of_batches(self, last: SegmentPath, read: Read, size: int, seed: int) -> int:
        """Return the sequence after the last batch of messages that recovery keeps, damaged or not."""
        end = batch_end = base_in_name(last.path)
        for found in scan_segment(last, self._files, lambda _: False):
            if isinstance(found, Finding):
                # Recovery cuts a torn batch off. A whole first record of it shows that the batch before has ended.
                if found.kind is Kind.TORN and (
                    torn := decode_header(read(HEADER_BYTES, found.offset), 0, seed)
                ):
                    is_whole = found.offset + torn.record_bytes <= size
                    end = batch_end if is_whole and not torn.has_previous else end
                continue
            header = found.header
            if not header.has_previous:
                end = batch_end  # also of a batch whose last record is damaged
            batch_end = header.next_sequence
            if not header.has_next:
                end = batch_end
        return end

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        """Open a file for reading. Raises LogReadError, also for errors in the block."""
        try:
            fd = self._files.open_read_only(path)
            try:
                yield fd
            finally:
                self._files.close(fd)
        except OSError as exc:
            raise LogReadError(path, exc) from exc

    def _headers(self, segment: SegmentPath, first_sequence: int = 0) -> Iterator[RecordHeader]:
        for found in scan_segment(segment, self._files, lambda _: False, first_sequence):
            if not isinstance(found, Finding):
                yield found.header

    def _sequence_at(self, segments: Sequence[SegmentPath], time_ns: int) -> int:
        """Return the first sequence published at this time or later, or a sequence from the end of the log on.

        As `trio_nsq.log.interface.sequence_at`, but reads a segment from its beginning: it may have no index.
        """

        def is_late(index: int) -> bool:
            headers = chain.from_iterable(map(self._headers, segments[index:]))
            return all(header.timestamp_ns >= time_ns for header in islice(headers, 1))

        late = bisect_left(range(len(segments)), True, key=is_late)
        if not late:
            return base_in_name(segments[0].path)
        at = base_in_name(segments[late - 1].path)
        for header in self._headers(segments[late - 1]):
            if header.timestamp_ns >= time_ns:
                break
            at = header.next_sequence
        return at

    # ------------------------------------------------------------------ records

    def _batches(self, segments: Sequence[SegmentPath], span: Span) -> Iterator[RecordBatch]:
        """Yield the undamaged records that have messages of a span, in order."""
        if not segments:
            return
        whole = [segment for segment in segments if segment.limit is not None]
        selection = Selection(first_sequence=span.first, end_sequence=span.end)
        batches = select_batches(whole, selection, self._files)
        found = chain(batches, self._tail(segments[-1], span) if segments[-1].limit is None else ())
        for batch in found:
            if isinstance(batch, RecordBatch):
                yield batch

    def _tail(self, segment: SegmentPath, span: Span) -> Iterator[RecordBatch]:
        """Yield the records of the last segment that have messages of a span.

        Recovery keeps all records of a batch of messages or none, so a record is yielded when its batch is complete.
        """
        if span.end <= base_in_name(segment.path):
            return
        batch: list[ScannedRecord] = []
        for found in scan_segment(segment, self._files):
            if isinstance(found, Finding):
                continue
            header = found.header
            follows = bool(batch) and batch[-1].header.next_sequence == header.base_sequence
            if not (header.has_previous and follows):
                batch.clear()
                if header.has_previous:
                    continue  # the beginning of its batch cannot be read
            batch.append(found)
            if header.has_next:
                continue
            for record in batch:
                if record.header.next_sequence > span.first and record.header.base_sequence < span.end:
                    decoded = decode_payload(record.header, bytes(record.payload))
                    if decoded is not None:
                        yield decoded
            batch.clear()
            if header.next_sequence >= span.end:
                return


class ArchivedLog(SegmentLog):
    """The log of one incarnation of a topic in an archive. Every segment is complete, and its name has its end.

    Args:
        storage: The folder of the incarnation.
    """

    def __init__(self, storage: Storage) -> None:
        self._stored = StoredFiles(storage)
        super().__init__(Path(storage.shown), self._stored, storage.shown)

    def _list(self) -> list[SegmentPath]:
        segments = []
        for path, _ in super()._list():
            name = ArchivedName.parse(self._stored.stored_name(path.name))
            if name is not None:
                segments.append(SegmentPath(path, name.last + 1))
        return segments


def _first_of(segments: Sequence[SegmentPath], span: Span) -> int:
    """Return the oldest retained sequence; the end of the span if there is none."""
    return base_in_name(segments[0].path) if segments else span.end
