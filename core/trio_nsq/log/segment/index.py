"""Where in a segment to begin looking for a sequence.

     0                 8         12     16              24
    +-----------------+---------+------+---------------+-----------------+---------------- - -
    | 89 NSQIDX 0a    | version | crc  | segment bytes | sequences, 8 x n | offsets, 8 x n
    +-----------------+---------+------+---------------+-----------------+---------------- - -

All integers are big-endian. The file lies beside a segment that is full, and saves whoever starts the next time from
reading the segment to find a place in it. It is made anew if it is lost. The crc covers what follows it, beginning with
the segment's seed: an index of another segment is none of this one's.
"""

import sys
from array import array
from bisect import bisect_right
from struct import Struct

from zlib_ng.zlib_ng import crc32

SUFFIX = ".index"
_MAGIC = b"\x89NSQIDX\n"
_VERSION = 1
_HEAD = Struct(">8sII")
_SIZE = Struct(">Q")
_EVERY_BYTES = 64 * 1024
"""One entry for so many bytes: a look-up reads at most this much too much, and costs 16 bytes of memory."""


class SparseIndex:
    """The batch at offset o begins at sequence s; entries ascend.

    Attributes:
        up_to: The offset up to which it is complete.
    """

    __slots__ = ("_offsets", "_sequences", "up_to")

    def __init__(self, up_to: int) -> None:
        self.up_to = up_to
        self._sequences = array("Q")
        self._offsets = array("Q")

    def note(self, sequence: int, offset: int) -> None:
        """Make an entry, if it is time for one."""
        if not self._offsets or (
            offset - self._offsets[-1] >= _EVERY_BYTES and sequence > self._sequences[-1]
        ):
            self._sequences.append(sequence)
            self._offsets.append(offset)

    def find(self, sequence: int) -> int | None:
        """The offset of the last entry that is not after `sequence`; None if there is none."""
        index = bisect_right(self._sequences, sequence) - 1
        return self._offsets[index] if index >= 0 else None

    def estimate(self, sequence: int, end_sequence: int) -> int:
        """About where a sequence lies, if the segment ends before `end_sequence`: between entries all are of a size."""
        index = bisect_right(self._sequences, sequence) - 1
        if index < 0:
            return self._offsets[0] if self._offsets else self.up_to
        start, offset = self._sequences[index], self._offsets[index]
        following, end = end_sequence, self.up_to
        if index + 1 < len(self._offsets):
            following, end = self._sequences[index + 1], self._offsets[index + 1]
        return offset + (end - offset) * (sequence - start) // max(1, following - start)

    def encode(self, seed: int) -> bytes:
        """The file's content, for a segment of this seed that ends at `up_to`."""
        content = _SIZE.pack(self.up_to) + big_endian(self._sequences) + big_endian(self._offsets)
        return _HEAD.pack(_MAGIC, _VERSION, crc32(content, seed)) + content

    @classmethod
    def decode(cls, data: bytes, seed: int, size: int) -> "SparseIndex | None":
        """The index in a file; None if it is damaged, or of another segment, or of one of another size."""
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
    """Numbers as they lie in a file."""
    return _swapped(numbers[:]).tobytes()


def native(data: bytes) -> "array[int]":
    """The numbers that lie in a file, 8 bytes each."""
    return _swapped(array("Q", data))


def _swapped(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
