"""The messages of a channel that are to be delivered again, as soon as may be."""

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice

from .batch import Batch
from .version import Version

Requeued = tuple[int, int, Batch | None]
"""(sequence, attempts so far, the batch that holds the message if nothing but memory has it)."""


class RequeuedMessages:
    """They are delivered in this order.

    Args:
        version: The channel's.

    Attributes:
        entries: All of them; changed by this class only.
    """

    __slots__ = ("_version", "entries")

    def __init__(self, version: Version) -> None:
        self.entries: deque[Requeued] = deque()
        self._version = version

    @property
    def first(self) -> int | None:
        """The sequence of the first; None if there is none."""
        return self.entries[0][0] if self.entries else None

    def head(self, count: int) -> list[Requeued]:
        """The first of them, at most `count`."""
        return list(islice(self.entries, count))

    def add(self, entries: Iterable[Requeued]) -> None:
        """Add messages behind the others."""
        self.entries.extend(entries)
        self._version.increment()

    def remove_first(self, count: int) -> None:
        """Remove the first `count`."""
        for _ in range(count):
            self.entries.popleft()
        self._version.increment()

    def put_first_last(self) -> None:
        """Let the others be delivered before the first."""
        self.entries.rotate(-1)
        self._version.increment()

    def withdraw(self, sequences: Collection[int]) -> list[Requeued]:
        """Remove and return those of these messages that are here."""
        found = [entry for entry in self.entries if entry[0] in sequences]
        if found:
            self.entries = deque(entry for entry in self.entries if entry[0] not in sequences)
            self._version.increment()
        return found

    def clear(self) -> deque[Requeued]:
        """Remove all, and return them: to free many of them takes long."""
        entries, self.entries = self.entries, deque()
        self._version.increment()
        return entries
