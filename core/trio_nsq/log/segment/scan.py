"""The scan of a segment's records: where each begins, and where the next one begins after damage.

All readers use it: brokers, recovery, inspection, and exports that read segments without a broker.
"""

from collections.abc import Callable, Iterator

from ..files.tolerant_reader import Window
from ..records import HEADER_BYTES, RecordHeader, decode_header, find_headers

Read = Callable[[int, int], bytes]
"""`read(size, offset)` returns up to `size` bytes of a file from this offset on. Raises OSError."""

SCAN_BYTES = 1024 * 1024
BULK_BYTES = 4 * 1024 * 1024
"""For reading whole segments: large, because a record that extends beyond the buffer is read again."""
NO_LIMIT = 2**64


def scan_records(
    window: Window,
    seed: int,
    offset: int,
    end: int,
    expected: int,
    limit: int,
    skip: Callable[[int, int], int],
) -> Iterator[tuple[int, RecordHeader]]:
    """Yield the offset and the header of each record. The caller reads payloads through the window.

    Args:
        seed: The initial value of the records' checksums.
        offset, end: Where the records begin and end.
        expected: The first sequence, or one before it.
        limit: The sequence before which the records end.
        skip: Called with the offset and the expected sequence where something else than a record is, whose sequences
            are in order and before the limit. Returns the offset to continue at.
    """
    while offset < end:
        at = window.at(offset, HEADER_BYTES)
        header = decode_header(window.data, at, seed)
        if header is None or header.base_sequence < expected or header.next_sequence > limit:
            offset = skip(offset, expected)
            continue
        yield offset, header
        expected = header.next_sequence
        offset += header.record_bytes


def find_record(
    read: Read, seed: int, offset: int, end: int, expected: int, limit: int
) -> tuple[int, RecordHeader] | None:
    """Return the offset and the header of the first record from `offset` on; None if there is none.

    Arguments as for `scan_records`.
    """
    for at, header in headers_in(read, seed, offset, end):
        if header.base_sequence >= expected and header.next_sequence <= limit:
            return at, header
    return None


def headers_in(read: Read, seed: int, offset: int, end: int) -> Iterator[tuple[int, RecordHeader]]:
    """Yield the offset of each undamaged header between two offsets, whatever its sequences, and the header.

    Args:
        read: Returns at least `HEADER_BYTES`, unless the file ends.
    """
    while end - offset >= HEADER_BYTES:
        data = read(min(SCAN_BYTES, end - offset), offset)
        for at, header in find_headers(data, 0, seed):
            yield offset + at, header
        if len(data) < HEADER_BYTES:
            return  # the file was truncated
        offset += len(data) - HEADER_BYTES + 1  # a header may begin in the rest of the data
