"""The sparse index of a segment: offsets from which to search for a sequence.

     0                 8         12     16              24
    +-----------------+---------+------+---------------+-----------------+---------------- - -
    | 89 NSQIDX 0a    | version | crc  | segment bytes | sequences, 8 x n | offsets, 8 x n
    +-----------------+---------+------+---------------+-----------------+---------------- - -

All integers are big-endian. The log saves the file beside a segment when the segment is full, so that look-ups after a
restart need not read the whole segment. If it is lost, the log rebuilds it. The crc covers the bytes after it and
starts from the segment's seed, so that the index of another segment is not accepted.
"""

import sys
from array import array
from bisect import bisect_right
from struct import Struct

from ...platform.checksum import crc32

SUFFIX = ".index"
WITHOUT_INDEX_BYTES = 128 * 1024
"""Segments of at most this size have no index: a search reads them quickly."""
_MAGIC = b"\x89NSQIDX\n"
_VERSION = 1
_HEAD = Struct(">8sII")
_SIZE = Struct(">Q")
_EVERY_BYTES = 64 * 1024
"""Distance between entries: a look-up reads at most this many extra bytes. An entry takes 16 bytes of memory."""


class SparseIndex:
    """Pairs of a sequence and the offset of the batch that begins with it, ascending.

    Attributes:
        up_to: The index covers the segment up to this offset.
    """

    __slots__ = ("_offsets", "_sequences", "up_to")

    def __init__(self, up_to: int) -> None:
        self.up_to: int = up_to
        self._sequences = array("Q")
        self._offsets = array("Q")

    def copy(self) -> "SparseIndex":
        index = SparseIndex(self.up_to)
        index._sequences, index._offsets = self._sequences[:], self._offsets[:]
        return index

    def add(self, sequence: int, offset: int) -> None:
        """Add an entry if it is at least `_EVERY_BYTES` after the last one."""
        if not self._offsets or (
            offset - self._offsets[-1] >= _EVERY_BYTES and sequence > self._sequences[-1]
        ):
            self._sequences.append(sequence)
            self._offsets.append(offset)

    def find(self, sequence: int) -> int | None:
        """Return the offset of the last entry at or before `sequence`; None if there is none."""
        entry = self.entry_before(sequence)
        return entry[1] if entry is not None else None

    def entry_before(self, sequence: int) -> tuple[int, int] | None:
        """Return the last entry at or before `sequence`, as its sequence and its offset; None if there is none."""
        index = bisect_right(self._sequences, sequence) - 1
        return (self._sequences[index], self._offsets[index]) if index >= 0 else None

    def estimate(self, sequence: int, end_sequence: int) -> int:
        """Estimate the offset of a sequence in a segment that ends before `end_sequence`."""
        index = bisect_right(self._sequences, sequence) - 1
        if index < 0:
            return self._offsets[0] if self._offsets else self.up_to
        start, offset = self._sequences[index], self._offsets[index]
        following, end = end_sequence, self.up_to
        if index + 1 < len(self._offsets):
            following, end = self._sequences[index + 1], self._offsets[index + 1]
        return offset + (end - offset) * (sequence - start) // max(1, following - start)

    def encode(self, seed: int) -> bytes:
        """Encode the file, for a segment of this seed that ends at `up_to`."""
        content = _SIZE.pack(self.up_to) + big_endian(self._sequences) + big_endian(self._offsets)
        return _HEAD.pack(_MAGIC, _VERSION, crc32(content, seed)) + content

    @classmethod
    def decode(cls, data: bytes, seed: int, size: int) -> "SparseIndex | None":
        """Decode a file; None if it is damaged, or belongs to a segment of another seed or size."""
        content = data[_HEAD.size :]
        if not content or _HEAD.unpack_from(data) != (_MAGIC, _VERSION, crc32(content, seed)):
            return None
        (up_to,) = _SIZE.unpack_from(content)
        if up_to != size:
            return None
        index = cls(up_to)
        half = (len(content) - _SIZE.size) // 2
        index._sequences = native(content[_SIZE.size : _SIZE.size + half])
        index._offsets = native(content[_SIZE.size + half :])
        return index


def big_endian(numbers: "array[int]") -> bytes:
    return _swapped(numbers[:]).tobytes()


def native(data: bytes, kind: str = "Q") -> "array[int]":
    """Decode numbers of this type code."""
    return _swapped(array(kind, data))


def _swapped(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
