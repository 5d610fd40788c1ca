"""Reading a segment: finds records by sequence, and skips and reports damage."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

from ..errors import LogReadError, LogWriteError, ReadWouldWaitError
from ..files import Files, LogFile, OpenFiles, OwnedFile, TolerantReader
from ..files.tolerant_reader import Window
from ..records import (
    HEADER_BYTES,
    RawRecord,
    RecordBatch,
    RecordHeader,
    decode_payload,
)
from .format import FileHeader, base_in_name
from .identity import Identity, find_header
from .index import SUFFIX as INDEX_SUFFIX
from .index import WITHOUT_INDEX_BYTES, SparseIndex
from .scan import BULK_BYTES, NO_LIMIT, SCAN_BYTES, find_record, scan_records

logger: logging.Logger = logging.getLogger("trio_nsq.log")

_RECORDS_AT_ONCE = 256
"""Limits the duration of a read: even a small record costs a few microseconds."""
_SMALL_WALK_BYTES = 4 * 1024
_WALK_BYTES = 64 * 1024

_Record = TypeVar("_Record")
_Decode = Callable[[RecordHeader, bytes, int], _Record | None]
"""Decodes the record with this header at this position of these bytes; None if it is damaged."""


class DamageReports:
    """Logs the damage of a segment, each damaged range only once. Logs nothing of a file that is only read."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._is_silent = files.is_read_only
        self._offsets: set[int] = set()
        self._end_is_damaged = False
        self._missing_from: int | None = None

    def header_damaged(self) -> None:
        """Report that the file's header was derived from the records."""
        if not self._is_silent:
            logger.error("%s: its header is damaged; its records are still readable", self._path)

    def end_cut(self, offset: int, size: int) -> None:
        """Report that recovery cuts off what is after an offset of a segment of this size."""
        if not self._is_silent:
            what = "%s: cut %d bytes of an unfinished record at byte %d"
            logger.warning(what, self._path, size - offset, offset)

    def bytes_damaged(self, offset: int, end: int, size: int) -> None:
        """Report that these bytes are not a record, in a segment of this size."""
        if self._is_new(offset, end, size):
            logger.error("%s: damaged from byte %d to byte %d, skipped", self._path, offset, end)

    def record_damaged(self, offset: int, end: int, size: int) -> None:
        """Report that the record between these offsets does not match its checksum."""
        if self._is_new(offset, end, size):
            logger.error("%s: the record batch at byte %d is damaged, skipped", self._path, offset)

    def _is_new(self, offset: int, end: int, size: int) -> bool:
        if self._is_silent or offset in self._offsets:
            return False
        self._offsets.add(offset)
        self._end_is_damaged = self._end_is_damaged or end >= size
        return True

    def messages_missing(self, sequence: int, next_sequence: int, size: int) -> None:
        """Report that a full segment of this size ends before `sequence`, not before `next_sequence`."""
        if self._end_is_damaged:
            return  # the damage is the cause, and was reported
        if self._missing_from is None or sequence < self._missing_from:
            self._missing_from = sequence
            what = "%s: messages %d to %d are missing before its end at byte %d, skipped"
            logger.error(what, self._path, sequence, next_sequence - 1, size)


