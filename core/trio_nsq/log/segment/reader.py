"""One file of a log: a header, see `file_header`, and record batches.

A segment is named by its first sequence, 20 digits, so that names sort as sequences do.

What a crash can leave behind, and what is made of it: a record that reaches past the end of the file, or bytes at
the end that are no record, were being written and were never acknowledged: cut off, with all records of the same batch
of messages. A record that is there in full length but does not match its checksum is damage: it stays, its sequences
stay used, and readers pass over it; also over the rest of its batch, if recovery finds it, so that no part of a batch
is ever delivered after a crash.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from errno import EIO
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

from zlib_ng.zlib_ng import crc32

from ..errors import LogReadError, LogWriteError, NotASegmentError, ReadWouldWaitError
from ..files import Files, LogFile, OpenFiles, TolerantReader
from ..records import (
    HEADER_BYTES,
    RawRecord,
    RecordBatch,
    RecordHeader,
    decode_header,
    decode_payload,
    encode_header,
    encode_spoiled,
    find_headers,
)
from .format import FILE_HEADER_BYTES, SUFFIX, FileHeader, decode_file_header, encode_file_header
from .identity import Identity, base_in_name, find_header, name_for
from .index import SUFFIX as INDEX_SUFFIX
from .index import SparseIndex

logger = logging.getLogger("trio_nsq.log")

_RECORDS_AT_ONCE = 256
"""A record costs some microseconds, however small, and a broker's clients are waiting meanwhile."""
_SMALL_WALK_BYTES = 4 * 1024
_WALK_BYTES = 64 * 1024
_SCAN_BYTES = 1024 * 1024
_NO_LIMIT = 2**64

_Record = TypeVar("_Record")
_Take = Callable[[RecordHeader, bytes, int], _Record | None]
"""Makes something of the record with this header that begins in these bytes at this place; None if it is damaged."""


class _Window:
    """What was last read of a file: one system call for many records.

    Args:
        read: Reads up to so many bytes from such an offset on, and at least so many, or fewer at the end.
        at_a_time: How many bytes to ask for at least.
    """

    __slots__ = ("_at_a_time", "_read", "_start", "data")

    def __init__(self, read: Callable[[int, int, int], bytes], at_a_time: int) -> None:
        self.data = b""
        self._start = 0
        self._read = read
        self._at_a_time = at_a_time

    def at(self, offset: int, size: int) -> int:
        """Where in `data` the file's byte at `offset` is; `size` bytes follow there, if the file has them."""
        position = offset - self._start
        if position < 0 or position + size > len(self.data):
            self.data = self._read(max(size, self._at_a_time), offset, size)
            self._start, position = offset, 0
        return position


