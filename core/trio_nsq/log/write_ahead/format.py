"""The format of a write-ahead file: copies of parts of segments, to write them again after a power cut.

     0                 8         12     16      32
    +-----------------+---------+------+-------+
    | 89 NSQWAL 0a    | version | crc  | nonce |
    +-----------------+---------+------+-------+

The crc covers the nonce, 16 random bytes; its value is the file's seed. Entries follow, without gaps:

     0      4            8          12       16     20
    +------+------------+----------+--------+------+-------------+ - -
    | NSQW | header_crc | data_crc | length | name | incarnation |
    +------+------------+----------+--------+------+-------------+ - -
        36              44       52       60     60+name
    - - +---------------+--------+--------+------+------+
        | base_sequence | offset | stable | name | data |
    - - +---------------+--------+--------+------+------+

All integers are big-endian and unsigned. An entry says: the bytes of a topic's segment from `offset` on are `data`,
whole records. The topic's name and incarnation and the base sequence identify the segment. header_crc covers bytes
8..60, data_crc the name and the data. Both start with the seed, so that entries in other files, and in messages, are
not taken for this file's.

`stable` is how much of this file was on stable storage when the entry was written. Bytes below the `stable` of any
entry that are not an undamaged entry are damaged. Other such bytes are a write that a crash interrupted, or zeros that
were written ahead.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from ...platform.checksum import crc32
from ..records import UnsyncedPart
from ..segment.format import INCARNATION_BYTES

VERSION = 1
"""Entries of another version must not be valid entries of this one: they show that the version itself is damaged."""
_FILE_MAGIC = b"\x89NSQWAL\n"
_FILE = Struct(">8sII16s")
FILE_HEADER_BYTES = _FILE.size
_MAGIC = b"NSQW"
_CHECKED = Struct(f">III{INCARNATION_BYTES}sQQQ")
_CHECKED_FROM = 8
ENTRY_HEADER_BYTES = _CHECKED_FROM + _CHECKED.size


@dataclass(frozen=True, slots=True)
class Entry:
    """An undamaged entry. Attributes as in `UnsyncedPart`; `data` is in one piece.

    Attributes:
        stable: How many bytes of the file were on stable storage when the entry was written.
    """

    topic: str
    incarnation: bytes
    base_sequence: int
    offset: int
    stable: int
    data: memoryview


def encode_file_header() -> tuple[bytes, int]:
    """Return the header of a new file, and its seed."""
    nonce = os.urandom(16)
    seed = crc32(nonce)
    return _FILE.pack(_FILE_MAGIC, VERSION, seed, nonce), seed


@dataclass(frozen=True, slots=True)
class WriteAheadHeader:
    """The header of a write-ahead file.

    Attributes:
        seed: The initial value of the checksums of its entries.
        is_damaged: The header is damaged, and the entries show which seed is right.
    """

    version: int
    seed: int
    is_damaged: bool


def read_file_header(content: bytes) -> WriteAheadHeader | None:
    """Return the header of a file with this content; None if it is lost.

    The seed is in it twice: as the crc, and as the checksum of the nonce.
    """
    if len(content) < FILE_HEADER_BYTES:
        return None
    magic, version, crc, nonce = _FILE.unpack_from(content)
    seeds = list(dict.fromkeys((crc, crc32(nonce))))
    is_whole = magic == _FILE_MAGIC and len(seeds) == 1
    if is_whole and version == VERSION:
        return WriteAheadHeader(version, crc, is_damaged=False)
    for seed in seeds:
        if any(entry is not None for _, entry, _ in entries_in(content, seed)):
            return WriteAheadHeader(VERSION, seed, is_damaged=True)
    return WriteAheadHeader(version, crc, is_damaged=False) if is_whole else None


def encode_entry_header(name: bytes, part: UnsyncedPart, stable: int, seed: int) -> bytes:
    """Return what goes before the data of a part; `name` is its topic's. For `stable`, see above."""
    data_crc = crc32(name, seed)
    for piece in part.data:
        data_crc = crc32(piece, data_crc)
    checked = _CHECKED.pack(
        data_crc, part.size, len(name), part.incarnation, part.base_sequence, part.offset, stable
    )
    return b"%s%s%s%s" % (_MAGIC, crc32(checked, seed).to_bytes(4, "big"), checked, name)


def entries_in(content: bytes, seed: int) -> Iterator[tuple[int, Entry | None, int]]:
    """Yield all that a file contains after its header: the offset, the entry, and the offset of its end.

    None instead of an entry stands for bytes that are not an undamaged entry.
    """
    view = memoryview(content)
    at = FILE_HEADER_BYTES
    while at < len(content):
        end, entry = _entry_at(content, view, at, seed)
        if entry is None:
            # Search after the header only if it is damaged, so that each byte is read a limited number of times.
            search_from = end or at + 1
            end = _next_header(content, search_from, seed)
        yield at, entry, end
        at = end


def _entry_at(content: bytes, view: memoryview, at: int, seed: int) -> tuple[int, Entry | None]:
    """Return the end of the entry at an offset, 0 if it has no undamaged header; and the entry, if undamaged."""
    if not _is_header(content, at, seed):
        return 0, None
    data_crc, length, name_bytes, incarnation, base_sequence, offset, stable = _CHECKED.unpack_from(
        content, at + _CHECKED_FROM
    )
    begin = at + ENTRY_HEADER_BYTES
    end = begin + name_bytes + length
    if end > len(content):
        return 0, None
    if crc32(view[begin:end], seed) != data_crc:
        return end, None
    name = content[begin : begin + name_bytes].decode("ascii")
    return end, Entry(name, incarnation, base_sequence, offset, stable, view[begin + name_bytes : end])


def _is_header(content: bytes, at: int, seed: int) -> bool:
    if len(content) - at < ENTRY_HEADER_BYTES or not content.startswith(_MAGIC, at):
        return False
    checked = content[at + _CHECKED_FROM : at + ENTRY_HEADER_BYTES]
    return crc32(checked, seed).to_bytes(4, "big") == content[at + 4 : at + _CHECKED_FROM]


def _next_header(content: bytes, at: int, seed: int) -> int:
    """Return the offset of the next undamaged header, or the end of the content."""
    while (at := content.find(_MAGIC, at)) >= 0:
        if _is_header(content, at, seed):
            return at
        at += 1
    return len(content)
