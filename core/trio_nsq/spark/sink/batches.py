"""Rows of a task as the batches that it publishes, cut the same however often the task is tried, and their numbers.

A broker of ours publishes a producer's numbers only if they grow (`IdempotentProducer`). That helps a task tried
again only if it sends the same batches, so cuts depend on nothing but the rows and their order; and as nothing makes
Spark compute the same rows in the same order again, a number tells of what it stands for:

    62            35 34           16 15            0
    +---------------+---------------+--------------+
    |  micro-batch  |    ordinal    |   checksum   |
    +---------------+---------------+--------------+

The micro-batch is 0 in a batch job, whose ordinals have its bits, too. The checksum is one of all rows up to there, so
the greatest number that a broker knows says whether what it has published is what would be published now.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ...protocol.errors import NSQError

BLOCK_ROWS = 10_000
"""Rows that are looked at together: as many as Spark puts into an Arrow batch."""
BLOCK_BYTES = 16 * 1024 * 1024
_SIZE_BYTES = 4
"""Before each message, in a request."""
_CHECKSUM_BITS, _ORDINAL_BITS = 16, 19
_MICRO_BATCHES = 1 << 63 - _ORDINAL_BITS - _CHECKSUM_BITS


class RowsDiffer(NSQError):
    """What is to be published is not what was published under the same numbers; the text says what to do."""


@dataclass(slots=True)
class RowBlock:
    """Rows that follow each other.

    Attributes:
        first: The place of the first in the partition.
        bodies: Of each; None: null.
        topics: Of each, None: null; None: there is no such column.
        delays_ms: Likewise.
    """

    first: int
    bodies: Sequence[bytes | None]
    topics: Sequence[str | None] | None = None
    delays_ms: Sequence[int | None] | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    def part(self, start: int, stop: int) -> "RowBlock":
        """Some of them."""
        topics, delays = self.topics, self.delays_ms
        return RowBlock(
            self.first + start,
            self.bodies[start:stop],
            None if topics is None else topics[start:stop],
            None if delays is None else delays[start:stop],
        )


def join(pieces: Sequence[RowBlock]) -> RowBlock:
    """Pieces that follow each other, at least one, as one."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    return RowBlock(
        first.first,
        [body for piece in pieces for body in piece.bodies],
        None if first.topics is None else [topic for piece in pieces for topic in piece.topics or ()],
        None if first.delays_ms is None else [delay for piece in pieces for delay in piece.delays_ms or ()],
    )


def _ends(bodies: Sequence[Any], more_bytes: int = 0) -> list[int]:
    """Where each would end if they lay behind each other, with so many bytes more for each."""
    return list(accumulate(map(more_bytes.__add__, map(len, bodies))))


