"""The names of segment files, and the header that each begins with.

     0                 8         10     12     16              24           32            48    52
    +-----------------+---------+------+------+---------------+------------+-------------+-----+
    | 89 NSQLOG 0a    | version | zero | seed | base_sequence | created_ns | incarnation | crc |
    +-----------------+---------+------+------+---------------+------------+-------------+-----+

This is format 2. The crc covers bytes 0..48. The incarnation is the topic's, see `Identity`. The seed is the initial
value of the checksums of the file's records: the CRC-32 of base_sequence and incarnation. So it differs from file to
file, and the file's name and the topic's incarnation are a second copy of it: damage to the header does not lose it.

Format 1 ends before the incarnation, and its seed is the CRC-32 of bytes 16..32. It does not name its topic. Such files
are read and never changed.
"""

from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from ...platform.checksum import crc32
from ..errors import NotASegmentError

SUFFIX = ".log"
_NAME_DIGITS = 20
_NO_SEQUENCE = 2**63
MAGIC = b"\x89NSQLOG\n"
VERSION = 2
INCARNATION_BYTES = 16
VERSION_END = 10
"""The first bytes up to the version, which determines the size of the header."""
_COMMON = Struct(">8sHHIQQ")
_CRC = Struct(">I")
_SEEDED_BY = Struct(f">Q{INCARNATION_BYTES}s")
_SPAN_1 = slice(16, 32)
_FREE_1 = frozenset((*range(12, 16), *range(24, 32)))
"""Bytes of a header of format 1 that its name does not determine: the seed, and the creation time."""
_FREE_2 = frozenset((*range(24, 32), *range(48, 52)))

HEADER_BYTES_1 = _COMMON.size
FILE_HEADER_BYTES = HEADER_BYTES_1 + INCARNATION_BYTES + _CRC.size
"""Size of a header of format 2, the longer one."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a segment.

    Attributes:
        base_sequence: The first message's sequence.
        created_ns: When the segment was created, Unix nanoseconds.
        seed: The initial value of the checksums of its records.
        incarnation: The topic's incarnation; None for a file of format 1, which does not have it.
        size: Bytes of the header: the first record begins there.
        data: The encoded header, which raw streams send before its records.
        derived: Whether the file's header is damaged, and this one was derived from the records.
    """

    base_sequence: int
    created_ns: int
    seed: int
    incarnation: bytes | None
    size: int
    data: bytes
    derived: bool = False


def segment_path(folder: Path, base_sequence: int) -> Path:
    """Return the path of the segment that begins with this sequence. Names sort as sequences do."""
    return folder / f"{base_sequence:0{_NAME_DIGITS}d}{SUFFIX}"


def base_in_name(path: Path) -> int:
    """Return the base sequence that a segment's name contains. Raises NotASegmentError."""
    if len(path.stem) != _NAME_DIGITS or not path.stem.isascii() or not path.stem.isdigit():
        raise NotASegmentError(path, "its name is not a sequence")
    base_sequence = int(path.stem)
    if base_sequence >= _NO_SEQUENCE:
        raise NotASegmentError(path, "the sequence in its name is too large")
    return base_sequence


def seed_for(base_sequence: int, incarnation: bytes) -> int:
    """Return the seed of a file of format 2."""
    return crc32(_SEEDED_BY.pack(base_sequence, incarnation))


def encode_file_header(
    base_sequence: int, created_ns: int, incarnation: bytes, seed: int | None = None
) -> bytes:
    """Encode a header of format 2. Pass `seed` for a file whose records have another seed than `seed_for`."""
    if seed is None:
        seed = seed_for(base_sequence, incarnation)
    data = _COMMON.pack(MAGIC, VERSION, 0, seed, base_sequence, created_ns) + incarnation
    return data + _CRC.pack(crc32(data))


def decode_file_header(data: bytes) -> FileHeader | None:
    """Decode the header at the beginning of these bytes; None if it is damaged or of an unknown format."""
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
    """Return the version in a header, unchecked; None if these bytes do not begin like a header."""
    if len(data) < VERSION_END or not data.startswith(MAGIC):
        return None
    return int.from_bytes(data[len(MAGIC) : VERSION_END], "big")


def header_size(data: bytes) -> int | None:
    """Return the size of the header at the beginning of these bytes; None if its version is missing or unknown."""
    return {1: HEADER_BYTES_1, VERSION: FILE_HEADER_BYTES}.get(version_in(data) or 0)


def is_unfinished(data: bytes, base_sequence: int, incarnation: bytes | None) -> bool:
    """Whether a crash during the creation of a segment can have left this content: each byte is correct or zero.

    Args:
        data: The whole content of the file.
        incarnation: The topic's incarnation; None if unknown.
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
