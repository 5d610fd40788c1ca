"""What producers that number their batches have published in a topic: the greatest number of each.

A number lies in the log with its batch (see `note`), and in the topic's saved state once the batch is behind its `end`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

MAX_PRODUCERS = 10_000
"""As many are remembered, some 50 bytes each in every saved state."""


class LastBatch(NamedTuple):
    """A producer's greatest number.

    Attributes:
        producer: Its name.
        number: The number.
        sequence: Of the first message of that batch.
    """

    producer: str
    number: int
    sequence: int


class Producers:
    """Those of one topic."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, LastBatch] = OrderedDict()  # the one that is unused longest first

    def number_of(self, producer: str) -> int | None:
        """The greatest number of a producer; None if it is not known."""
        last = self._last.get(producer)
        return last.number if last is not None else None

    def has_published(self, producer: str, number: int) -> bool:
        """Whether a batch of this number would come too late: it, or one after it, is there. Who asks is in use."""
        last = self._last.get(producer)
        if last is None or number > last.number:
            return False
        self._last.move_to_end(producer)
        return True

    def note(self, last: LastBatch) -> None:
        """Remember a batch that is in the log; who is unused longest is forgotten if there are too many."""
        known = self.number_of(last.producer)
        if known is None or known < last.number:
            self._last[last.producer] = last
        self._last.move_to_end(last.producer)
        if len(self._last) > MAX_PRODUCERS:
            self._last.popitem(last=False)

    def state(self) -> list[LastBatch]:
        """All, the one that is unused longest first; the list is the caller's."""
        return list(self._last.values())

    def restore(self, state: Iterable[tuple[str, int, int]], end: int) -> None:
        """Take up a state, but for the batches that the log, which ends at `end`, has lost."""
        for producer, number, sequence in state:
            last = LastBatch(str(producer), int(number), int(sequence))
            if last.sequence < end:
                self.note(last)
