"""Cut the rows of a task into numbered batches, in the same way whenever the task is tried again.

Our broker publishes a batch only if its number is greater than those before (`IdempotentProducer`). That works for a
task that is tried again only if it sends the same batches, so the cuts depend on nothing but the rows and their order.
Spark does not guarantee the same rows in the same order, so a number has a checksum of the rows:

    62            35 34           16 15            0
    +---------------+---------------+--------------+
    |  micro-batch  |    ordinal    |   checksum   |
    +---------------+---------------+--------------+

The micro-batch is 0 in a batch job, where the ordinal uses its bits, too. The checksum covers all rows up to this
batch, so the greatest number that a broker has tells whether it has published the same rows.
"""

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ...protocol.batcher import split_for_mpub
from ...protocol.errors import NSQError

BLOCK_ROWS = 10_000
"""Rows that are grouped by topic together: as many as Spark puts into an Arrow batch."""
BLOCK_BYTES = 16 * 1024 * 1024
_CHECKSUM_BITS, _ORDINAL_BITS = 16, 19
_MICRO_BATCHES = 1 << 63 - _ORDINAL_BITS - _CHECKSUM_BITS


class RowsDiffer(NSQError):
    """An earlier attempt has published other rows with the same numbers; the text says what to do."""


@dataclass(slots=True)
class RowBlock:
    """Consecutive rows of a partition.

    Attributes:
        first: The number of the first row in the partition.
        bodies: The bodies, which may be null.
        topics: The topics, which may be null; None: there is no such column.
        delays_ms: The delays, likewise.
    """

    first: int
    bodies: Sequence[bytes | None]
    topics: Sequence[str | None] | None = None
    delays_ms: Sequence[int | None] | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    def part(self, start: int, stop: int) -> "RowBlock":
        """The rows from one index to another."""
        return self._change(self.first + start, lambda column: column[start:stop])

    def take(self, indexes: Sequence[int]) -> "RowBlock":
        """The rows at some indexes."""
        return self._change(self.first, lambda column: [column[index] for index in indexes])

    def _change(self, first: int, change: Callable[[Sequence[Any]], Sequence[Any]]) -> "RowBlock":
        topics = None if self.topics is None else change(self.topics)
        delays_ms = None if self.delays_ms is None else change(self.delays_ms)
        return RowBlock(first, change(self.bodies), topics, delays_ms)


def _join(parts: Sequence[RowBlock]) -> RowBlock:
    """Consecutive parts, at least one, as one block."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return RowBlock(
        first.first,
        [body for part in parts for body in part.bodies],
        None if first.topics is None else [topic for part in parts for topic in part.topics or ()],
        None if first.delays_ms is None else [delay for part in parts for delay in part.delays_ms or ()],
    )


def make_blocks(
    parts: Iterable[RowBlock], max_rows: int = BLOCK_ROWS, max_bytes: int = BLOCK_BYTES
) -> Iterator[RowBlock]:
    """Cut rows into blocks of limited size. The blocks do not depend on how the rows were cut before."""
    held: list[RowBlock] = []
    held_rows = held_bytes = 0
    for part in parts:
        bodies: Sequence[Any] = [body or b"" for body in part.bodies] if None in part.bodies else part.bodies
        ends = list(accumulate(map(len, bodies)))
        start, before = 0, 0
        while start < len(part):
            fits = bisect_right(ends, before + max_bytes - held_bytes, start)
            stop = min(start + max_rows - held_rows, fits)
            if held and stop == start:
                yield _join(held)
                held, held_rows, held_bytes = [], 0, 0
                continue
            stop = max(stop, start + 1)  # a larger row is a block of its own
            held.append(part.part(start, stop))
            held_rows += stop - start
            held_bytes += ends[stop - 1] - before
            start, before = stop, ends[stop - 1]
            if held_rows == max_rows:
                yield _join(held)
                held, held_rows, held_bytes = [], 0, 0
    if held:
        yield _join(held)


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that are published together."""

    topic: str
    delay_ms: int
    bodies: Sequence[bytes]
    number: int


