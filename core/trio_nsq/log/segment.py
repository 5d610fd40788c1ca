"""One file of a log.

     0                 8         10       12      16              24           32
    +-----------------+---------+--------+-------+---------------+------------+----------------- - -
    | 89 NSQLOG 0a    | version |  zero  |  crc  | base_sequence | created_ns | record batches ...
    +-----------------+---------+--------+-------+---------------+------------+----------------- - -

The crc covers bytes 16..32. A segment is named by its first sequence, 20 digits, so that names sort as sequences do.
"""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from zlib import crc32

from .errors import LogReadError, LogWriteError, NotASegmentError
from .files import Files
from .records import (
    HEADER_BYTES,
    RecordBatch,
    RecordHeader,
    decode_header,
    decode_payload,
    encode_header,
    find_headers,
)

logger = logging.getLogger("trio_nsq.log")

SUFFIX = ".log"
MAGIC = b"\x89NSQLOG\n"
VERSION = 1
_FILE_HEADER = Struct(">8sHHI16s")
_RANGE = Struct(">QQ")
FILE_HEADER_BYTES = _FILE_HEADER.size
_INDEX_EVERY_BYTES = 64 * 1024
"""One index entry for so many bytes: a look-up reads at most this much too much, and costs 16 bytes of memory."""
_SCAN_BYTES = 1024 * 1024


