"""What producers that number their batches have published in a topic: the greatest number of each.

A number lies in the log with its batch (see `record_metadata`), and in the topic's saved state once the batch is
behind its `end`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain, repeat
from typing import NamedTuple

from .version import Version

_NS_PER_S = 1_000_000_000
MAX_PRODUCERS = 10_000
"""As many are remembered, some 60 bytes each in every saved state."""
KEPT_S = 3600
"""How long a producer is remembered at least after its last batch, however many others there are."""
_FORGOTTEN = 100


class LastBatch(NamedTuple):
    """A producer's greatest number.

    Attributes:
        sequence: Of the first message of that batch.
    """

    producer: str
    number: int
    sequence: int


class Producers:
    """Those of one topic.

    Times are Unix nanoseconds, by the clock that the messages' timestamps are by.

    Attributes:
        forgotten: The names of the last hundred that had to make room for others. Who reports them removes them.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        self._last: OrderedDict[str, LastBatch] = OrderedDict()  # the one that is unused longest first
        self._used_ns: dict[str, int] = {}  # when each was used last; 0: an older program did not save it
        self.forgotten: deque[str] = deque(maxlen=_FORGOTTEN)

    def number_of(self, producer: str) -> int | None:
        """The greatest number of a producer; None if it is not known."""
        last = self._last.get(producer)
        return last.number if last is not None else None

    def has_published(self, producer: str, number: int, now_ns: int) -> bool:
        """Whether a batch of this number would come too late: it, or one after it, is there. Who asks is in use."""
        last = self._last.get(producer)
        if last is None or number > last.number:
            return False
        self._use(producer, now_ns)
        return True

    def has_room(self, producer: str, now_ns: int) -> bool:
        """Whether a batch of this producer can be remembered without forgetting one that was used lately."""
        return producer in self._last or len(self._last) < MAX_PRODUCERS or self._is_old(now_ns)

    def record(self, last: LastBatch, at_ns: int) -> None:
        """Remember a batch that is in the log since then.

        Those that are unused longest are forgotten if there are too many, and nobody has used them for `KEPT_S`.
        """
        known = self.number_of(last.producer)
        if known is None or known < last.number:
            self._last[last.producer] = last
        self._use(last.producer, at_ns)
        self._version.increment()
        while len(self._last) > MAX_PRODUCERS and self._is_old(at_ns):
            oldest, _ = self._last.popitem(last=False)
            del self._used_ns[oldest]
            self.forgotten.append(oldest)

    def forget(self, producer: str) -> None:
        self._last.pop(producer, None)
        self._used_ns.pop(producer, None)
        self._version.increment()

    def _use(self, producer: str, at_ns: int) -> None:
        self._used_ns[producer] = at_ns
        self._last.move_to_end(producer)

    def _is_old(self, now_ns: int) -> bool:
        """Whether the one that is unused longest may be forgotten."""
        return self._used_ns[next(iter(self._last))] <= now_ns - KEPT_S * _NS_PER_S

    def state(self) -> list[LastBatch]:
        """All, the one that is unused longest first; the list is the caller's."""
        return list(self._last.values())

    def used_s(self) -> list[int]:
        """When each of these was used last, Unix seconds."""
        return [self._used_ns[producer] // _NS_PER_S for producer in self._last]

    def restore(self, state: Iterable[tuple[str, int, int]], used_s: Iterable[int], end: int) -> None:
        """Take up a state, but for the batches that the log, which ends at `end`, has lost.

        `used_s` may have fewer entries, if an older program has saved it.
        """
        # The order is right already: nothing is forgotten here.
        for (producer, number, sequence), used in zip(state, chain(used_s, repeat(0)), strict=False):
            last = LastBatch(str(producer), int(number), int(sequence))
            if last.sequence < end:
                self._last[last.producer] = last
                self._use(last.producer, int(used) * _NS_PER_S)
