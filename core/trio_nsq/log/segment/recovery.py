"""Recovery of the last segment of a log after a crash.

A crash can leave a partial record, or bytes that are not a record, at the end of the file. They were being written and
were never acknowledged. Recovery truncates them, with all records of the same batch of messages.

A record of full length that does not match its checksum is damaged. It stays, its sequences remain used, and readers
skip it. Recovery makes the other records of its batch unreadable too, so that no part of the batch is delivered.
"""

import logging

from ...checksum import crc32
from ..errors import LogWriteError
from ..files import Files
from ..records import HEADER_BYTES, RecordHeader, encode_spoiled
from .reader import NO_LIMIT, SCAN_BYTES, Segment
from .writer import SegmentWriter

logger = logging.getLogger("trio_nsq.log")


def recover(files: Files, segment: Segment) -> SegmentWriter:
    """Check every record, build the index, truncate an unfinished record or batch, and sync the rest.

    Damage before intact records stays, and is logged.

    Returns:
        A writer that appends to the segment.

    Raises:
        LogReadError, LogWriteError: The operating system failed to read or write.
    """
    size = segment.size
    start = end = segment.header.size
    batch = _BatchRecords()
    for offset, header, window in segment.walk(start, SCAN_BYTES, NO_LIMIT):
        following = offset + header.record_bytes
        if following > size:
            break
        if not header.has_previous:
            _keep(files, segment, batch)  # the end of the previous batch is missing
            batch = _BatchRecords()
        at = window.at(offset, header.record_bytes)
        payload = memoryview(window.data)[at + HEADER_BYTES : at + header.record_bytes]
        is_whole = crc32(payload) == header.payload_crc
        if not is_whole:
            segment.damage.record_damaged(offset, following, size)
        batch.add(offset, header, is_whole)
        if not header.has_next:
            _keep(files, segment, batch)
            batch = _BatchRecords()
            end = following
    segment.size = segment.index.up_to = end
    # Sync all records: a killed process may have written some without a sync, and they will be delivered now.
    writer = SegmentWriter(files, segment, synced_to=start)
    if end < size:
        logger.warning("%s: cut %d bytes of an unfinished record at byte %d", segment.path, size - end, end)
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
    return any(
        header.next_sequence > sequence
        for _, header, _ in segment.walk(segment.header.size, SCAN_BYTES, NO_LIMIT)
    )


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


def _keep(files: Files, segment: Segment, batch: _BatchRecords) -> None:
    """Keep the sequences of a batch's records; if the batch is not complete, make all its records unreadable."""
    for offset, header, is_whole in batch.records:
        segment.index.add(header.base_sequence, offset)
        segment.first_ns = segment.first_ns or header.timestamp_ns
        segment.newest_ns = header.timestamp_ns
        segment.next_sequence = header.next_sequence
        if is_whole and not batch.is_complete:
            try:
                with segment.file as fd:
                    files.write(fd, offset, [encode_spoiled(header, segment.seed)])
            except OSError as exc:
                raise LogWriteError(segment.path, exc) from exc
            segment.damage.record_damaged(offset, offset + header.record_bytes, segment.size)
