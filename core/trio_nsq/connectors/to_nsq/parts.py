"""The messages on their way from one source: cut by due time, joined into batches. No IO."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...filters.bodies import Filter, OtherBodies
from ...protocol.headers import MAX_HPUB_HEADERS_BYTES, MAX_HPUB_MESSAGES, Headers, headers_bytes
from ..source.batch import Position, SourceBatch

MAX_BATCH_BYTES = 1024 * 1024
"""A batch ends after this size. nsqd accepts 5 MiB."""
MAX_BATCH_MESSAGES = 50_000
_OVERHEAD_BYTES = 64
"""What a message costs in memory besides its body."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Part:
    """Messages that one request publishes.

    Attributes:
        bodies: In order.
        sequences: Their sequences at the source; empty if they are from a channel.
        ids: Their ids at the source.
        due_ns: Until when they are deferred, Unix nanoseconds; 0: not.
        size: The memory that they take, about.
        headers: Of each message; empty if none has headers.
        headers_bytes: The size of these.
    """

    bodies: list[bytes] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    due_ns: int = 0
    size: int = 0
    headers: list[Headers] = field(default_factory=list)
    headers_bytes: int = 0

    def without_stored(self, last: int) -> "Part":
        """Return the messages after a sequence."""
        start = bisect_right(self.sequences, last)
        return self.between(start, len(self.bodies)) if start else self

    def between(self, start: int, end: int) -> "Part":
        """Return some of the messages, by index."""
        if start == 0 and end >= len(self.bodies):
            return self
        return Part(
            self.bodies[start:end],
            self.sequences[start:end],
            self.ids[start:end],
            self.due_ns,
            self.size,
            self.headers[start:end],
            self.headers_bytes,
        )

    def add(self, more: "Part") -> None:
        """Add the messages of a part at the end."""
        if more.headers and not self.headers:
            self.headers = [{} for _ in self.bodies]
        if self.headers:
            self.headers += more.headers or [{} for _ in more.bodies]
        self.bodies += more.bodies
        self.sequences += more.sequences
        self.ids += more.ids
        self.size += more.size
        self.headers_bytes += more.headers_bytes

    def has_room(self, more: "Part") -> bool:
        """Whether the messages of a part may be added. An empty part has room for every message."""
        if not self.bodies and len(more.bodies) == 1:
            return True
        most = MAX_HPUB_MESSAGES if self.headers or more.headers else MAX_BATCH_MESSAGES
        return (
            self.size + more.size <= MAX_BATCH_BYTES
            and len(self.bodies) + len(more.bodies) <= most
            and self.headers_bytes + more.headers_bytes <= MAX_HPUB_HEADERS_BYTES
        )


@dataclass(slots=True)
class Load:
    """Messages that are published before the next ones are.

    Attributes:
        parts: The messages to copy, in order.
        others: Bodies that are not JSON objects, for the topic of these.
        batches: The batches of the source in which they arrived; to finish.
        position: The position behind them; None: they are from a channel.
        received, dropped, not_json: The numbers of messages.
        size: The memory that they take, about.
    """

    parts: list[Part] = field(default_factory=list)
    others: list[Part] = field(default_factory=list)
    batches: list[SourceBatch] = field(default_factory=list)
    position: Position | None = None
    received: int = 0
    dropped: int = 0
    not_json: int = 0
    size: int = 0

    def add(self, batch: SourceBatch, first: int, end: int, chosen: Filter, now_ns: int) -> None:
        """Filter the messages [first, end) of a batch, and add them."""
        bodies = batch.bodies if (first, end) == (0, len(batch.bodies)) else batch.bodies[first:end]
        found = chosen.apply(bodies)
        self.received += len(bodies)
        self.dropped += found.dropped
        self.not_json += len(found.not_json)
        kept = [first + index for index in found.kept]
        start = 0
        for due_ns, stop in _runs(batch, kept, now_ns):
            self._add(self.parts, batch, kept[start:stop], found.passed[start:stop], due_ns)
            start = stop
        if found.not_json and chosen.others is OtherBodies.DEAD_LETTER:
            places = [first + index for index in found.not_json]
            self._add(self.others, batch, places, [batch.bodies[place] for place in places], 0)
        self.size = sum(part.size for part in (*self.parts, *self.others))

    def _add(
        self, parts: list[Part], batch: SourceBatch, places: Sequence[int], bodies: list[bytes], due_ns: int
    ) -> None:
        """Add messages with one due time to the last of the parts, or to new ones."""
        more = Part(bodies, _at(batch.sequences, places), _at(batch.ids, places), due_ns, _size(bodies))
        if batch.headers and any(headers := _at(batch.headers, places)):
            more.headers, more.headers_bytes = headers, sum(map(headers_bytes, headers))
            more.size += more.headers_bytes
        if len(bodies) > 1 and not Part().has_room(more):
            middle = len(bodies) // 2
            self._add(parts, batch, places[:middle], bodies[:middle], due_ns)
            self._add(parts, batch, places[middle:], bodies[middle:], due_ns)
            return
        if parts and parts[-1].due_ns == due_ns and parts[-1].has_room(more):
            parts[-1].add(more)
        else:
            parts.append(more)

    def end_batch(self, batch: SourceBatch) -> None:
        """Record that all messages of a batch were added."""
        self.batches.append(batch)
        self.position = batch.position

    def join(self, load: "Load") -> None:
        """Add the messages of the next load."""
        _join(self.parts, load.parts)
        _join(self.others, load.others)
        self.batches += load.batches
        self.position = load.position
        self.received += load.received
        self.dropped += load.dropped
        self.not_json += load.not_json
        self.size += load.size

    def finish(self) -> None:
        """Finish the messages at the source, if they are from a channel."""
        for batch in self.batches:
            batch.finish()


def _join(parts: list[Part], more: list[Part]) -> None:
    """Add parts; the first of them to the last one, if there is room."""
    if parts and more and parts[-1].due_ns == more[0].due_ns and parts[-1].has_room(more[0]):
        parts[-1].add(more[0])
        more = more[1:]
    parts += more


def _size(bodies: Sequence[bytes]) -> int:
    return sum(map(len, bodies)) + _OVERHEAD_BYTES * len(bodies)


def _at(values: Sequence[_T] | None, places: Sequence[int]) -> list[_T]:
    """Return the values at ascending indexes; nothing if there are no values."""
    if values is None:
        return []
    if places[-1] - places[0] + 1 == len(places):
        return list(values[places[0] : places[-1] + 1])
    return [values[place] for place in places]


def _runs(batch: SourceBatch, kept: Sequence[int], now_ns: int) -> Iterator[tuple[int, int]]:
    """Yield the due time and the end of each run of messages with the same due time; past ones are 0."""
    if not kept:
        return
    dues = [] if batch.dues_ns is None else batch.dues_ns[:]
    if not dues or max(dues) <= now_ns:
        yield 0, len(kept)
        return
    of_kept = [dues[place] if dues[place] > now_ns else 0 for place in kept]
    for at in range(1, len(of_kept)):
        if of_kept[at] != of_kept[at - 1]:
            yield of_kept[at - 1], at
    yield of_kept[-1], len(of_kept)
