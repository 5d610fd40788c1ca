"""The undistributed messages of a topic that its channels must not read in sequence order, as arrays of numbers."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from .batch import Batch


class PendingRange(NamedTuple):
    """Undistributed messages of a topic that channels must not read from the log in sequence order.

    Attributes:
        sequences: A contiguous range.
        due_ns: When they may be delivered, Unix nanoseconds.
        channel: The only channel that gets them; None: all channels do.
        held: The batch that holds them, if they are only in memory.
    """

    sequences: range
    due_ns: int
    channel: str | None = None
    held: Batch | None = None


class WaitingMessages:
    """The `PendingRange` entries of a topic, ordered by sequence."""

    def __init__(self) -> None:
        self._start = array("Q")
        self._count = array("Q")
        self._due_ns = array("Q")
        # Keyed by the first sequence; most entries have neither.
        self._channel: dict[int, str] = {}
        self._held: dict[int, Batch] = {}
        self._messages = 0

    def __len__(self) -> int:
        return len(self._start)

    def __iter__(self) -> Iterator[PendingRange]:
        return self.since(0)

    def since(self, sequence: int) -> Iterator[PendingRange]:
        for index in range(bisect_left(self._start, sequence), len(self._start)):
            start, count, due_ns = self._start[index], self._count[index], self._due_ns[index]
            yield PendingRange(
                range(start, start + count), due_ns, self._channel.get(start), self._held.get(start)
            )

    def between(self, start: int, end: int) -> Iterator[PendingRange]:
        """Yield the entries that have some sequences in [start, end)."""
        for first, stop in self.overlapping(start, end):
            index = bisect_left(self._start, first)
            yield PendingRange(
                range(first, stop), self._due_ns[index], self._channel.get(first), self._held.get(first)
            )

    def overlapping(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the sequences of entries that have some in [start, end), each as [first, after the last)."""
        for index in range(max(0, bisect_right(self._start, start) - 1), bisect_left(self._start, end)):
            stop = self._start[index] + self._count[index]
            if stop > start:
                yield self._start[index], stop

    def add(self, waiting: PendingRange) -> None:
        """Append an entry; its sequences must be greater than those of all entries before it."""
        start = waiting.sequences.start
        self._start.append(start)
        self._count.append(len(waiting.sequences))
        self._due_ns.append(waiting.due_ns)
        self._messages += len(waiting.sequences)
        if waiting.channel is not None:
            self._channel[start] = waiting.channel
        if waiting.held is not None:
            self._held[start] = waiting.held

    def drop_before(self, sequence: int) -> None:
        """Remove the sequences below this one; an entry may lose a part."""
        count = bisect_left(self._start, sequence)
        if not count:
            return
        last = count - 1
        start, stop = self._start[last], self._start[last] + self._count[last]
        if stop > sequence:
            if start in self._channel:
                self._channel[sequence] = self._channel.pop(start)
            if start in self._held:
                self._held[sequence] = self._held.pop(start)
            self._start[last], self._count[last] = sequence, stop - sequence
            self._messages -= sequence - start
            count = last
        for first in self._start[:count]:
            self._channel.pop(first, None)
            self._held.pop(first, None)
        self._messages -= sum(self._count[:count])
        del self._start[:count], self._count[:count], self._due_ns[:count]

    def messages_from(self, sequence: int) -> int:
        before = bisect_left(self._start, sequence)
        return self._messages - sum(self._count[:before])

    def copy(self) -> WaitingMessages:
        """Return an independent copy without the held batches."""
        other = WaitingMessages()
        other._start, other._count, other._due_ns = self._start[:], self._count[:], self._due_ns[:]
        other._channel, other._held, other._messages = self._channel.copy(), {}, self._messages
        return other
