"""What a segment begins with.

     0                 8         10     12     16              24           32            48    52
    +-----------------+---------+------+------+---------------+------------+-------------+-----+
    | 89 NSQLOG 0a    | version | zero | seed | base_sequence | created_ns | incarnation | crc |
    +-----------------+---------+------+------+---------------+------------+-------------+-----+

This is format 2. The crc covers bytes 0..48. The incarnation is that of the topic, see `Identity`. The seed is what the
checksums of the file's records begin with: the CRC-32 of base_sequence and incarnation. So it differs from file to
file, and can be told without the header, by the file's name and the topic's incarnation: these are its second copy,
which no damage to the beginning of the file reaches.

Format 1 ends before the incarnation, and its seed is the CRC-32 of bytes 16..32. It does not say whose file it is. Such
files are read, and not changed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from struct import Struct

from zlib_ng.zlib_ng import crc32

from ..records import HEADER_BYTES, RecordHeader, decode_header
from ..records import MAGIC as RECORD_MAGIC

SUFFIX = ".log"
MAGIC = b"\x89NSQLOG\n"
VERSION = 2
INCARNATION_BYTES = 16
VERSION_END = 10
"""So many bytes tell the version, and with it the size of the header."""
_COMMON = Struct(">8sHHIQQ")
_CRC = Struct(">I")
_SEEDED_BY = Struct(f">Q{INCARNATION_BYTES}s")
_SPAN_1 = slice(16, 32)
_FREE_1 = frozenset((*range(12, 16), *range(24, 32)))
"""Bytes of a header of format 1 that its name does not tell: the seed, and when it was made."""
_FREE_2 = frozenset((*range(24, 32), *range(48, 52)))
_SEARCH_BYTES = 1024 * 1024
_MOST_PLACES = 10_000
"""A place that looks like a record costs some microseconds. A file of ours has one at its beginning, most often."""

HEADER_BYTES_1 = _COMMON.size
FILE_HEADER_BYTES = HEADER_BYTES_1 + INCARNATION_BYTES + _CRC.size
"""Of format 2: the longer one."""

Read = Callable[[int, int], bytes]
"""Reads up to so many bytes of a file from such an offset on. Raises OSError."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a segment says of itself.

    Attributes:
        base_sequence: Of its first message.
        created_ns: When it was made, Unix nanoseconds.
        seed: What the checksums of its records begin with.
        incarnation: Of the topic; None: a file of format 1 does not say it.
        size: Bytes that the header takes: there the first record begins.
        data: The header as it is handed out with records, whole.
    """

    base_sequence: int
    created_ns: int
    seed: int
    incarnation: bytes | None
    size: int
    data: bytes


def seed_for(base_sequence: int, incarnation: bytes) -> int:
    """The seed of a file of format 2."""
    return crc32(_SEEDED_BY.pack(base_sequence, incarnation))


def encode_file_header(
    base_sequence: int, created_ns: int, incarnation: bytes, seed: int | None = None
) -> bytes:
    """What a segment begins with; another seed than that of format 2 is for files that keep the one they have."""
    if seed is None:
        seed = seed_for(base_sequence, incarnation)
    data = _COMMON.pack(MAGIC, VERSION, 0, seed, base_sequence, created_ns) + incarnation
    return data + _CRC.pack(crc32(data))


def decode_file_header(data: bytes) -> FileHeader | None:
    """The header that these bytes begin with; None if they do not begin with an undamaged one of a known format."""
    size = header_size(data)
    if not size or len(data) < size:
        return None
    data = data[:size]
    magic, version, zero, seed, base_sequence, created_ns = _COMMON.unpack_from(data)
    incarnation = None
    if version == 1:
        whole = not zero and crc32(data[_SPAN_1]) == seed
    else:
        incarnation = data[HEADER_BYTES_1 : -_CRC.size]
        whole = _CRC.pack(crc32(data[: -_CRC.size])) == data[-_CRC.size :]
    if magic != MAGIC or not whole:
        return None
    return FileHeader(base_sequence, created_ns, seed, incarnation, size, data)


def version_in(data: bytes) -> int | None:
    """The version that these bytes name, true or not, if they begin like a header; None if they do not."""
    if len(data) < VERSION_END or not data.startswith(MAGIC):
        return None
    return int.from_bytes(data[len(MAGIC) : VERSION_END], "big")


def header_size(data: bytes) -> int | None:
    """Bytes of the header that these bytes begin with; None if they do not tell, or name an unknown version."""
    return {1: HEADER_BYTES_1, VERSION: FILE_HEADER_BYTES}.get(version_in(data) or 0)


def is_unfinished(data: bytes, base_sequence: int, incarnation: bytes | None) -> bool:
    """Whether a file of this content, and no more, is what a crash leaves of one that was being made.

    Each of its bytes is there or, the disk not having come to it, zero.

    Args:
        data: All that is in the file.
        base_sequence: By its name.
        incarnation: Of the topic; None if it is not known.
    """
    if decode_file_header(data) is not None:
        return False
    whole_1 = _COMMON.pack(MAGIC, 1, 0, 0, base_sequence, 0)
    whole_2 = encode_file_header(base_sequence, 0, incarnation or bytes(INCARNATION_BYTES))
    free_2 = _FREE_2 if incarnation is not None else _FREE_2.union(range(12, 16), range(32, 48))
    return any(
        len(data) <= len(whole)
        and all(byte in (0, whole[at]) for at, byte in enumerate(data) if at not in free)
        for whole, free in ((whole_1, _FREE_1), (whole_2, free_2))
    )


# ---------------------------------------------------------------------- without the header

_TABLE = [crc32(bytes([byte ^ 0xFF])) ^ 0xFF00_0000 for byte in range(256)]
"""Of CRC-32: what a byte does to its state."""
_BY_TOP = {entry >> 24: byte for byte, entry in enumerate(_TABLE)}


def seed_before(data: bytes, crc: int) -> int:
    """The number that `crc32(data, number)` is `crc` for: its steps, backwards."""
    state = crc ^ 0xFFFF_FFFF
    for byte in reversed(data):
        at = _BY_TOP[state >> 24]
        state = (state ^ _TABLE[at]) << 8 & 0xFFFF_FF00 | at ^ byte
    return state ^ 0xFFFF_FFFF


def find_seed(
    read: Read, start: int, end: int, base_sequence: int, likely: Collection[int]
) -> tuple[int, RecordHeader] | None:
    """The seed of a file whose header is damaged, by its records; and the first of them that is whole.

    Args:
        read: Reads the file.
        start, end: Where to look.
        base_sequence: Of the file.
        likely: What it may be. Without any it is what the first undamaged record was made with.

    Raises:
        OSError: As `read`.
    """
    places = 0
    while start < end:
        window = read(_SEARCH_BYTES, start)
        at = window.find(RECORD_MAGIC)
        while 0 <= at <= len(window) - HEADER_BYTES:
            record = window[at : at + HEADER_BYTES]
            seed = seed_before(record[8:], int.from_bytes(record[4:8], "big"))
            header = decode_header(record, 0, seed)
            if header is not None and header.base_sequence < base_sequence:
                header = None
            if header and (seed in likely if likely else _is_whole(read, start + at, header, end)):
                return seed, header
            places += 1
            if places == _MOST_PLACES:
                return None
            at = window.find(RECORD_MAGIC, at + 1)
        start += max(1, len(window) - HEADER_BYTES + 1)  # a record may begin in what is left of the window
    return None


def _is_whole(read: Read, offset: int, header: RecordHeader, end: int) -> bool:
    if offset + header.record_bytes > end:
        return False
    return crc32(read(header.length, offset + HEADER_BYTES)) == header.payload_crc
