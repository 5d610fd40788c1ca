"""How far a channel has come in its topic's log, and what it will pass over ahead of that."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from .version import Version


class Cursor:
    """The next sequence never delivered, and the *holes* past it: [start, end), not to be delivered from there.

    Args:
        version: The channel's; None: it is a copy, which is not saved.

    Attributes:
        position: The next sequence; never in a hole.
        hole_messages: So many are in holes.
    """

    __slots__ = ("_holes", "_version", "hole_messages", "position")

    def __init__(self, position: int, version: Version | None = None) -> None:
        self.position = position
        self._version = version or Version()
        self.hole_messages = 0
        # Ascending, apart from each other, none beginning at the position.
        self._holes: deque[tuple[int, int]] = deque()

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Ascending."""
        return tuple(self._holes)

    def clone(self) -> "Cursor":
        """The same; later changes of this one do not show in it."""
        other = Cursor(self.position)
        other.hole_messages, other._holes = self.hole_messages, self._holes.copy()
        return other

    def run_end(self, end: int) -> int:
        """How far messages lie next to each other from the position on: up to the first hole, or to `end`."""
        return self._holes[0][0] if self._holes else end

    def move_to(self, sequence: int) -> None:
        """Go on up to `sequence`, and over the hole there if there is one; never back."""
        self._version.increment()  # whatever changes the cursor ends with this
        self.position = max(self.position, sequence)
        while self._holes and self._holes[0][0] <= self.position:
            start, end = self._holes.popleft()
            self.hole_messages -= end - start
            self.position = max(self.position, end)

    def restart(
        self, sequence: int, holes: deque[tuple[int, int]] | None = None, hole_messages: int = 0
    ) -> deque[tuple[int, int]]:
        """Go to `sequence`, back or forth, with these holes from there on and no others; returns those it had."""
        before, self._holes = self._holes, deque() if holes is None else holes
        self.position = sequence
        self.hole_messages = hole_messages
        self.move_to(sequence)
        return before

    def skip(self, start: int, end: int) -> bool:
        """Make a hole behind all others; False if there is nothing more of it ahead."""
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
        """Make holes of these sequences, which ascend, lie ahead, and are in no hole yet."""
        self.hole_messages += len(sequences)
        merged: deque[tuple[int, int]] = deque()
        for start, end in sorted(chain(self._holes, spans(sequences))):
            if merged and merged[-1][1] == start:
                start, _ = merged.pop()
            merged.append((start, end))
        self._holes = merged
        self.move_to(self.position)

    def ahead(self, end: int) -> Iterator[tuple[int, int]]:
        """What is in no hole, from the position up to `end`, which is past them all: [start, end), ascending."""
        start = self.position
        for hole in self._holes:
            yield start, hole[0]
            start = hole[1]
        if start < end:
            yield start, end

    def ahead_among(self, sequences: Sequence[int], end: int) -> list[int]:
        """Those of these sequences, which ascend, that lie ahead and in no hole."""
        between = (
            (bisect_left(sequences, start), bisect_left(sequences, stop)) for start, stop in self.ahead(end)
        )
        return [sequence for start, stop in between for sequence in sequences[start:stop]]

    def count_before(self, sequence: int) -> int:
        """How many messages lie ahead and before `sequence`, in no hole."""
        count = max(0, sequence - self.position)
        return count - sum(min(end, sequence) - start for start, end in self._holes if start < sequence)

    def after(self, count: int) -> int:
        """The place behind so many messages that are in no hole; all of them, and no more, are before it."""
        to = self.position
        for start, end in self._holes:
            if to + count < start:
                break
            count, to = count - (start - to), end
        return to + count


def spans(sequences: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending sequences as [start, end) of those that follow each other."""
    start = end = -1
    for sequence in sequences:
        if sequence != end:
            if end > start:
                yield start, end
            start = sequence
        end = sequence + 1
    if end > start:
        yield start, end