def blocks(pieces: Iterable[RowBlock]) -> Iterator[RowBlock]:
    """The same rows in blocks of up to `BLOCK_ROWS` and `BLOCK_BYTES`, wherever they were cut before."""
    held: list[RowBlock] = []
    held_rows = held_bytes = 0
    for piece in pieces:
        ends = _ends([body or b"" for body in piece.bodies] if None in piece.bodies else piece.bodies)
        start, before = 0, 0
        while start < len(piece):
            fits = bisect_right(ends, before + BLOCK_BYTES - held_bytes, start)
            stop = min(start + BLOCK_ROWS - held_rows, fits)
            if held and stop == start:
                yield join(held)
                held, held_rows, held_bytes = [], 0, 0
                continue
            stop = max(stop, start + 1)  # one that is larger than a block is one
            held.append(piece.part(start, stop))
            held_rows += stop - start
            held_bytes += ends[stop - 1] - before
            start, before = stop, ends[stop - 1]
            if held_rows == BLOCK_ROWS:
                yield join(held)
                held, held_rows, held_bytes = [], 0, 0
    if held:
        yield join(held)


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that are published together.

    Attributes:
        topic: To which.
        delay_ms: How long they are deferred.
        bodies: Theirs, at least one.
        number: Of it: greater than those of the batches before.
    """

    topic: str
    delay_ms: int
    bodies: list[bytes]
    number: int


@dataclass(slots=True)
class BatchNumbers:
    """Gives batches their numbers.

    Attributes:
        micro_batch: Which of the query, from 0; None: this is a batch job.
    """

    micro_batch: int | None = None
    _ordinal: int = field(default=0, init=False)
    _checksum: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (self.micro_batch or 0) >= _MICRO_BATCHES:
            raise RowsDiffer(f"no query can have more than {_MICRO_BATCHES:,} micro-batches: start a new one")

    def number(self, topic: str, delay_ms: int, bodies: Sequence[bytes]) -> int:
        """The number of the batch that comes next."""
        if self.micro_batch is not None and self._ordinal >> _ORDINAL_BITS:
            raise RowsDiffer(
                f"a task of a micro-batch can publish no more than {1 << _ORDINAL_BITS:,} batches: have the query take "
                "less at once, or more partitions, or fewer different values of defer_ms"
            )
        head = f"{topic} {delay_ms} {len(bodies)} ".encode()
        self._checksum = zlib.crc32(b"\n".join(bodies), zlib.crc32(head, self._checksum))
        place = ((self.micro_batch or 0) << _ORDINAL_BITS) + self._ordinal
        self._ordinal += 1
        return place << _CHECKSUM_BITS | self._checksum & (1 << _CHECKSUM_BITS) - 1


def batches(
    groups: Iterable[tuple[str, int, list[bytes]]], numbering: BatchNumbers, batch_bytes: int
) -> Iterator[Batch]:
    """Batches of about so many bytes, or of one message that is larger."""
    for topic, delay_ms, bodies in groups:
        ends = _ends(bodies, _SIZE_BYTES)
        start, before = 0, 0
        while start < len(bodies):
            stop = max(start + 1, bisect_right(ends, before + batch_bytes, start))
            some = bodies[start:stop] if stop - start < len(bodies) else bodies
            yield Batch(topic, delay_ms, some, numbering.number(topic, delay_ms, some))
            start, before = stop, ends[stop - 1]


def groups(rows: RowBlock, topic: str | None) -> list[tuple[str, int, list[bytes]]]:
    """Topics and delays with their bodies, in the order of the rows; every row has a body.

    Args:
        rows: Which.
        topic: Where those go whose own is null.
    """
    count = len(rows)
    if rows.topics is None and not any(rows.delays_ms or ()):
        return [(topic or "", 0, list(rows.bodies))] if count else []  # type: ignore[arg-type]
    found: dict[tuple[str, int], list[bytes]] = {}
    topics, delays = rows.topics or [None] * count, rows.delays_ms or [None] * count
    for own, delay, body in zip(topics, delays, rows.bodies, strict=True):
        key = (own or topic or "", delay or 0)
        if (bodies := found.get(key)) is None:
            bodies = found[key] = []
        bodies.append(body)  # type: ignore[arg-type]
    return [(own, delay, bodies) for (own, delay), bodies in found.items()]


class RetryCheck:
    """What of one topic was published before, by a task whose place this one takes.

    Args:
        last: The greatest number that the broker knows; None: none.
        numbering: Of this task.
    """

    def __init__(self, last: int | None, numbering: BatchNumbers) -> None:
        self.last = last
        self._micro_batch = numbering.micro_batch
        self._met = False
        if last is not None and numbering.micro_batch is not None:
            before = last >> _CHECKSUM_BITS + _ORDINAL_BITS
            if before > numbering.micro_batch:
                raise RowsDiffer(
                    f"the broker has micro-batch {before} of this query, and this is {numbering.micro_batch}: the "
                    "checkpoint was set back, and what is missing cannot be told from what is there; start the query "
                    "with a new checkpoint"
                )
            self._met = before < numbering.micro_batch  # nothing of this one yet
        elif last is None:
            self._met = True

    def meet(self, number: int) -> None:
        """Say which batch comes next, before it is published. Raises RowsDiffer."""
        if self._met or self.last is None:
            return
        self._met = number == self.last
        if not self._met and number >> _CHECKSUM_BITS >= self.last >> _CHECKSUM_BITS:
            raise self._difference()

    def end(self) -> None:
        """Say that there are no more. Raises RowsDiffer."""
        if not self._met:
            raise self._difference()

    def _difference(self) -> RowsDiffer:
        same = "jobId" if self._micro_batch is None else "micro-batch"
        return RowsDiffer(
            "the rows are not those, in the same order and partitions, that the task before this one has published, or "
            f"a write with the same {same}: what is missing cannot be told from what is there. Make the order certain "
            "with sortWithinPartitions before the write, or let messages be published twice, with idempotent=false"
        )
