"""Recovery of a segment's seed from the checksums of its records, if the segment's header is damaged."""

from collections.abc import Collection

from ...platform.checksum import crc32
from ..records import HEADER_BYTES, MAGIC, RecordHeader, decode_header
from .scan import Read

_SEARCH_BYTES = 1024 * 1024
_MAX_CANDIDATES = 10_000
"""Limits the cost of false candidates, a few microseconds each. Usually the first candidate is a record."""

_TABLE = [crc32(bytes([byte ^ 0xFF])) ^ 0xFF00_0000 for byte in range(256)]
"""The CRC-32 table: the change of the state by each byte."""
_BY_TOP = {entry >> 24: byte for byte, entry in enumerate(_TABLE)}


def seed_before(data: bytes, crc: int) -> int:
    """Return the seed for which `crc32(data, seed)` is `crc`, by running CRC-32 in reverse."""
    state = crc ^ 0xFFFF_FFFF
    for byte in reversed(data):
        at = _BY_TOP[state >> 24]
        state = (state ^ _TABLE[at]) << 8 & 0xFFFF_FF00 | at ^ byte
    return state ^ 0xFFFF_FFFF


def find_seed(
    read: Read, start: int, end: int, base_sequence: int, likely: Collection[int]
) -> tuple[int, RecordHeader] | None:
    """Find the seed of a file whose header is damaged, and the first record that proves it.

    Args:
        start, end: The bytes to search.
        likely: The seeds that the file can have. If empty, the seed of the first undamaged record is returned.

    Raises:
        OSError: As `read`.
    """
    candidates = 0
    while start < end:
        window = read(_SEARCH_BYTES, start)
        at = window.find(MAGIC)
        while 0 <= at <= len(window) - HEADER_BYTES:
            record = window[at : at + HEADER_BYTES]
            seed = seed_before(record[8:], int.from_bytes(record[4:8], "big"))
            header = decode_header(record, 0, seed)
            if header is not None and header.base_sequence < base_sequence:
                header = None
            if header and (seed in likely if likely else _is_whole(read, start + at, header, end)):
                return seed, header
            candidates += 1
            if candidates == _MAX_CANDIDATES:
                return None
            at = window.find(MAGIC, at + 1)
        start += max(1, len(window) - HEADER_BYTES + 1)  # a record may begin in the rest of the window
    return None


def _is_whole(read: Read, offset: int, header: RecordHeader, end: int) -> bool:
    if offset + header.record_bytes > end:
        return False
    return header.matches(read(header.length, offset + HEADER_BYTES))
