"""The partitions of the source `nsq`, for batches and streams: create them from spans, and read one."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import InputPartition

from ...client.reading.batches import is_for_all_channels
from ...client.reading.broker_log import BrokerLog, LogReplaced
from ...log.gaps import Gap, Span
from ...protocol.limits import MIB
from ..ranges import split
from .options import ReadOptions, SourceError

BATCH_ROWS = 10_000
"""The most rows of an Arrow batch; larger batches are not faster."""
BATCH_BYTES = 8 * MIB
"""About the most bytes of an Arrow batch; a row may be larger. A task holds a few batches, and Spark's JVM too."""


class NsqPartition(InputPartition):
    """A range of one broker's log. Pickled and sent to the task.

    Args:
        last_id: The id of the last message, 16 hex digits; None: not checked.
    """

    def __init__(self, broker: str, span: Span, last_id: str | None = None) -> None:
        super().__init__((broker, *span))
        self.broker = broker
        self.span = span
        self.last_id = last_id


def make_partitions(spans: Mapping[str, Span], min_partitions: int) -> list[NsqPartition]:
    """Split spans into about `min_partitions` ranges of similar length, but at least one for each span."""
    total = sum(span.length for span in spans.values())
    max_length = -(-total // max(1, min_partitions))
    return [
        NsqPartition(broker, piece)
        for broker, span in spans.items()
        for piece in split(span, max_length if min_partitions else span.length)
    ]


def without_lost(options: ReadOptions, broker: str, span: Span, kept_from: int) -> Span | None:
    """Return the part of a span that is still retained; None: nothing.

    Raises:
        SourceError: Messages are lost, and `failOnDataLoss` is true.
    """
    lost = min(kept_from, span.end)
    if span.first >= lost:
        return span
    if options.fail_on_data_loss:
        raise _lost(options, broker, span.first, lost, "no longer retained")
    return Span(lost, span.end) if lost < span.end else None


def read_partition(
    options: ReadOptions, columns: list[str], partition: InputPartition | None
) -> Iterator[Any]:
    """Read a partition as Arrow batches.

    Raises:
        SourceError: Messages are lost, and `failOnDataLoss` is true.
        LogReplaced: The log is not the expected one.
        BrokerUnreachable, RequestRefused, RawStreamError: See `BrokerLog.read`.
    """
    if not isinstance(partition, NsqPartition):  # Spark reads one partition even if there are none
        return
    from ..export.columns import TableBuilder
    from ..export.layout import Layout

    span = partition.span
    builder = TableBuilder(options.topic, partition.broker, Layout())

    def batches() -> Iterator[Any]:
        table = builder.table().select(columns)
        fitting = len(table) * BATCH_BYTES // max(1, table.nbytes)  # one record may be larger
        yield from table.to_batches(max_chunksize=max(1, min(BATCH_ROWS, fitting)))

    for found in options.log(partition.broker).read(span):
        if isinstance(found, Gap):
            if options.fail_on_data_loss:
                raise _lost(
                    options, partition.broker, found.first_sequence, found.next_sequence, found.reason
                )
            continue
        if found.next_sequence == span.end:
            last_id = f"{found.first_id + found.count - 1:016x}"
            if partition.last_id not in (None, last_id):
                raise log_replaced(options, partition.broker)
        if is_for_all_channels(found):
            builder.add(found)
        if len(builder) >= BATCH_ROWS or builder.body_bytes >= BATCH_BYTES:
            yield from batches()
    if len(builder):
        yield from batches()


def log_replaced(options: ReadOptions, broker: str) -> LogReplaced:
    """Return the error for a log that is not the one that was read before."""
    return LogReplaced(
        f"topic {options.topic} on {broker} is not the one that was read before: it was deleted and recreated, or "
        "lost its last messages. To read it, start the query with a new checkpoint"
    )


def id_of_message(log: BrokerLog, sequence: int) -> str | None:
    """Return the id of a message; None if it is not retained. Waits for an unreachable broker."""
    return log.patiently(lambda: log.id_at(sequence)) if sequence >= 0 else None


def _lost(options: ReadOptions, broker: str, first: int, end: int, what: str) -> SourceError:
    return SourceError(
        f"messages {first} to {end - 1} of topic {options.topic} on {broker} are {what}; "
        "to skip them, set failOnDataLoss=false"
    )
