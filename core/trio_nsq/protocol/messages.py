"""Message sets, as in MPUB bodies and in the log: `(int32 size, bytes)*`.

     0        4              4+size
    +--------+--------------+--------+------- - -
    |  size  |    body      |  size  |  body
    +--------+--------------+--------+------- - -

The bytes are never changed. The only per-message work of a publish is `walk_messages`, which reads each size once.
Loops over messages are in `bulk.py`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from struct import Struct
from typing import Final

from .bulk import COMPILED, MAX_INT32, split_bodies, walk_sizes
from .errors import CommandError
from .limits import Limits

_INT32: Final = Struct(">i")
_BYTES: Final = frozenset({bytes})
_with_field: Final = (4).__add__
"""Returns the size of a message with its size field."""


@dataclass(init=False, slots=True)
class MessageSet:
    """Messages published together.

    Attributes:
        data: `(int32 size, bytes)*`, big-endian, without other bytes.
        sizes: The body length of each message, in order; `len(data) == sum(sizes) + 4 * len(sizes)`.
    """

    data: bytes
    sizes: list[int]

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data = data
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def body_bytes(self) -> int:
        """The total size of the bodies, without size fields."""
        return len(self.data) - 4 * len(self.sizes)

    def bodies(self) -> list[bytes]:
        """Copy every body, in order."""
        return split_bodies(self.data, self.sizes)

    def split(self, max_messages: int, max_bytes: int) -> "list[MessageSet]":
        """Split the messages into sets within these limits, unless a single message is larger."""
        count = len(self.sizes)
        if count <= 1 or (count <= max_messages and len(self.data) <= max_bytes):
            return [self] if count else []
        sets: list[MessageSet] = []
        start = 0
        for sizes, size in split_sizes(self.sizes, max_messages, max_bytes):
            sets.append(MessageSet(self.data[start : start + size], sizes))
            start += size
        return sets

    @staticmethod
    def join(sets: Sequence["MessageSet"]) -> "MessageSet":
        """Join the messages of all sets, in order."""
        if len(sets) == 1:
            return sets[0]
        return MessageSet(b"".join([s.data for s in sets]), list(chain.from_iterable(s.sizes for s in sets)))


def split_sizes(sizes: list[int], max_messages: int, max_bytes: int) -> list[tuple[list[int], int]]:
    """Split the sizes of messages as `MessageSet.split` does. Returns those of each set, and the bytes of its data."""
    found: list[tuple[list[int], int]] = []
    index = 0
    while index < len(sizes):
        # Where the messages of the next sets end, with their size fields: so many that the first set is complete.
        ends = list(accumulate(map(_with_field, sizes[index : index + max_messages])))
        start = before = 0
        while start < len(ends):
            stop = max(start + 1, bisect_right(ends, before + max_bytes, start))
            if start and stop == len(ends) and index + stop < len(sizes):
                break  # this set may have more messages
            found.append((sizes[index + start : index + stop], ends[stop - 1] - before))
            start, before = stop, ends[stop - 1]
        index += start
    return found


class SizePrefixes(dict[int, bytes]):
    """A cache of encoded int32 size fields, by body size; `more` is added to each. A lookup is faster than packing."""

    def __init__(self, more: int = 0) -> None:
        self._more = more

    def __missing__(self, size: int) -> bytes:
        if size > MAX_INT32 - self._more:
            raise ValueError(f"a message of {size} bytes is longer than the protocol can have, {MAX_INT32}")
        prefix = _INT32.pack(size + self._more)
        if size < 65536:  # limits the memory
            self[size] = prefix
        return prefix


_prefix: Final = SizePrefixes()


def pack_messages(bodies: Sequence[bytes]) -> MessageSet:
    """Make a message set of these bodies, in order. Does not check limits.

    Raises:
        TypeError: These are no messages, or one is not bytes.
        ValueError: A message is longer than the protocol can have.
    """
    if type(bodies) is not list or not _BYTES.issuperset(map(type, bodies)):
        from .bodies import check_bytes, list_of  # not compiled

        bodies = list_of(bodies)
        check_bytes(bodies)
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
    """Like `walk_sizes`, also for a bytearray; faster if that is not compiled."""
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


def read_sizes(
    data: bytes | bytearray,
    start: int,
    end: int,
    count: int,
    smallest: int,
    biggest: int,
    sizes: list[int],
) -> int:
    """As `walk_sizes`, or `unpack_sizes` for a bytearray and if that is not compiled."""
    if COMPILED and type(data) is bytes:
        return walk_sizes(data, start, end, count, smallest, biggest, sizes)
    return unpack_sizes(data, start, end, count, smallest, biggest, sizes)


def walk_messages(
    data: bytes | bytearray,
    start: int,
    end: int,
    count: int,
    limits: Limits,
    sizes: list[int],
    verb: str = "MPUB",
    more: int = 0,
) -> int:
    """Check the sizes of messages from `start` on, as far as the bytes up to `end` allow.

    Args:
        data: The buffer. With the compiled module, `bytes` are several times faster than a bytearray.
        start: The offset of the next size field.
        end: The end of the received bytes.
        count: The number of messages in the whole set, including those in `sizes`.
        sizes: The body sizes read so far; extended in place.
        verb: For errors.
        more: How much longer a message may be than `max_msg_size`.

    Returns:
        The offset of the next size field; greater than `end` if the last body is incomplete.

    Raises:
        CommandError: `E_BAD_MESSAGE`, for a size outside 1..max_msg_size + more.
    """
    biggest = min(limits.max_msg_size + more, MAX_INT32)
    start = read_sizes(data, start, end, count, 1, biggest, sizes)
    if len(sizes) < count and start <= end - 4:
        (size,) = _INT32.unpack_from(data, start)
        if size <= 0:
            raise CommandError("E_BAD_MESSAGE", f"{verb} invalid message({len(sizes)}) body size {size}")
        raise CommandError("E_BAD_MESSAGE", f"{verb} message too big {size} > {biggest}")
    return start