class Segment:
    """A file of record batches, for reading, and for appending if it is the log's last.

    Make one with `create` or `open`. `size` and `next_sequence` describe what is whole and committed; bytes past
    `size` are never read. One thread may write while others read or sync.

    Attributes:
        header: What the file begins with.
        written_size: As `size`, with what is written and not committed.
    """

    def __init__(self, files: Files, file: LogFile, header: FileHeader) -> None:
        self.path = file.path
        self.header = header
        self.base_sequence = header.base_sequence
        self.next_sequence = header.base_sequence
        self.size = self.written_size = header.size
        self._written: deque[tuple[Sequence[RecordBatch], int]] = (
            deque()
        )  # not committed, and where each write ends
        self._files = files
        self._file = file
        self._reader = TolerantReader(files, file)
        self._seed = header.seed
        # For segments that nobody closes. Not soon: an error keeps all that its traceback passed through.
        self._release = weakref.finalize(self, file.close)
        self._index = SparseIndex(header.size)
        self._index_lock = Lock()
        self._reported: set[int] = set()  # where damage was found: each is reported once
        self._missing_from: int | None = None  # the same for what lacks at the end
        self._end_is_damaged = False
        self._synced_to = header.size
        self._sync_failed = False
        self._sync_lock = Lock()
        # Around each change of `written_size`, and around letting go of the file because all of that is synced.
        self._holding = Lock()
        self._torn = False  # a failed write could not be taken back: there are bytes past `size`
        self.first_ns = 0
        self._last_ns: int | None = 0  # None: not known yet

    # ------------------------------------------------------------------ making and opening

    @staticmethod
    def path_for(folder: Path, base_sequence: int) -> Path:
        """The file that a segment beginning at this sequence lives in."""
        return folder / (name_for(base_sequence) + SUFFIX)

    @classmethod
    def create(
        cls, open_files: OpenFiles, folder: Path, base_sequence: int, now_ns: int, incarnation: bytes
    ) -> "Segment":
        """Make an empty segment, its name durable. Raises LogWriteError."""
        files = open_files.files
        path = cls.path_for(folder, base_sequence)
        head = encode_file_header(base_sequence, now_ns, incarnation)
        header = decode_file_header(head)
        assert header is not None
        try:
            files.make_folder(folder)
            file = cls._create_file(open_files, path)
            try:
                with file as fd:
                    files.write(fd, 0, [head])
                    files.sync(fd)
                    files.sync_folder(folder)
            except BaseException:
                file.close()
                try:
                    files.unlink(path)
                except OSError:
                    pass  # it holds no record: the next attempt takes it over, or the next start removes it
                raise
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        return cls(files, file, header)

    @staticmethod
    def _create_file(open_files: OpenFiles, path: Path) -> LogFile:
        try:
            return open_files.create(path)
        except FileExistsError:
            file = open_files.open(path)
            with file as fd:
                if open_files.files.size(fd) <= FILE_HEADER_BYTES:
                    return file  # left by an attempt that failed
            file.close()
            raise

    @classmethod
    def open(cls, open_files: OpenFiles, path: Path, identity: Identity) -> "Segment | None":
        """Open a segment. Its size is the file's and its index not made yet: see `recover` for the last one.

        A header that is damaged is reported, and told by the records.

        Returns:
            None if the file was never finished being made: it holds no record.

        Raises:
            NotASegmentError, DamagedSegmentError, ForeignSegmentError: See `find_header`.
            LogReadError: The operating system refused.
        """
        base_in_name(path)
        files = open_files.files
        try:
            file = open_files.open(path)
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        try:
            with file as fd:
                size = files.size(fd)
                found = find_header(partial(files.read, fd), size, path, identity)
        except OSError as exc:
            file.close()
            raise LogReadError(path, exc) from exc
        except NotASegmentError:
            file.close()
            raise
        if found is None:
            file.close()
            return None
        if found.damaged:
            logger.error("%s: its header is damaged; its records are read all the same", path)
        segment = cls(files, file, found.header)
        segment.size = segment.written_size = segment._synced_to = size
        segment._last_ns = None
        return segment

    @property
    def is_empty(self) -> bool:
        """It holds no record."""
        return self.size <= self.header.size

    # ------------------------------------------------------------------ writing

    def write(self, batches: Sequence[RecordBatch]) -> None:
        """As `Log.write`, to this file. Raises LogWriteError, having taken back what was written."""
        if self._torn:
            self._cut()
        parts: list[bytes] = []
        for batch in batches:
            parts += (encode_header(batch, self._seed), batch.messages.data)
            if batch.metadata:
                parts.append(batch.metadata)
        start = self.written_size
        try:
            self._file.hold(True)
            with self._file as fd:
                self._files.write(fd, start, parts)
                with self._holding:
                    self.written_size = start + sum([batch.record_bytes for batch in batches])
                    self._file.hold(
                        True
                    )  # a sync beside the write may have let go of it, but it is still open
        except BaseException as exc:
            self._cut_back()
            if isinstance(exc, OSError):
                raise LogWriteError(self.path, exc) from exc
            raise
        self._written.append((batches, self.written_size))

    def commit(self, sequence: int) -> None:
        """As `Log.commit`."""
        written = self._written
        while written and written[0][0][-1].next_sequence <= sequence:
            batches, end = written.popleft()
            start = at = self.size
            for batch in batches:
                self._index.note(batch.base_sequence, at)
                at += batch.record_bytes
            self._index.up_to = end
            if start <= self.header.size:
                self.first_ns = batches[0].timestamp_ns
            self._last_ns = batches[-1].timestamp_ns
            # A reader looks at `size` first. So what it then finds in the file is never beyond `next_sequence`.
            self.next_sequence = batches[-1].next_sequence
            self.size = end

    def take_back(self) -> None:
        """As `Log.take_back`."""
        self._written.clear()
        self.written_size = self.size
        self._synced_to = min(self._synced_to, self.size)
        self._cut_back()

    def _cut_back(self) -> None:
        try:
            self._cut()
        except LogWriteError as exc:
            # `size` says what counts: nothing wrong is read meanwhile, and the next write begins with a cut.
            logger.error("%s, nor cut it back to %d bytes", exc, self.written_size)

    def _cut(self) -> None:
        """Make the file end where what counts ends."""
        self._torn = True
        try:
            with self._file as fd:
                self._files.truncate(fd, self.written_size)
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc
        self._torn = False

    def sync(self) -> None:
        """Return when what was written before is on stable storage. Raises LogWriteError."""
        size = self.written_size
        try:
            self._sync()
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc
        self._synced_to = max(self._synced_to, size)
        with self._holding:
            if self._synced_to == self.written_size and not self._torn:
                self._file.hold(False)

    def seal(self) -> None:
        """Return when the file is as it will stay and on stable storage. Raises LogWriteError."""
        if self._torn:
            self._cut()
        self.sync()
        self._save_index()

    def _sync(self) -> None:
        """Sync the file; after a failure, write again first what was not synced before.

        A sync that fails leaves the kernel with pages that it calls clean, though the disk does not have them. The
        next sync would not write them and would report success.
        """
        with self._sync_lock, self._file as fd:
            if self._sync_failed:
                offset, end = self._synced_to, self.written_size
                while offset < end:
                    data = self._files.read(fd, min(_SCAN_BYTES, end - offset), offset)
                    if not data:
                        raise OSError(EIO, "the file was cut by somebody else")
                    self._files.write(fd, offset, [data])
                    offset += len(data)
            self._sync_failed = True
            self._files.sync(fd)
            self._sync_failed = False

    def close(self) -> None:
        """Give the file back; who is reading it may finish."""
        if self._torn and self._release.alive:
            self._cut_back()
        self._release()

    def remove(self) -> None:
        """Delete the file; it is there to be read, and takes up room, until it is closed. Raises LogWriteError."""
        try:
            self._file.hold(True)
            self._files.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            self._file.hold(False)
            raise LogWriteError(self.path, exc) from exc
        try:
            self._files.unlink(self.index_path)
        except OSError:
            pass  # there is none; or the next start removes it

    # ------------------------------------------------------------------ recovery

    def recover(self) -> None:
        """Check every record, make the index, cut what a crash left unfinished, and sync what is kept.

        Damage that is followed by whole records stays where it is and is reported; readers pass over it.

        Raises:
            LogReadError, LogWriteError: The operating system refused.
        """
        size = self.size
        start = end = self.header.size
        batch = _RecoveredBatch()
        for offset, header, window in self._walk(start, _SCAN_BYTES, _NO_LIMIT):
            following = offset + header.record_bytes
            if following > size:
                break
            if not header.has_previous:
                self._keep(batch)  # it lacks its end
                batch = _RecoveredBatch()
            at = window.at(offset, header.record_bytes)
            payload = memoryview(window.data)[at + HEADER_BYTES : at + header.record_bytes]
            is_whole = crc32(payload) == header.payload_crc
            if not is_whole:
                self._report_record(offset, following)
            batch.add(offset, header, is_whole)
            if not header.has_next:
                self._keep(batch)
                batch = _RecoveredBatch()
                end = following
        self.size = self.written_size = self._index.up_to = end
        if end < size:
            logger.warning("%s: cut %d bytes of an unfinished record at byte %d", self.path, size - end, end)
            self._cut()
        # What a process that was killed had written but not synced will be delivered from now on: it has to stay.
        self._synced_to = start
        self.sync()
        if end == start:
            self._sync_name()  # it may have been killed before it did that

    def holds_beyond(self, sequence: int) -> bool:
        """Whether there is a whole header of a record with this sequence or later. Raises LogReadError."""
        return any(
            header.next_sequence > sequence
            for _, header, _ in self._walk(self.header.size, _SCAN_BYTES, _NO_LIMIT)
        )

    def _keep(self, batch: "_RecoveredBatch") -> None:
        """Take up the records of a batch whose sequences stay used; make all of them unreadable if some are damaged."""
        for offset, header, is_whole in batch.records:
            self._index.note(header.base_sequence, offset)
            self.first_ns = self.first_ns or header.timestamp_ns
            self._last_ns = header.timestamp_ns
            self.next_sequence = header.next_sequence
            if is_whole and not batch.is_complete:
                self._spoil(offset, header)

    def _spoil(self, offset: int, header: RecordHeader) -> None:
        try:
            with self._file as fd:
                self._files.write(fd, offset, [encode_spoiled(header, self._seed)])
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc
        self._report_record(offset, offset + header.record_bytes)

    def _sync_name(self) -> None:
        try:
            self._files.sync_folder(self.path.parent)
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc

    # ------------------------------------------------------------------ reading

    def _read(self, size: int, offset: int, needed: int) -> bytes:
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        try:
            return self._reader.read(size, offset, min(needed, size), self.size)
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc

    def _read_now(self, size: int, offset: int, needed: int) -> bytes:
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        try:
            return self._reader.read_now(size, offset, min(needed, size))
        except OSError as exc:  # it was closed
            raise LogReadError(self.path, exc) from exc

    def _walk(
        self,
        offset: int,
        at_a_time: int,
        limit: int | None = None,
        *,
        waits: bool = True,
    ) -> Iterator[tuple[int, RecordHeader, _Window]]:
        """Every record from `offset` on: where it is, its header, and a window to read its payload through.

        Args:
            offset: Where a record begins, or damage.
            at_a_time: Bytes to read at least.
            limit: The sequence that ends the segment; None is the one known.
            waits: For the disk. Otherwise it raises ReadWouldWaitError where it would have to, and at damage.
        """
        with self._being_read() if waits else nullcontext():
            end = self.size
            if limit is None:
                limit = self.next_sequence
            expected = self.base_sequence
            window = _Window(self._read if waits else self._read_now, at_a_time)
            while offset < end:
                at = window.at(offset, HEADER_BYTES)
                header = decode_header(window.data, at, self._seed)
                if header is None or header.next_sequence > limit:
                    if not waits:
                        raise ReadWouldWaitError(self.path)
                    found = self._find_next(offset, end, expected, limit)
                    if found is None:
                        if limit != _NO_LIMIT:  # recovery cuts it off, and says so
                            self._report(offset, end)
                        return
                    self._report(offset, found)
                    offset = found
                    continue
                yield offset, header, window
                expected = header.next_sequence
                offset += header.record_bytes

    @contextmanager
    def _being_read(self) -> Iterator[None]:
        """Keep the file open, also if the segment is closed meanwhile. Raises LogReadError."""
        try:
            with self._file:
                yield
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc

    def _find_next(self, offset: int, end: int, expected: int, limit: int) -> int | None:
        """The next header after the damage at `offset` whose sequences fit in; None if none follows."""
        start = offset + 1
        while start < end:
            window = self._read(min(_SCAN_BYTES, end - start), start, HEADER_BYTES)
            for found, header in find_headers(window, 0, self._seed):
                if header.base_sequence >= expected and header.next_sequence <= limit:
                    return start + found
            start += max(
                1, len(window) - HEADER_BYTES + 1
            )  # a header may begin in what is left of the window
        return None

    def _report(self, offset: int, end: int) -> None:
        if offset not in self._reported:
            self._reported.add(offset)
            self._end_is_damaged = self._end_is_damaged or end >= self.size
            logger.error("%s: damaged from byte %d to byte %d, passed over", self.path, offset, end)

    def _report_record(self, offset: int, end: int) -> None:
        if offset not in self._reported:
            self._reported.add(offset)
            self._end_is_damaged = self._end_is_damaged or end >= self.size
            logger.error("%s: the record batch at byte %d is damaged, passed over", self.path, offset)

    def report_missing(self, sequence: int) -> None:
        """Say that the messages from `sequence` on are not here, as they have to be in a segment that is full."""
        if self._end_is_damaged:
            return  # that is why, and it was said
        if self._missing_from is None or sequence < self._missing_from:
            self._missing_from = sequence
            last = self.next_sequence - 1
            what = "%s: messages %d to %d are missing before its end at byte %d, passed over"
            logger.error(what, self.path, sequence, last, self.size)

    # ------------------------------------------------------------------ looking up

    @property
    def created_ns(self) -> int:
        """As `LogFileFacts.created_ns`."""
        return self.header.created_ns

    def last_ns(self) -> int:
        """As `LogFileFacts.last_ns`."""
        if self._last_ns is None:
            last = 0
            for header in self.headers(self.next_sequence - 1):
                last = header.timestamp_ns
            self._last_ns = last or self.created_ns  # the end of it is damaged
        return self._last_ns

    def bytes_from(self, sequence: int) -> int:
        """How many bytes lie from `sequence` on, about: as far as is known without reading."""
        if sequence <= self.base_sequence:
            return self.size
        if self._index.up_to >= self.size:
            return max(0, self.size - self._index.estimate(sequence, self.next_sequence))
        count = self.next_sequence - self.base_sequence  # as though all messages were of one size
        return self.size * (self.next_sequence - sequence) // count

    def locate(self, sequence: int) -> int:
        """The offset of a record at or shortly before the one that holds `sequence`."""
        if sequence <= self.base_sequence:
            return self.header.size  # who reads one segment after the other needs no index
        with self._index_lock:
            if self._index.up_to < self.size:
                self._index = self._saved_index() or self._read_index()
            offset = self._index.find(sequence)
        return self.header.size if offset is None else offset

    def locate_now(self, sequence: int) -> int:
        """The same without waiting for the disk. Raises ReadWouldWaitError."""
        if sequence > self.base_sequence and self._index.up_to < self.size:
            raise ReadWouldWaitError(self.path)  # a thread may be reading the index, or has to
        return self.locate(sequence)

    @property
    def index_path(self) -> Path:
        """Where the index is saved, once the segment is full, if it is worth it."""
        return self.path.with_suffix(INDEX_SUFFIX)

    @property
    def is_worth_an_index(self) -> bool:
        """It is so long that looking for something without one would take time."""
        return self.size > 2 * _WALK_BYTES

    def make_index(self) -> None:
        """Read the whole segment to make the index, and save it. Raises LogReadError."""
        self._index = self._read_index()
        self._save_index()

    def _read_index(self) -> SparseIndex:
        index = SparseIndex(self.size)
        for offset, header, _ in self._walk(self.header.size, _SCAN_BYTES):
            index.note(header.base_sequence, offset)
        return index

    def _save_index(self) -> None:
        if self.is_worth_an_index:
            try:
                self._files.replace(self.index_path, self._index.encode(self._seed))
            except OSError as exc:
                logger.warning("%s", LogWriteError(self.index_path, exc))  # it is but slower without

    def _saved_index(self) -> SparseIndex | None:
        try:
            data = self._files.content(self.index_path, self.size)  # it is smaller than what it leads to
        except OSError:
            return None
        return SparseIndex.decode(data, self._seed, self.size)

    # ------------------------------------------------------------------ records

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        """The headers of the batches that reach past `sequence`."""
        for _, header, _ in self._walk(self.locate(sequence), _WALK_BYTES):
            if header.next_sequence > sequence:
                yield header

    def read(self, sequence: int, offset: int, max_bytes: int) -> tuple[list[RecordBatch], int]:
        """The batches that reach past `sequence`, from `offset` on, as `Log.read` bounds them.

        Args:
            sequence: The first one wanted.
            offset: Where a record begins, at or before it.
            max_bytes: Stop before more than this, but not before the first batch.

        Returns:
            The batches, and where the record after the last of them begins.
        """
        return self._collect(sequence, offset, max_bytes, _decode)

    def read_now(self, sequence: int, offset: int, max_bytes: int) -> tuple[list[RecordBatch], int]:
        """The same without waiting for the disk. Raises ReadWouldWaitError."""
        return self._collect(sequence, offset, max_bytes, _decode, waits=False)

    def read_soon(self, offset: int, size: int) -> None:
        """Let the machine begin to read these bytes into memory; whether it does is not told."""
        try:
            with self._file as fd:
                self._files.read_soon(fd, size, offset)
        except OSError:
            pass  # who reads them is told

    def read_raw(self, sequence: int, offset: int, max_bytes: int) -> tuple[list[RawRecord], int]:
        """The same, as they lie in the file."""
        return self._collect(sequence, offset, max_bytes, self._cut_out)

    def _cut_out(self, header: RecordHeader, data: bytes, begin: int) -> RawRecord | None:
        # Whether the payload is a set of messages is for the reader to find out, who has to decode it anyway.
        record = data[begin : begin + header.record_bytes]
        payload = memoryview(record)[HEADER_BYTES:]
        whole = len(payload) == header.length and crc32(payload) == header.payload_crc
        return RawRecord(self.header.data, header, record) if whole else None

    def _collect(
        self,
        sequence: int,
        offset: int,
        max_bytes: int,
        take: _Take[_Record],
        *,
        waits: bool = True,
    ) -> tuple[list[_Record], int]:
        found: list[_Record] = []
        room = max_bytes
        try:
            for at, header, window in self._walk(offset, max(max_bytes, _SMALL_WALK_BYTES), waits=waits):
                if header.next_sequence <= sequence:
                    continue
                record_bytes = header.record_bytes
                if found and record_bytes > room:
                    break
                begin = window.at(at, record_bytes)
                offset = at + record_bytes
                record = take(header, window.data, begin)
                if record is None:
                    self._report_record(at, offset)
                    continue
                found.append(record)
                room -= record_bytes
                if room <= HEADER_BYTES or len(found) == _RECORDS_AT_ONCE:
                    break  # without another system call
        except LogReadError:
            if not found:
                raise  # otherwise the next call meets it again
        return found, offset


class _RecoveredBatch:
    """The records of one batch of messages, as recovery finds them.

    Attributes:
        records: Where each begins, its header, and whether its payload matches.
        is_complete: All from the first to the last are there, and match.
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, RecordHeader, bool]] = []
        self._end = 0
        self._has_all = True

    def add(self, offset: int, header: RecordHeader, is_whole: bool) -> None:
        """Add the next record."""
        follows = offset == self._end if self.records else not header.has_previous
        self._has_all = self._has_all and follows and is_whole
        self.records.append((offset, header, is_whole))
        self._end = offset + header.record_bytes

    @property
    def is_complete(self) -> bool:
        return self._has_all and bool(self.records) and not self.records[-1][1].has_next


def _decode(header: RecordHeader, data: bytes, begin: int) -> RecordBatch | None:
    return decode_payload(header, data[begin + HEADER_BYTES : begin + header.record_bytes])
