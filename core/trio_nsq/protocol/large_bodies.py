"""A body that arrives in several reads: its pieces, and the message sets that they become.

A byte of a large MPUB is copied at most once after it was received: from the pieces into the set of one record of the
log. If a read has exactly the messages of a record, it is not copied at all, so `next_bytes` asks for such reads.
"""

from struct import Struct
from typing import Final

from .limits import MAX_RECORD_BYTES, MAX_RECORD_MESSAGES
from .messages import MessageSet, read_sizes, split_sizes

_INT32: Final = Struct(">i")
_PIECE_BYTES: Final = 4096
"""Smaller pieces are joined: an object per piece would take more memory than its bytes."""


class LargeBody:
    """The pieces of a body that is being received.

    Args:
        first: The bytes that have arrived already; may be empty.
        missing_bytes: The others.
        message_bytes: Of an MPUB, the size of the first message with its size field: the others are probably as large.
            0 for another body.

    Attributes:
        missing_bytes: The bytes that have not arrived; less than 0 if more than the body has.
    """

    __slots__ = ("_at", "_before", "_pieces", "_received", "_record_bytes", "missing_bytes")

    def __init__(self, first: bytes, missing_bytes: int, message_bytes: int = 0) -> None:
        self.missing_bytes: int = missing_bytes
        self._pieces: list[bytes | bytearray] = [first]
        self._received = len(first)
        self._record_bytes = 0
        if message_bytes:
            messages = min(MAX_RECORD_BYTES // message_bytes, MAX_RECORD_MESSAGES)
            self._record_bytes = max(1, messages) * message_bytes
        # The piece where `_between` was last, and the bytes before it.
        self._at = self._before = 0

    @property
    def next_bytes(self) -> int:
        """The best size of the next read: up to the end of a record, if all messages have the same size."""
        if not self._record_bytes:
            return self.missing_bytes
        size = self._record_bytes - self._received % self._record_bytes
        return min(self.missing_bytes, size if size >= _PIECE_BYTES else size + self._record_bytes)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        if len(data) >= _PIECE_BYTES:
            self._pieces.append(data)
        elif isinstance(last := self._pieces[-1], bytearray):
            last += data
        else:
            self._pieces.append(bytearray(data))
        self._received += len(data)
        self.missing_bytes -= len(data)

    def join(self) -> bytes:
        """Return all bytes."""
        return b"".join(self._pieces)

    def cut(self, walked: int, known: list[int], count: int, biggest: int) -> list[MessageSet]:
        """Return the messages in sets that fit into a record each; empty if the bytes are not exactly `count` messages.

        Args:
            walked: The offset of the first size field that was not read yet.
            known: The sizes of the messages before it.
            count: The number of all messages.
            biggest: The maximum size of a message; the minimum is 1.
        """
        sizes = known[:]
        before = 0
        for piece in self._pieces:
            end = before + len(piece)
            if walked < end:
                start = walked - before
                at = read_sizes(piece, start, len(piece), count, 1, biggest, sizes)
                walked = before + at
                if len(sizes) < count and walked < end:
                    field = self._between(walked, walked + 4)
                    if len(field) < 4:
                        return []
                    (size,) = _INT32.unpack(field)  # a part of it is in the next piece, or it is wrong
                    if not 0 < size <= biggest:
                        return []
                    sizes.append(size)
                    walked += 4 + size
            before = end
        if len(sizes) < count or walked != self._received:
            return []
        self._at = self._before = start = 0
        sets: list[MessageSet] = []
        for some, size in split_sizes(sizes, MAX_RECORD_MESSAGES, MAX_RECORD_BYTES):
            sets.append(MessageSet(self._between(start, start + size), some))
            start += size
        return sets

    def _between(self, start: int, end: int) -> bytes:
        """Return the bytes in a range, fewer at the end. `start` is not before that of the last call."""
        pieces, at, before = self._pieces, self._at, self._before
        while at < len(pieces) and start >= before + len(pieces[at]):
            before += len(pieces[at])
            at += 1
        self._at, self._before = at, before
        parts: list[memoryview] = []
        while at < len(pieces) and before < end:
            piece = pieces[at]
            after = before + len(piece)
            if start == before and end == after and isinstance(piece, bytes):
                return piece
            parts.append(memoryview(piece)[max(0, start - before) : end - before])
            before = after
            at += 1
        return b"".join(parts)
