"""Sets of messages as they travel in MPUB bodies and lie in the log: `(int32 size, bytes)*`.

     0        4              4+size
    +--------+--------------+--------+------- - -
    |  size  |    body      |  size  |  body
    +--------+--------------+--------+------- - -

The bytes are kept as they came; the only per-message work on the publish path is `walk_messages`, which reads
each size once. Loops over messages are in `bulk.py`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from struct import Struct

from .bulk import COMPILED, MAX_INT32, split_bodies, walk_sizes
from .errors import CommandError
from .limits import Limits

_INT32 = Struct(">i")


@dataclass(slots=True)
class MessageSet:
    """Messages published together.

    Attributes:
        data: `(int32 size, bytes)*`, big-endian, nothing before or after.
        sizes: The body length of each message, in order; `len(data) == sum(sizes) + 4 * len(sizes)`.
    """

    data: bytes
    sizes: list[int]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def body_bytes(self) -> int:
        """Bytes of all bodies, without their size fields."""
        return len(self.data) - 4 * len(self.sizes)

    def bodies(self) -> list[bytes]:
        """Every body, copied out, in order."""
        return split_bodies(self.data, self.sizes)

    def split(self, max_messages: int, max_bytes: int) -> "list[MessageSet]":
        """The same messages in sets of so many, and so many bytes of `data`, unless a single message is larger."""
        if len(self.sizes) <= max_messages and len(self.data) <= max_bytes:
            return [self] if self.sizes else []
        sets: list[MessageSet] = []
        index = start = 0
        while index < len(self.sizes):
            sizes = self.sizes[index : index + max_messages]
            size = sum(sizes) + 4 * len(sizes)
            if size > max_bytes and len(sizes) > 1:
                ends = [end + 4 * number for number, end in enumerate(accumulate(sizes), 1)]
                del sizes[max(1, bisect_right(ends, max_bytes)) :]
                size = ends[len(sizes) - 1]
            sets.append(MessageSet(self.data[start : start + size], sizes))
            index += len(sizes)
            start += size
        return sets

    @staticmethod
    def join(sets: Sequence["MessageSet"]) -> "MessageSet":
        """One set holding the messages of all, in order."""
        if len(sets) == 1:
            return sets[0]
        return MessageSet(b"".join([s.data for s in sets]), list(chain.from_iterable(s.sizes for s in sets)))


class SizePrefixes(dict[int, bytes]):
    """int32 size fields by the size of a body: a lookup in C in place of a Python loop.

    Args:
        more: How much greater than the body the size is.
    """

    def __init__(self, more: int = 0) -> None:
        self._more = more

    def __missing__(self, size: int) -> bytes:
        prefix = _INT32.pack(size + self._more)
        if size < 65536:  # bounds what is remembered
            self[size] = prefix
        return prefix


_prefix = SizePrefixes()


def pack_messages(bodies: Sequence[bytes]) -> MessageSet:
    """Make a set of these bodies, in order. Sizes are not checked against any limit here."""
    sizes = list(map(len, bodies))
    data = b"".join(chain.from_iterable(zip(map(_prefix.__getitem__, sizes), bodies, strict=True)))
    return MessageSet(data, sizes)


def unpack_sizes(
    data: bytes | bytearray,
    start: int,
    end: int,
    count: int,
    smallest: int,
    biggest: int,
    sizes: list[int],
) -> int:
    """As `walk_sizes`, and also for a bytearray; faster where that is not compiled."""
    unpack = _INT32.unpack_from
    add = sizes.append
    last = end - 4
    for _ in range(len(sizes), count):
        if start > last:
            break
        (size,) = unpack(data, start)
        if not smallest <= size <= biggest:
            break
        add(size)
        start += 4 + size
    return start


read_sizes = walk_sizes if COMPILED else unpack_sizes
"""`walk_sizes`, or what is faster where that is not compiled."""


def walk_messages(
    data: bytes | bytearray, start: int, end: int, count: int, limits: Limits, sizes: list[int]
) -> int:
    """Check the sizes of `count` messages from `data[start:]` on, as far as the bytes up to `end` tell.

    Args:
        data: The buffer; bytes are several times as fast where there is a compiled module.
        start: Where the next size field lies.
        end: Where the bytes at hand end.
        count: Messages in the whole set; `sizes` holds those already walked.
        sizes: Body lengths seen so far; extended in place.

    Returns:
        Where the next unread size field lies: past `end` while the last walked body is still incomplete.

    Raises:
        CommandError: `E_BAD_MESSAGE`, for a size that is not within 1..max_msg_size.
    """
    biggest = min(limits.max_msg_size, MAX_INT32)
    if type(data) is bytes:
        start = read_sizes(data, start, end, count, 1, biggest, sizes)
    else:
        start = unpack_sizes(data, start, end, count, 1, biggest, sizes)
    if len(sizes) < count and start <= end - 4:
        (size,) = _INT32.unpack_from(data, start)
        if size <= 0:
            raise CommandError("E_BAD_MESSAGE", f"MPUB invalid message({len(sizes)}) body size {size}")
        raise CommandError("E_BAD_MESSAGE", f"MPUB message too big {size} > {biggest}")
    return start
