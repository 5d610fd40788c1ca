"""Split the rows of a task into numbered batches; a repeated attempt produces the same batches.

`qcli serve` publishes a batch only if its number is greater than all earlier ones (`IdempotentProducer`). This requires
that a repeated task sends the same batches, so they depend only on the rows and their order. Spark does not guarantee
the same rows in the same order, so a number has a checksum of the rows:

    62            35 34           16 15            0
    +---------------+---------------+--------------+
    |  micro-batch  |    ordinal    |   checksum   |
    +---------------+---------------+--------------+

In a batch job the micro-batch is 0, and the ordinal also uses its bits. The checksum covers all rows up to this batch,
so the greatest number on a broker shows whether it has published the same rows.
"""

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ...protocol.batcher import split_for_mpub
from ...protocol.errors import NSQError

BLOCK_ROWS = 10_000
"""The rows that are grouped by topic at a time: the size of Spark's Arrow batches."""
BLOCK_BYTES = 16 * 1024 * 1024
_CHECKSUM_BITS, _ORDINAL_BITS = 16, 19
_MICRO_BATCHES = 1 << 63 - _ORDINAL_BITS - _CHECKSUM_BITS


class RowsDiffer(NSQError):
    """An earlier attempt has published other rows with the same numbers; the text explains what to do."""


@dataclass(slots=True)
class RowBlock:
    """Consecutive rows of a partition.

    Attributes:
        first: The number of the first row in the partition.
        bodies: The bodies, which may be null.
        topics: The topics, which may be null; None: there is no such column.
        delays_ms: The delays, which may be null; None: there is no such column.
    """

    first: int
    bodies: Sequence[bytes | None]
    topics: Sequence[str | None] | None = None
    delays_ms: Sequence[int | None] | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    def take(self, indexes: Sequence[int]) -> "RowBlock":
        """Return the rows at some indexes."""

        def some(column: Sequence[Any] | None) -> Any:
            return None if column is None else [column[index] for index in indexes]

        return RowBlock(self.first, some(self.bodies), some(self.topics), some(self.delays_ms))


def make_blocks(
    tables: Iterable[Any], max_rows: int = BLOCK_ROWS, max_bytes: int = BLOCK_BYTES
) -> Iterator[RowBlock]:
    """Split rows into blocks of limited size; a larger row is a block by itself.

    Args:
        tables: The rows, as Arrow tables with the columns `body`, binary, and maybe `topic` and `defer_ms`. The blocks
            do not depend on the sizes of the tables.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    first, held = 0, None
    for table in tables:
        held = table if held is None else pa.concat_tables([held, table])
        ends = list(accumulate(pc.binary_length(held["body"]).fill_null(0).to_pylist()))
        start = before = 0
        while True:
            stop = min(start + max_rows, bisect_right(ends, before + max_bytes, start))
            stop = max(start + 1, stop)
            # A block is full when it has max_rows, or when the next row does not fit.
            if stop > len(ends) or (stop == len(ends) and stop - start < max_rows):
                break
            yield _block(first + start, held.slice(start, stop - start))
            start, before = stop, ends[stop - 1]
        first, held = first + start, held.slice(start)
    if held:
        yield _block(first, held)


def _block(first: int, table: Any) -> RowBlock:
    columns = {name: table[name].to_pylist() for name in table.column_names}
    return RowBlock(first, columns["body"], columns.get("topic"), columns.get("defer_ms"))


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
            raise RowsDiffer(f"the query exceeds {_MICRO_BATCHES:,} micro-batches: start a new query")

    def next(self, topic: str, delay_ms: int, bodies: Sequence[bytes]) -> int:
        if self.micro_batch is not None and self._ordinal >> _ORDINAL_BITS:
            raise RowsDiffer(
                f"a task of a micro-batch exceeds {1 << _ORDINAL_BITS:,} batches: use smaller micro-batches, more "
                "partitions, or fewer different values of defer_ms"
            )
        head = f"{topic} {delay_ms} {len(bodies)} ".encode()
        self._checksum = zlib.crc32(b"\n".join(bodies), zlib.crc32(head, self._checksum))
        ordinal = ((self.micro_batch or 0) << _ORDINAL_BITS) + self._ordinal
        self._ordinal += 1
        return ordinal << _CHECKSUM_BITS | self._checksum & (1 << _CHECKSUM_BITS) - 1


def make_batches(
    groups: Iterable[tuple[str, int, list[bytes]]], numbers: BatchNumbers, batch_bytes: int
) -> Iterator[Batch]:
    """Split groups into batches of about `batch_bytes`; a larger message is a batch by itself."""
    for topic, delay_ms, bodies in groups:
        for part in split_for_mpub(bodies, map(len, bodies), batch_bytes):
            yield Batch(topic, delay_ms, part, numbers.next(topic, delay_ms, part))


def group_by_topic(rows: RowBlock, topic: str | None) -> list[tuple[str, int, list[bytes]]]:
    """Group bodies by topic and delay, in the order of the rows; all rows must have a body.

    Args:
        topic: The topic of rows without a topic.
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
        last: The greatest number of this producer on the broker; None: no batch was published.
    """

    def __init__(self, last: int | None, numbers: BatchNumbers) -> None:
        self.last = last
        self._micro_batch = numbers.micro_batch
        self._passed = last is None  # whether the batch `last` was seen, or is None
        if last is not None and numbers.micro_batch is not None:
            before = last >> _CHECKSUM_BITS + _ORDINAL_BITS
            if before > numbers.micro_batch:
                raise RowsDiffer(
                    f"the broker has micro-batch {before} of this query, and this is {numbers.micro_batch}: the "
                    "checkpoint was set back, so published rows cannot be identified; start the query with a new "
                    "checkpoint"
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
            "the rows, their order or their partitions differ from those of an earlier attempt of this task, or of a "
            f"write with the same {same}, so published rows cannot be identified. Sort the rows with "
            "sortWithinPartitions before the write, or allow duplicates with idempotent=false"
        )