class Segment:
    """A file of record batches, for reading. Open one with `open`; `SegmentWriter` creates one and appends to it.

    Any thread may read. Bytes from `size` on are never read. The attributes from `next_sequence` on change when a
    `SegmentWriter` commits or recovery runs, and at no other time.

    Attributes:
        seed: The initial value of the checksums of its records.
        base_sequence: The first message's sequence.
        next_sequence: The sequence after its last committed message.
        size: Bytes up to the end of the last committed record.
        first_ns: When its first message was published, Unix nanoseconds; 0 if there is none or the segment is full.
        newest_ns: When its last message was published, Unix nanoseconds; None if not read yet.
    """

    def __init__(self, files: Files, file: LogFile, header: FileHeader) -> None:
        self.path: Path = file.path
        self.file = file
        self.header = header
        self.seed: int = header.seed
        self.base_sequence: int = header.base_sequence
        self.next_sequence: int = header.base_sequence
        self.size: int = header.size
        self.index: SparseIndex = SparseIndex(header.size)
        self.first_ns = 0
        self.newest_ns: int | None = 0
        self.damage: DamageReports = DamageReports(file.path, files)
        self._files = files
        self._reader = TolerantReader(files, file)
        self._index_lock = Lock()
        self._release = OwnedFile(file)  # closes a segment without an explicit close

    @classmethod
    def open(cls, open_files: OpenFiles, path: Path, identity: Identity | None) -> "Segment | None":
        """Open a segment without reading its records. Its size is the file's; its index is read when needed.

        Use `recover` for the last segment of a log, which may end in an unfinished record. A damaged header is logged,
        and derived from the records.

        Args:
            identity: The log's identity; None if unknown: then every segment is accepted.

        Returns:
            None if a crash interrupted the creation of the file: it holds no record.

        Raises:
            NotASegmentError, DamagedSegmentError, ForeignSegmentError: See `find_header`.
            LogReadError: The operating system failed to read.
        """
        base_in_name(path)
        files = open_files.files
        try:
            file = open_files.open(path)
            try:
                with file as fd:
                    size = files.size(fd)
                    header = find_header(partial(files.read, fd), size, path, identity)
            except BaseException:
                file.close()
                raise
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        if header is None:
            file.close()
            return None
        segment = cls(files, file, header)
        if header.derived:
            segment.damage.header_damaged()
        segment.size = size
        segment.newest_ns = None
        return segment

    @property
    def is_empty(self) -> bool:
        return self.size <= self.header.size

    def close(self) -> None:
        """Close the file after the reads in progress."""
        self._release()

    def remove(self) -> None:
        """Delete the file and its index. It can be read until it is closed. Raises LogWriteError."""
        try:
            self.file.hold(True)
            self._files.unlink(self.path)  # before the index, which another thread may be saving
        except FileNotFoundError:
            pass
        except OSError as exc:
            self.file.hold(False)
            raise LogWriteError(self.path, exc) from exc
        try:
            self._files.unlink(self.index_path)
        except OSError:
            pass  # it does not exist, or the next start removes it

    # ------------------------------------------------------------------ reading

    def _read(self, size: int, offset: int, needed: int, *, waits: bool = True) -> bytes:
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        needed = min(needed, size)
        try:
            if waits:
                return self._reader.read(size, offset, needed, self.size)
            return self._reader.read_cached(size, offset, needed)
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc

    @contextmanager
    def scan(
        self,
        offset: int,
        at_a_time: int,
        limit: int | None = None,
        *,
        waits: bool = True,
        ends_at: Callable[[int, int], bool] | None = None,
    ) -> Iterator[tuple[Window, Iterator[tuple[int, RecordHeader]]]]:
        """Scan the records from `offset` on; inside the block, the file stays open even if the segment is closed.

        Damage is reported and skipped.

        Args:
            offset: The beginning of a record, or of damage.
            at_a_time: Minimum bytes per read.
            limit: The sequence before which the records end; None: `next_sequence`. With `NO_LIMIT`, damage up to the
                end is not reported, because recovery truncates it.
            waits: Whether to wait for the disk. Otherwise raises ReadWouldWaitError instead, also at damage.
            ends_at: Called with the range of each damage. If it returns True, the records end there.

        Returns:
            A window to read payloads through, and the offset and the header of each record.

        Raises:
            LogReadError: The operating system failed to read.
        """
        end, last = self.size, self.next_sequence if limit is None else limit

        def skip(offset: int, expected: int) -> int:
            if not waits:
                raise ReadWouldWaitError(self.path)
            record = find_record(
                partial(self._read, needed=HEADER_BYTES), self.seed, offset, end, expected, last
            )
            if record is None:
                if last != NO_LIMIT:
                    self.damage.bytes_damaged(offset, end, self.size)
                return end
            found, _ = record
            if ends_at is not None and ends_at(offset, found):
                return end
            self.damage.bytes_damaged(offset, found, self.size)
            return found

        window = Window(self._read if waits else partial(self._read, waits=False), at_a_time)
        records = scan_records(window, self.seed, offset, end, self.base_sequence, last, skip)
        if not waits:
            yield window, records
            return
        try:
            with self.file:
                yield window, records
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc

    # ------------------------------------------------------------------ look-ups

    @property
    def created_ns(self) -> int:
        return self.header.created_ns

    def last_ns(self) -> int:
        if self.newest_ns is None:
            last = 0
            for header in self.headers(self.next_sequence - 1):
                last = header.timestamp_ns
            self.newest_ns = last or self.created_ns  # without a header, the end is damaged
        return self.newest_ns

    def bytes_from(self, sequence: int) -> int:
        """Estimate the bytes from `sequence` on, without reading."""
        if sequence <= self.base_sequence:
            return self.size
        if self.index.up_to >= self.size:
            return max(0, self.size - self.index.estimate(sequence, self.next_sequence))
        count = self.next_sequence - self.base_sequence  # assumes that all messages have the same size
        return self.size * (self.next_sequence - sequence) // count

    def locate(self, sequence: int, *, waits: bool = True) -> int:
        """Return the offset of the record that holds `sequence`, or of one shortly before it. Raises as `read`."""
        if sequence <= self.base_sequence:
            return self.header.size  # a read from the beginning needs no index
        if not waits and self.index.up_to < self.size:
            raise ReadWouldWaitError(self.path)  # the index is not loaded, or a thread is loading it
        with self._index_lock:
            if self.index.up_to < self.size:
                self.index = self.saved_index() or self._build_index()
            offset = self.index.find(sequence)
        return self.header.size if offset is None else offset

    @property
    def index_path(self) -> Path:
        """The file of the index, saved when the segment is full if `is_worth_an_index`."""
        return self.path.with_suffix(INDEX_SUFFIX)

    @property
    def is_worth_an_index(self) -> bool:
        """Whether the segment is so large that finding a record without an index is slow."""
        return self.size > WITHOUT_INDEX_BYTES

    def make_index(self) -> None:
        """Build the index by reading the whole segment, and save it. Raises LogReadError."""
        self.index = self._build_index()
        self.save_index()

    def _build_index(self) -> SparseIndex:
        index = SparseIndex(self.size)
        with self.scan(self.header.size, SCAN_BYTES) as (_, records):
            for offset, header in records:
                index.add(header.base_sequence, offset)
        return index

    def save_index(self) -> None:
        """Save the index if the segment is worth one. A failure is only logged: it makes look-ups slower."""
        if self.is_worth_an_index:
            try:
                self._files.replace(self.index_path, self.index.encode(self.seed))
                if not self._files.kind(self.path):  # removed meanwhile
                    self._files.unlink(self.index_path)
            except FileNotFoundError:
                pass  # the index was removed, too, or the log
            except OSError as exc:
                logger.warning("%s", LogWriteError(self.index_path, exc))

    def saved_index(self) -> SparseIndex | None:
        """Return the index from its file; None if there is none for the segment's size."""
        try:
            data = self._files.content(self.index_path, self.size)  # an index is smaller than its segment
        except OSError:
            return None
        return SparseIndex.decode(data, self.seed, self.size)

    # ------------------------------------------------------------------ records

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        """Yield the headers of the batches from the one that holds `sequence` on. Raises LogReadError."""
        with self.scan(self.locate(sequence), _WALK_BYTES) as (_, records):
            for _, header in records:
                if header.next_sequence > sequence:
                    yield header

    def read(self, sequence: int, offset: int, max_bytes: int, waits: bool) -> tuple[list[RecordBatch], int]:
        """Read the batches from the one that holds `sequence` on, limited as in `Log.read`.

        Args:
            offset: The offset of the record that holds it, or of an earlier one.
            max_bytes: Maximum bytes of records, but returns at least one batch.
            waits: Whether to wait for the disk.

        Returns:
            The batches, and the offset of the record after them.

        Raises:
            LogReadError: The operating system failed to read.
            ReadWouldWaitError: The data is not in memory, and `waits` is False.
        """
        return self._collect(sequence, offset, max_bytes, waits, _decode)

    def batches(self, sequence: int) -> Iterator[RecordBatch]:
        """Yield the batches from the one that holds `sequence` on, in large reads. Raises LogReadError."""
        with self.scan(self.locate(sequence), BULK_BYTES) as (window, records):
            for offset, header in records:
                if header.next_sequence <= sequence:
                    continue
                begin = window.at(offset, header.record_bytes)
                batch = _decode(header, window.data, begin)
                if batch is not None:
                    yield batch
                else:
                    self.damage.record_damaged(offset, offset + header.record_bytes, self.size)

    def prefetch(self, offset: int, size: int) -> None:
        """Ask the operating system to load these bytes into memory, without waiting."""
        try:
            with self.file as fd:
                self._files.prefetch(fd, size, offset)
        except OSError:
            pass  # the read itself raises the error again

    def read_raw(
        self, sequence: int, offset: int, max_bytes: int, waits: bool
    ) -> tuple[list[RawRecord], int]:
        """As `read`, but returns the records as encoded in the file."""
        return self._collect(sequence, offset, max_bytes, waits, self._cut_out)

    def _cut_out(self, header: RecordHeader, data: bytes, begin: int) -> RawRecord | None:
        # Does not check that the payload is a message set, because the receiver decodes it anyway.
        record = data[begin : begin + header.record_bytes]
        is_whole = header.matches(memoryview(record)[HEADER_BYTES:])
        return RawRecord(self.header.data, header, record) if is_whole else None

    def _collect(
        self, sequence: int, offset: int, max_bytes: int, waits: bool, decode: _Decode[_Record]
    ) -> tuple[list[_Record], int]:
        found: list[_Record] = []
        room = max_bytes
        try:
            with self.scan(offset, max(max_bytes, _SMALL_WALK_BYTES), waits=waits) as (window, records):
                for at, header in records:
                    if header.next_sequence <= sequence:
                        continue
                    record_bytes = header.record_bytes
                    if found and record_bytes > room:
                        break
                    begin = window.at(at, record_bytes)
                    offset = at + record_bytes
                    record = decode(header, window.data, begin)
                    if record is None:
                        self.damage.record_damaged(at, offset, self.size)
                        continue
                    found.append(record)
                    room -= record_bytes
                    if room <= HEADER_BYTES or len(found) == _RECORDS_AT_ONCE:
                        break  # without another system call
        except LogReadError:
            if not found:
                raise  # otherwise the next call raises it again
        return found, offset


def _decode(header: RecordHeader, data: bytes, begin: int) -> RecordBatch | None:
    return decode_payload(header, data[begin + HEADER_BYTES : begin + header.record_bytes])
