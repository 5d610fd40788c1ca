"""A channel's position in its topic's log, and the ranges ahead of it that the channel skips."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from .version import Version


class Cursor:
    """The lowest sequence never delivered, and the *holes* ahead of it: ranges [start, end) to skip.

    Args:
        version: The channel's version; None for a copy, which is not saved.

    Attributes:
        position: The lowest sequence never delivered; never in a hole.
        hole_messages: Number of messages in holes.
    """

    __slots__ = ("_holes", "_version", "hole_messages", "position")

    def __init__(self, position: int, version: Version | None = None) -> None:
        self.position: int = position
        self._version = version or Version()
        self.hole_messages: int = 0
        # Ascending and not adjacent; none begins at the position.
        self._holes: deque[tuple[int, int]] = deque()

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """The holes, ascending."""
        return tuple(self._holes)

    def clone(self) -> "Cursor":
        """Return an independent copy."""
        other = Cursor(self.position)
        other.hole_messages, other._holes = self.hole_messages, self._holes.copy()
        return other

    def run_end(self, end: int) -> int:
        """Return the end of the contiguous messages at the position: the first hole, or `end`."""
        return self._holes[0][0] if self._holes else end

    def move_to(self, sequence: int) -> None:
        """Move forward to `sequence`, and past a hole there. Never moves back."""
        self._version.increment()  # every method that changes the cursor calls this one
        self.position = max(self.position, sequence)
        while self._holes and self._holes[0][0] <= self.position:
            start, end = self._holes.popleft()
            self.hole_messages -= end - start
            self.position = max(self.position, end)

    def restart(
        self, sequence: int, holes: deque[tuple[int, int]] | None = None, hole_messages: int = 0
    ) -> deque[tuple[int, int]]:
        """Move to `sequence`, backward or forward, and replace the holes; returns the previous ones."""
        before, self._holes = self._holes, deque() if holes is None else holes
        self.position = sequence
        self.hole_messages = hole_messages
        self.move_to(sequence)
        return before

    def skip(self, start: int, end: int) -> bool:
        """Add the part of a hole that is ahead, after all other holes. Returns False if no part of it is ahead."""
        start = max(start, self._holes[-1][1] if self._holes else self.position)
        if start >= end:
            return False
        self.hole_messages += end - start
        if self._holes and self._holes[-1][1] == start:
            start, _ = self._holes.pop()
        self._holes.append((start, end))
        self.move_to(self.position)
        return True

    def skip_among(self, sequences: Sequence[int]) -> None:
        """Add holes for these sequences, which are ascending, ahead, and in no hole."""
        self.hole_messages += len(sequences)
        merged: deque[tuple[int, int]] = deque()
        for start, end in sorted(chain(self._holes, spans(sequences))):
            if merged and merged[-1][1] == start:
                start, _ = merged.pop()
            merged.append((start, end))
        self._holes = merged
        self.move_to(self.position)

    def ahead(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges [start, end) between holes, from the position to `end`, which is after all holes."""
        start = self.position
        for hole in self._holes:
            yield start, hole[0]
            start = hole[1]
        if start < end:
            yield start, end

    def ahead_among(self, sequences: Sequence[int], end: int) -> list[int]:
        """Return the sequences among these, which ascend, that are ahead and in no hole."""
        between = (
            (bisect_left(sequences, start), bisect_left(sequences, stop)) for start, stop in self.ahead(end)
        )
        return [sequence for start, stop in between for sequence in sequences[start:stop]]

    def count_before(self, sequence: int) -> int:
        """Count the messages from the position up to `sequence` that are in no hole."""
        count = max(0, sequence - self.position)
        return count - sum(min(end, sequence) - start for start, end in self._holes if start < sequence)

    def after(self, count: int) -> int:
        """Return the sequence after the first `count` messages that are in no hole."""
        to = self.position
        for start, end in self._holes:
            if to + count < start:
                break
            count, to = count - (start - to), end
        return to + count


def spans(sequences: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield ascending sequences as ranges [start, end) of consecutive ones."""
    start = end = -1
    for sequence in sequences:
        if sequence != end:
            if end > start:
                yield start, end
            start = sequence
        end = sequence + 1
    if end > start:
        yield start, end
