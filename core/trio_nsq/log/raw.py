"""The raw stream: record batches as encoded on disk, so that readers outside the broker can verify the checksums.

A raw stream is a file header, then records of that file, then the header of the next file, and so on. The seed in a
file header is the initial value of the checksums of the records after it. A sequence that is missing between two
records is missing in the log, or was not requested.
"""

from collections.abc import Iterable

from ..platform.checksum import crc32
from .errors import LogError
from .records import (
    HEADER_BYTES,
    MAGIC,
    RawRecord,
    RecordBatch,
    RecordHeader,
    decode_header,
    decode_payload,
)
from .segment.format import MAGIC as FILE_MAGIC
from .segment.format import VERSION_END, decode_file_header, header_size, version_in


def encode_raw(records: Iterable[RawRecord], head: bytes) -> list[bytes]:
    """Encode the next part of a raw stream.

    Args:
        records: In order.
        head: The last file header in the stream; empty at its beginning.
    """
    parts: list[bytes] = []
    for record in records:
        if record.head != head:
            head = record.head
            parts.append(head)
        parts.append(record.data)
    return parts


class RawStreamError(LogError):
    """The data is not a raw stream, or was corrupted in transit."""


class RawStreamReader:
    """Decodes a raw stream into record batches."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seed: int | None = None

    def receive_data(self, data: bytes) -> list[RecordBatch]:
        """Add bytes, in pieces of any size, and return the batches that they complete.

        A record with correct checksums and an invalid message set is skipped.

        Raises:
            RawStreamError: The reader cannot be used any more.
        """
        self._buffer += data
        batches: list[RecordBatch] = []
        start = 0
        while True:
            header, end = self._next(start)
            if end > len(self._buffer):
                break
            if header is None:
                file_header = decode_file_header(bytes(self._buffer[start:end]))
                self._seed = file_header.seed if file_header is not None else None
            elif (batch := self._batch(header, start, end)) is not None:
                batches.append(batch)
            start = end
        del self._buffer[:start]
        return batches

    def end(self) -> None:
        """End the stream. Raises RawStreamError if it ends within a header or a record."""
        if self._buffer:
            raise RawStreamError(
                f"the stream ends within a record, {len(self._buffer)} bytes after its beginning"
            )

    def _begins(self, start: int, magic: bytes) -> bool:
        """Whether the bytes received from `start` on match a prefix of `magic`."""
        found = self._buffer[start : start + len(magic)]
        return magic.startswith(found)

    def _header_size(self, start: int) -> int:
        """Return the size of the file header at `start`, or the number of bytes needed to determine it."""
        head = bytes(self._buffer[start : start + VERSION_END])
        size = header_size(head)
        if size is None and (version := version_in(head)) is not None:
            raise RawStreamError(f"the stream has version {version}, which this program cannot read")
        return size or VERSION_END

    def _next(self, start: int) -> tuple[RecordHeader | None, int]:
        """Return the header of the record at `start`, and its end; None and its end for a file header.

        If the buffer has too few bytes to determine it, return None and the end of the bytes needed.
        """
        if not self._buffer.startswith(MAGIC, start):
            if self._begins(start, FILE_MAGIC):
                return None, start + self._header_size(start)
            if not self._begins(start, MAGIC):
                raise RawStreamError("the stream has data that is neither a file header nor a record")
        if len(self._buffer) - start < HEADER_BYTES:
            return None, start + HEADER_BYTES
        if self._seed is None:
            raise RawStreamError("the stream has a record without an undamaged file header before it")
        header = decode_header(self._buffer, start, self._seed)
        if header is None:
            raise RawStreamError("the header of a record does not match its checksum")
        return header, start + header.record_bytes

    def _batch(self, header: RecordHeader, start: int, end: int) -> RecordBatch | None:
        payload = bytes(memoryview(self._buffer)[start + HEADER_BYTES : end])
        batch = decode_payload(header, payload)
        if batch is None and crc32(payload) != header.payload_crc:
            raise RawStreamError("a record does not match its checksum")
        return batch
