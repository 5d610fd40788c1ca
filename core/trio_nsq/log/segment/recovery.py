"""Recovery of the last segment of a log after a crash.

A crash can leave a partial record, or bytes that are not a record, at the end of the file. They were being written and
were never acknowledged. Recovery truncates them, with all records of the same batch of messages. Zeros at the end were
written ahead, see `SegmentWriter`.

A power cut can also leave later records and not an earlier one, see `UnwrittenRecords`. No sync had covered the earlier
one, so neither it nor anything after it was acknowledged: recovery truncates all of that.

Any other record of full length that does not match its checksum is damaged. It stays, its sequences remain used, and
readers skip it. Recovery makes the other records of its batch unreadable too, so that no part of the batch is
delivered.
"""

from ..errors import LogReadError, LogWriteError
from ..files import Files
from ..records import HEADER_BYTES, RecordHeader, encode_spoiled
from .reader import Segment
from .scan import NO_LIMIT, SCAN_BYTES
from .unwritten import ALL_STABLE, UnwrittenRecords
from .writer import SegmentWriter


def recover(
    files: Files, segment: Segment, stable_end: int = ALL_STABLE, known: Segment | None = None
) -> SegmentWriter:
    """Check every record, build the index, truncate an unfinished record or batch, and sync the rest.

    Args:
        stable_end: As in `UnwrittenRecords`.
        known: The segment as an earlier recovery has left it. The file still begins with that: only the rest is
            checked.

    Damage before intact records stays, and is logged.

    Returns:
        A writer that appends to the segment.

    Raises:
        LogReadError, LogWriteError: The operating system failed to read or write.
    """
    size = segment.size
    if known is not None:
        segment.index = known.index.copy()
        segment.next_sequence, segment.first_ns = known.next_sequence, known.first_ns
        segment.newest_ns = known.newest_ns
    start = end = segment.header.size if known is None else known.size
    batch = _BatchRecords()
    sequence = segment.base_sequence if known is None else known.next_sequence

    def read(count: int, offset: int) -> bytes:
        with segment.file as fd:
            return files.read_fully(fd, count, offset)

    unwritten = UnwrittenRecords(segment.header, stable_end, read)

    def is_unwritten(offset: int, upto: int) -> bool:
        try:
            if unwritten.begin_at(offset, upto, sequence):
                return True
            # A reader does not know what is stable. Its log must not have messages that a broker will cut off.
            return files.is_read_only and unwritten.is_torn(upto)
        except OSError as exc:
            raise LogReadError(segment.path, exc) from exc

    with segment.scan(start, SCAN_BYTES, NO_LIMIT, ends_at=is_unwritten) as (window, scanned):
        for offset, header in scanned:
            following = offset + header.record_bytes
            if following > size:
                break
            if not header.has_previous and batch.records:
                _keep(files, segment, batch)  # the end of the previous batch is missing
                batch = _BatchRecords()
            at = window.at(offset, header.record_bytes)
            payload = memoryview(window.data)[at + HEADER_BYTES : at + header.record_bytes]
            is_whole = header.matches(payload)
            sequence = header.base_sequence
            if not is_whole and is_unwritten(offset, following):
                break
            sequence = header.next_sequence
            if not is_whole:
                segment.damage.record_damaged(offset, following, size)
            if is_whole and not (header.has_previous or header.has_next):
                _keep_record(segment, offset, header)  # most batches are one record
                end = following
                continue
            batch.add(offset, header, is_whole)
            if not header.has_next:
                _keep(files, segment, batch)
                batch = _BatchRecords()
                end = following
    segment.size = segment.index.up_to = end
    # Sync all records: a killed process may have written some without a sync, and they will be delivered now.
    writer = SegmentWriter(files, segment, synced_to=start)
    if end < size:
        try:
            has_more = not unwritten.is_zeros(end)
        except OSError as exc:
            raise LogReadError(segment.path, exc) from exc
        if has_more:
            segment.damage.end_cut(end, size)
        writer.cut()
    writer.sync()
    if end == start:
        try:
            files.sync_folder(segment.path.parent)  # a killed process may not have done this
        except OSError as exc:
            raise LogWriteError(segment.path, exc) from exc
    return writer


def holds_beyond(segment: Segment, sequence: int) -> bool:
    """Whether the segment has an intact header of a record with this sequence or a later one. Raises LogReadError."""
    index = segment.saved_index()  # only of a segment that was not written to since
    start = index.find(sequence) if index is not None else None
    with segment.scan(start or segment.header.size, SCAN_BYTES, NO_LIMIT) as (_, records):
        return any(header.next_sequence > sequence for _, header in records)


class _BatchRecords:
    """The records of one batch of messages found so far.

    Attributes:
        records: The offset and header of each, and whether its payload matches its checksum.
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, RecordHeader, bool]] = []
        self._end = 0
        self._is_whole = True

    def add(self, offset: int, header: RecordHeader, is_whole: bool) -> None:
        follows = offset == self._end if self.records else not header.has_previous
        self._is_whole = self._is_whole and follows and is_whole
        self.records.append((offset, header, is_whole))
        self._end = offset + header.record_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the batch has all its records, undamaged."""
        return self._is_whole and bool(self.records) and not self.records[-1][1].has_next


def _keep_record(segment: Segment, offset: int, header: RecordHeader) -> None:
    segment.index.add(header.base_sequence, offset)
    segment.first_ns = segment.first_ns or header.timestamp_ns
    segment.newest_ns = header.timestamp_ns
    segment.next_sequence = header.next_sequence


def _keep(files: Files, segment: Segment, batch: _BatchRecords) -> None:
    """Keep the sequences of a batch's records; if the batch is not complete, make all its records unreadable."""
    for offset, header, is_whole in batch.records:
        _keep_record(segment, offset, header)
        if is_whole and not batch.is_complete:
            try:
                with segment.file as fd:
                    files.write(fd, offset, [encode_spoiled(header, segment.seed)])
            except OSError as exc:
                raise LogWriteError(segment.path, exc) from exc
            segment.damage.record_damaged(offset, offset + header.record_bytes, segment.size)
