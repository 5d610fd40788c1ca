"""The greatest batch number of each idempotent producer of a topic.

The log stores a number with its batch (see `record_metadata`). The topic's saved state stores the numbers of all
batches before its `end`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from ..errors import BatchRefused
from .version import Version

_NS_PER_S = 1_000_000_000
MAX_PRODUCERS = 10_000
"""Producers remembered per topic, at about 60 bytes each in every saved state."""
KEPT_S = 3600
"""Minimum time for which a producer is remembered after its last batch."""
_FORGOTTEN = 100


class LastBatch(NamedTuple):
    """The batch with a producer's greatest number.

    Attributes:
        sequence: Sequence of the batch's first message.
        instance: The run of the producer that gave the number; empty: the number belongs to the content.
    """

    producer: str
    number: int
    sequence: int
    instance: str = ""


class BatchNumber(NamedTuple):
    """A producer's identification of a batch.

    Attributes:
        number: Greater than the numbers of all the producer's earlier batches in the same topic.
        first: The batch has the numbers from this one to `number`, so that batches with other limits can be told from
            repetitions; None: only `number`.
        instance: The run of the producer that gave the number, so that only its own batches are repetitions; empty:
            the number belongs to the content, and any producer of this name may send the batch.
        follows: The batch is stored only if `first` comes next after the producer's last number, or is 0.
    """

    producer: str
    number: int
    first: int | None = None
    instance: str = ""
    follows: bool = False


def _fenced(batch: BatchNumber, last: LastBatch) -> BatchRefused:
    return BatchRefused(
        "FENCED",
        f"another producer has published as {batch.producer}: number {last.number} is not of this one",
    )


class Producers:
    """The idempotent producers of one topic.

    Times are Unix nanoseconds, from the same clock as the messages' timestamps.

    Attributes:
        forgotten: Names of the last 100 evicted producers. The code that reports them removes them.
    """

    def __init__(self, version: Version) -> None:
        self._version = version
        self._last: OrderedDict[str, LastBatch] = OrderedDict()  # least recently used first
        self._used_ns: dict[str, int] = {}  # time of last use; 0: saved by a version without this time
        self.forgotten: deque[str] = deque(maxlen=_FORGOTTEN)

    def number_of(self, producer: str) -> int | None:
        """Return a producer's greatest batch number, or None if the producer is unknown."""
        last = self._last.get(producer)
        return last.number if last is not None else None

    def last_of(self, producer: str) -> LastBatch | None:
        """Return a producer's batch with the greatest number, or None if the producer is unknown."""
        return self._last.get(producer)

    def may_have_forgotten(self, producer: str) -> bool:
        """Whether an unknown producer may have published: others took its place."""
        return producer not in self._last and len(self._last) >= MAX_PRODUCERS

    def has_published(self, batch: BatchNumber, now_ns: int) -> bool:
        """Whether this batch, or a later one of the same producer, is published. Counts as a use of the producer.

        Raises:
            BatchRefused: The batch is not published, and must not be: it does not follow the last one, or another run
                of the producer has published under its number.
        """
        last = self._last.get(batch.producer)
        following = 0 if last is None else last.number + 1
        if last is not None and batch.number < following:
            if batch.instance and batch.instance != last.instance:
                raise _fenced(batch, last)
            self._use(batch.producer, now_ns)
            return True
        if batch.first is None:
            return False
        if last is not None and batch.first < following:
            if batch.instance and batch.instance != last.instance:
                raise _fenced(batch, last)
            raise BatchRefused("OVERLAP", f"numbers up to {last.number} of this producer are stored")
        if batch.follows and batch.first > following:
            raise BatchRefused(
                "GAP", f"number {following} of producer {batch.producer} comes next, not {batch.first}"
            )
        return False

    def has_room(self, producer: str, now_ns: int) -> bool:
        """Whether this producer can be remembered without evicting one that was used within `KEPT_S`."""
        return producer in self._last or len(self._last) < MAX_PRODUCERS or self._is_old(now_ns)

    def record(self, last: LastBatch, at_ns: int) -> None:
        """Remember a batch that was appended to the log at `at_ns`.

        If there are more than `MAX_PRODUCERS`, evicts the least recently used ones that are older than `KEPT_S`.
        """
        known = self.number_of(last.producer)
        if known is None or known < last.number:
            self._last[last.producer] = last
        self._use(last.producer, at_ns)
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
        self._version.increment()

    def _is_old(self, now_ns: int) -> bool:
        """Whether the least recently used producer may be evicted."""
        return self._used_ns[next(iter(self._last))] <= now_ns - KEPT_S * _NS_PER_S

    def copy_from(self, other: "Producers") -> None:
        """Have the same producers as another topic."""
        self._last, self._used_ns = other._last.copy(), other._used_ns.copy()

    def state(self) -> list[LastBatch]:
        """Return a new list of all producers, least recently used first."""
        return list(self._last.values())

    def used_s(self) -> list[int]:
        """Return when each producer of `state` was last used, Unix seconds."""
        return [self._used_ns[producer] // _NS_PER_S for producer in self._last]

    def restore(
        self,
        state: Iterable[Sequence[Any]],
        used_s: Iterable[int],
        end: int,
        instances: Iterable[Sequence[Any]] = (),
    ) -> None:
        """Load a saved state, without the batches that a log ending at `end` has lost.

        Args:
            state: Rows that begin with the first three values of `LastBatch`.
            used_s: Has fewer entries than `state` if an earlier version saved it.
            instances: Rows that begin with a producer and an instance; the other producers have none.
        """
        instance_of = {str(producer): str(instance) for producer, instance, *_ in instances}
        # `state` is ordered by use and within the limit: no eviction is needed.
        for (producer, number, sequence, *_), used in zip(state, chain(used_s, repeat(0)), strict=False):
            last = LastBatch(str(producer), int(number), int(sequence), instance_of.get(producer, ""))
            if last.sequence < end:
                self._last[last.producer] = last
                self._use(last.producer, int(used) * _NS_PER_S)
