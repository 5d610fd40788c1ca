"""The partitions of the source `nsq`, for batches and streams: create them from spans, and read one."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

from ...client.reading.broker_log import Bounds, LogReplaced
from ...client.reading.log_stream import is_for_all_channels
from ...log.gaps import Gap, Span
from ...protocol.limits import MIB
from ...storage import known_access
from ..logs import LogPlace
from ..ranges import split
from .columns import RowFormat
from .fleet import LogKey
from .options import SourceError

TASK_BYTES = 64 * MIB
"""A task reads this in less than a second."""
MIN_TASK_BYTES = 8 * MIB
"""Starting a task costs as much as reading this."""
BATCH_ROWS = 10_000
"""The most rows of an Arrow batch; larger batches are not faster."""
BATCH_BYTES = 8 * MIB
"""About the most bytes of an Arrow batch; a row may be larger. A task holds a few batches, and Spark's JVM too."""


@dataclass(frozen=True, slots=True)
class SizedSpan:
    """The messages of a log to read.

    Attributes:
        size_bytes: Their approximate size.
        last_id: The id of the last one, 16 hex digits; None: not checked.
        starts: Where files of the log start, if tasks read them.
    """

    place: LogPlace
    span: Span
    size_bytes: int
    last_id: str | None = None
    starts: Sequence[int] = ()


class NsqPartition(InputPartition):
    """A range of one log. Pickled and sent to the task.

    Args:
        last_id: The id of the last message, 16 hex digits; None: not checked.

    Attributes:
        access: The settings of the buckets that the driver has used.
    """

    def __init__(self, key: LogKey, place: LogPlace, span: Span, last_id: str | None = None) -> None:
        super().__init__((*key, *span))
        self.key = key
        self.place = place
        self.span = span
        self.last_id = last_id
        self.access = known_access()


def make_partitions(
    spans: Mapping[LogKey, SizedSpan], min_partitions: int, max_records: int | None
) -> list[NsqPartition]:
    """Split spans into ranges of similar size, at least one for each span.

    Args:
        min_partitions: The approximate number of ranges; 0: one for each `TASK_BYTES`, and one for each of this
            machine's cores if that gives them at least `MIN_TASK_BYTES`.
        max_records: The most sequences of a range; None: no limit.
    """
    total_bytes = sum(each.size_bytes for each in spans.values())
    total = sum(each.span.length for each in spans.values())
    if min_partitions:
        max_length = _at_most(max_records, -(-total // min_partitions))
        return [each for key, span in spans.items() for each in _split(key, span, max_length)]
    tasks = max(-(-total_bytes // TASK_BYTES), min(os.cpu_count() or 1, total_bytes // MIN_TASK_BYTES), 1)
    max_bytes = max(1, -(-total_bytes // tasks))
    found: list[NsqPartition] = []
    for key, span in spans.items():
        ranges = max(1, round(span.size_bytes / max_bytes))
        found += _split(key, span, _at_most(max_records, -(-span.span.length // ranges)))
    return found


def _at_most(limit: int | None, number: int) -> int:
    return number if limit is None else min(limit, number)


def _split(key: LogKey, sized: SizedSpan, max_length: int) -> list[NsqPartition]:
    pieces = split(sized.span, max_length, sized.starts)
    return [
        NsqPartition(key, sized.place, piece, sized.last_id if piece.end == sized.span.end else None)
        for piece in pieces
    ]


def size_of(start: Bounds, end: Bounds) -> int:
    """Return the approximate size of the messages between two positions in a log."""
    return max(0, start.bytes_ahead - end.bytes_ahead)


def without_lost(key: LogKey, span: Span, kept_from: int, *, fails: bool) -> Span | None:
    """Return the part of a span that is still retained; None: nothing.

    Raises:
        SourceError: Messages are lost, and `fails` is true.
    """
    lost = min(kept_from, span.end)
    if span.first >= lost:
        return span
    if fails:
        raise _lost(key, span.first, lost, "no longer retained")
    return Span(lost, span.end) if lost < span.end else None


def read_partition(partition: InputPartition | None, form: RowFormat, *, fails: bool) -> Iterator[Any]:
    """Read a partition as Arrow batches.

    Args:
        form: The columns.
        fails: Whether lost messages are an error.

    Raises:
        SourceError: Messages are lost, and `fails` is true.
        LogReplaced: The log is not the expected one.
        BrokerUnreachable, RequestRefused, RawStreamError: See `BrokerLog.read`.
        RegistryError: The schema registry cannot be asked.
    """
    if not isinstance(partition, NsqPartition):  # Spark reads one partition even if there are none
        return
    from ..export.columns import TableBuilder

    partition.access.keep()
    key, span = partition.key, partition.span
    builder = TableBuilder(key.topic, key.broker, form.layout, schemas=form.schemas)

    def batches() -> Iterator[Any]:
        table = form.rows(builder.table())
        fitting = len(table) * BATCH_BYTES // max(1, table.nbytes)  # one record may be larger
        yield from table.to_batches(max_chunksize=max(1, min(BATCH_ROWS, fitting)))

    for found in partition.place.open().read(span):
        if isinstance(found, Gap):
            if fails:
                raise _lost(key, found.first_sequence, found.next_sequence, found.reason)
            continue
        if found.next_sequence == span.end:
            last_id = found.last_id
            if partition.last_id not in (None, last_id):
                raise log_replaced(key)
        if is_for_all_channels(found):
            builder.add(found)
        if len(builder) >= BATCH_ROWS or builder.body_bytes >= BATCH_BYTES:
            yield from batches()
    if len(builder):
        yield from batches()


def log_replaced(key: LogKey) -> LogReplaced:
    """Return the error for a log that is not the one that was read before."""
    return LogReplaced(
        f"topic {key.topic} on {key.broker} is not the one that was read before: it was deleted and recreated, or "
        "lost its last messages. To read it, start the query with a new checkpoint"
    )


def _lost(key: LogKey, first: int, end: int, what: str) -> SourceError:
    return SourceError(
        f"messages {first} to {end - 1} of topic {key.topic} on {key.broker} are {what}; "
        "to skip them, set failOnDataLoss=false"
    )