@dataclass(slots=True)
class BatchNumbers:
    """Numbers the batches of a task.

    Attributes:
        micro_batch: The micro-batch of a query; None: this is a batch job.
    """

    micro_batch: int | None = None
    _ordinal: int = field(default=0, init=False)
    _checksum: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (self.micro_batch or 0) >= _MICRO_BATCHES:
            raise RowsDiffer(f"no query can have more than {_MICRO_BATCHES:,} micro-batches: start a new one")

    def next(self, topic: str, delay_ms: int, bodies: Sequence[bytes]) -> int:
        if self.micro_batch is not None and self._ordinal >> _ORDINAL_BITS:
            raise RowsDiffer(
                f"a task of a micro-batch can publish no more than {1 << _ORDINAL_BITS:,} batches: have the query take "
                "less at once, or more partitions, or fewer different values of defer_ms"
            )
        head = f"{topic} {delay_ms} {len(bodies)} ".encode()
        self._checksum = zlib.crc32(b"\n".join(bodies), zlib.crc32(head, self._checksum))
        ordinal = ((self.micro_batch or 0) << _ORDINAL_BITS) + self._ordinal
        self._ordinal += 1
        return ordinal << _CHECKSUM_BITS | self._checksum & (1 << _CHECKSUM_BITS) - 1


def make_batches(
    groups: Iterable[tuple[str, int, list[bytes]]], numbers: BatchNumbers, batch_bytes: int
) -> Iterator[Batch]:
    """Cut groups into batches of about so many bytes, or of a single larger message."""
    for topic, delay_ms, bodies in groups:
        for part in split_for_mpub(bodies, map(len, bodies), batch_bytes):
            yield Batch(topic, delay_ms, part, numbers.next(topic, delay_ms, part))


def group_by_topic(rows: RowBlock, topic: str | None) -> list[tuple[str, int, list[bytes]]]:
    """Group bodies by topic and delay, in the order of the rows, each of which has a body.

    Args:
        topic: The topic of rows that have none.
    """
    count = len(rows)
    if rows.topics is None and not any(rows.delays_ms or ()):
        return [(topic or "", 0, list(rows.bodies))] if count else []  # type: ignore[arg-type]
    found: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
    topics, delays = rows.topics or [None] * count, rows.delays_ms or [None] * count
    for own, delay, body in zip(topics, delays, rows.bodies, strict=True):
        found[own or topic or "", delay or 0].append(body)  # type: ignore[arg-type]
    return [(own, delay, bodies) for (own, delay), bodies in found.items()]


class RetryCheck:
    """Checks that a task publishes the same batches to a topic as an earlier attempt.

    Args:
        last: The greatest number that the broker has of this producer; None: none.
    """

    def __init__(self, last: int | None, numbers: BatchNumbers) -> None:
        self.last = last
        self._micro_batch = numbers.micro_batch
        self._passed = last is None  # whether the batch `last` came, or there is none to wait for
        if last is not None and numbers.micro_batch is not None:
            before = last >> _CHECKSUM_BITS + _ORDINAL_BITS
            if before > numbers.micro_batch:
                raise RowsDiffer(
                    f"the broker has micro-batch {before} of this query, and this is {numbers.micro_batch}: the "
                    "checkpoint was set back, and what is missing cannot be told from what is there; start the query "
                    "with a new checkpoint"
                )
            self._passed = before < numbers.micro_batch

    def check(self, number: int) -> None:
        """Check the next batch, before it is published. Raises RowsDiffer."""
        if self._passed or self.last is None:
            return
        self._passed = number == self.last
        if not self._passed and number >> _CHECKSUM_BITS >= self.last >> _CHECKSUM_BITS:
            raise self._difference()

    def check_complete(self) -> None:
        """Check that the earlier attempt has not published more. Raises RowsDiffer."""
        if not self._passed:
            raise self._difference()

    def _difference(self) -> RowsDiffer:
        same = "jobId" if self._micro_batch is None else "micro-batch"
        return RowsDiffer(
            "the rows are not those, in the same order and partitions, that the task before this one has published, or "
            f"a write with the same {same}: what is missing cannot be told from what is there. Make the order certain "
            "with sortWithinPartitions before the write, or let messages be published twice, with idempotent=false"
        )