class Segment:
    """A file of record batches, open for reading, and for appending if it is the log's last.

    Make one with `create` or `open`. `size` and `next_sequence` describe what is whole and known; bytes past
    `size` are never read.
    """

    def __init__(self, files: Files, path: Path, fd: int, base_sequence: int) -> None:
        self.path = path
        self.base_sequence = base_sequence
        self.next_sequence = base_sequence
        self.size = FILE_HEADER_BYTES
        self._files = files
        self._fd = fd
        # Sparse index: the batch at offset o begins at sequence s. Complete only once `_indexed` says so.
        self._sequences = array("Q")
        self._offsets = array("Q")
        self._indexed = True

    @staticmethod
    def path_for(folder: Path, base_sequence: int) -> Path:
        """The file that a segment beginning at this sequence lives in."""
        return folder / f"{base_sequence:020d}{SUFFIX}"

    @classmethod
    def create(cls, files: Files, folder: Path, base_sequence: int, now_ns: int) -> "Segment":
        """Make an empty segment, its name durable. Raises LogWriteError."""
        path = cls.path_for(folder, base_sequence)
        span = _RANGE.pack(base_sequence, now_ns)
        try:
            files.make_folder(folder)
            fd = files.create(path)
            try:
                files.write(fd, 0, [_FILE_HEADER.pack(MAGIC, VERSION, 0, crc32(span), span)])
                files.sync(fd)
                files.sync_folder(folder)
            except OSError:
                files.close(fd)
                files.unlink(path)
                raise
        except OSError as exc:
            raise LogWriteError(path, exc) from exc
        return cls(files, path, fd, base_sequence)

    @classmethod
    def open(cls, files: Files, path: Path) -> "Segment | None":
        """Open a segment. Its size is the file's and its index not made yet: see `recover` for the last one.

        Returns:
            None if the file was never finished being made: it holds no record.

        Raises:
            NotASegmentError: The file is something else.
            LogReadError: The operating system refused.
        """
        try:
            fd = files.open(path)
        except OSError as exc:
            raise LogReadError(path, exc) from exc
        try:
            head = files.read(fd, FILE_HEADER_BYTES, 0)
            size = files.size(fd)
            if (len(head) < FILE_HEADER_BYTES and MAGIC.startswith(head[:8])) or not any(head):
                files.close(fd)
                return None
            segment = cls(files, path, fd, cls._base_sequence(path, head))
        except OSError as exc:
            files.close(fd)
            raise LogReadError(path, exc) from exc
        except NotASegmentError:
            files.close(fd)
            raise
        segment.size = size
        segment._indexed = False
        return segment

    @staticmethod
    def _base_sequence(path: Path, head: bytes) -> int:
        if len(head) < FILE_HEADER_BYTES or not head.startswith(MAGIC):
            raise NotASegmentError(path, "it does not begin as one")
        _, version, _, crc, span = _FILE_HEADER.unpack(head)
        if version != VERSION:
            raise NotASegmentError(path, f"its version is {version}, this program reads version {VERSION}")
        base_sequence: int = _RANGE.unpack(span)[0]
        if crc32(span) != crc or path.stem != f"{base_sequence:020d}":
            raise NotASegmentError(path, "its header is damaged, or it was renamed")
        return base_sequence

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        """As `Log.append`, to this file. Raises LogWriteError, having taken back what was written."""
        parts: list[bytes] = []
        for batch in batches:
            parts += (encode_header(batch), batch.messages.data)
        size = self.size
        try:
            self._files.write(self._fd, size, parts)
            if sync:
                self._files.sync(self._fd)
        except OSError as exc:
            self._take_back(size)
            raise LogWriteError(self.path, exc) from exc
        for batch in batches:
            self._note(batch.base_sequence, size)
            size += batch.record_bytes
        self.size = size
        self.next_sequence = batches[-1].next_sequence

    def _take_back(self, size: int) -> None:
        try:
            self._files.truncate(self._fd, size)
        except OSError as exc:
            # `size` still says what counts, and recovery finds the torn tail: nothing wrong is ever read.
            logger.error("cannot cut %s back to %d bytes: %s", self.path, size, exc)

    def sync(self) -> None:
        """Return when the file is on stable storage. Raises LogWriteError."""
        try:
            self._files.sync(self._fd)
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc

    def recover(self) -> None:
        """Check every record, make the index, and cut what a crash left unfinished at the end.

        Damage that is followed by whole records stays where it is and is reported; readers skip it.

        Raises:
            LogReadError, LogWriteError: The operating system refused.
        """
        end = FILE_HEADER_BYTES
        for offset, header, batch in self._scan(FILE_HEADER_BYTES):
            if batch is None:
                logger.error("%s: the record batch at byte %d is damaged and left out", self.path, offset)
            else:
                self._note(header.base_sequence, offset)
                end = offset + header.record_bytes
                self.next_sequence = header.next_sequence
        if end < self.size:
            logger.warning(
                "%s: cut %d bytes of an unfinished record at byte %d", self.path, self.size - end, end
            )
            try:
                self._files.truncate(self._fd, end)
                self._files.sync(self._fd)
            except OSError as exc:
                raise LogWriteError(self.path, exc) from exc
            self.size = end
        self._indexed = True

    def _scan(self, offset: int) -> Iterator[tuple[int, RecordHeader, RecordBatch | None]]:
        """Every record from `offset` on, with None for one whose payload is damaged or cut off."""
        while offset < self.size:
            header = self._header_at(offset)
            if header is None:
                found = self._find_next(offset)
                if found is None:
                    return
                logger.error("%s: damaged from byte %d to byte %d", self.path, offset, found)
                offset = found
                continue
            payload = self._read(header.length, offset + HEADER_BYTES)
            yield offset, header, decode_payload(header, payload)
            offset += header.record_bytes

    def _note(self, sequence: int, offset: int) -> None:
        if not self._offsets or offset - self._offsets[-1] >= _INDEX_EVERY_BYTES:
            self._sequences.append(sequence)
            self._offsets.append(offset)

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return self._files.read(self._fd, min(size, self.size - offset), offset)
        except OSError as exc:
            raise LogReadError(self.path, exc) from exc

    def _header_at(self, offset: int) -> RecordHeader | None:
        return decode_header(self._read(HEADER_BYTES, offset))

    def _find_next(self, offset: int) -> int | None:
        """The next undamaged header after the damage at `offset`; None if none follows."""
        start = offset + 1
        while start < self.size:
            window = self._read(_SCAN_BYTES + HEADER_BYTES, start)
            for found, header in find_headers(window, 0):
                if header.base_sequence >= self.base_sequence:
                    return start + found
            start += _SCAN_BYTES
        return None

    def locate(self, sequence: int) -> int:
        """The offset of a record at or shortly before the one that holds `sequence`."""
        if not self._indexed:
            for offset, header in self._walk_headers(FILE_HEADER_BYTES):
                self._note(header.base_sequence, offset)
            self._indexed = True
        index = bisect_right(self._sequences, sequence) - 1
        return self._offsets[index] if index >= 0 else FILE_HEADER_BYTES

    def _walk_headers(self, offset: int) -> Iterator[tuple[int, RecordHeader]]:
        """Every undamaged header from `offset` on, payloads unread."""
        while offset < self.size:
            header = self._header_at(offset)
            if header is None:
                found = self._find_next(offset)
                if found is None:
                    return
                offset = found
                continue
            yield offset, header
            offset += header.record_bytes

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        """The headers of the batches that reach past `sequence`."""
        for _, header in self._walk_headers(self.locate(sequence)):
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
        found: list[RecordBatch] = []
        max_bytes = max(max_bytes, HEADER_BYTES)
        window, start = self._read(max_bytes, offset), offset
        while offset < self.size:
            at, more = offset - start, start + len(window) < self.size
            header = decode_header(window, at)
            cut = len(window) - at < (header.record_bytes if header else HEADER_BYTES)
            if header is not None and header.next_sequence <= sequence:
                offset += header.record_bytes
            elif cut and more:
                if found:
                    break  # the record that does not fit is the next read's first
                wanted = header.record_bytes if header else max_bytes
                window, start = self._read(wanted, offset), offset
            elif header is None:
                resumed = self._find_next(offset)
                logger.error("%s: damaged from byte %d to byte %d", self.path, offset, resumed or self.size)
                offset = self.size if resumed is None else resumed
            else:
                batch = decode_payload(header, window[at + HEADER_BYTES : at + header.record_bytes])
                if batch is None:
                    logger.error("%s: the record batch at byte %d is damaged, skipped", self.path, offset)
                else:
                    found.append(batch)
                offset += header.record_bytes
        return found, offset

    def close(self) -> None:
        """Give the file back."""
        self._files.close(self._fd)

    def remove(self) -> None:
        """Close and delete the file. Raises LogWriteError."""
        self._files.close(self._fd)
        try:
            self._files.unlink(self.path)
        except OSError as exc:
            raise LogWriteError(self.path, exc) from exc
