"""What the batch reader and the stream reader of the data source `nsq` have in common: ranges, and reading one."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import InputPartition

from ...log.gaps import Gap
from ...log.records import RecordBatch
from ..broker_log import BrokerLog, LogReplaced
from ..ranges import Span, split
from .options import ReadOptions, SourceError

BATCH_ROWS = 10_000
"""Of an Arrow batch; larger ones are not faster."""


class NsqPartition(InputPartition):
    """A range of one broker's log, with all that a task is to know of it.

    Args:
        broker: What it is called in rows.
        span: The range.
        last_id: The id of its last message, 16 hex digits; None if that is not known, or does not matter.
    """

    def __init__(self, broker: str, span: Span, last_id: str | None = None) -> None:
        super().__init__((broker, *span))
        self.broker = broker
        self.span = span
        self.last_id = last_id


def make_partitions(spans: Mapping[str, Span], least: int) -> list[NsqPartition]:
    """Ranges of about the same length: about `least`, or as many as there are spans if those are more."""
    total = sum(span.length for span in spans.values())
    at_most = -(-total // max(1, least))
    return [
        NsqPartition(broker, piece)
        for broker, span in spans.items()
        for piece in split(span, at_most if least else span.length)
    ]


def without_lost(options: ReadOptions, broker: str, span: Span, kept_from: int) -> Span | None:
    """What there still is of a span; None if there is nothing.

    Raises:
        SourceError: Something is gone, and that is not to be passed over.
    """
    lost = min(kept_from, span.end)
    if span.first >= lost:
        return span
    if options.fails_on_loss:
        raise _lost(options, broker, span.first, lost, "no longer kept")
    return Span(lost, span.end) if lost < span.end else None


def read_partition(
    options: ReadOptions, columns: list[str], partition: InputPartition | None
) -> Iterator[Any]:
    """Arrow batches of a range.

    Raises:
        SourceError: Messages are gone, and that is not to be passed over.
        LogReplaced: It is of another log than the one for which it was planned.
        BrokerUnreachable, RequestRefused, RawStreamError: See `BrokerLog.read`.
    """
    if not isinstance(partition, NsqPartition):  # Spark has one even if there are none
        return
    from ..export.columns import TableBuilder
    from ..export.layout import Layout
    from ..export.task import is_for_all_channels

    span = partition.span
    builder = TableBuilder(options.topic, partition.broker, Layout())

    def batches() -> Iterator[Any]:
        yield from builder.table().select(columns).to_batches(max_chunksize=BATCH_ROWS)

    for found in options.log(partition.broker).read(span):
        if isinstance(found, Gap):
            if options.fails_on_loss:
                raise _lost(
                    options, partition.broker, found.first_sequence, found.next_sequence, found.reason
                )
            continue
        if found.next_sequence >= span.end and partition.last_id not in (None, _id_in(found, span.end - 1)):
            raise log_replaced(options, partition.broker)
        if is_for_all_channels(found):
            first = max(0, span.first - found.base_sequence)
            builder.add(found, range(first, min(found.count, span.end - found.base_sequence)))
        if len(builder) >= BATCH_ROWS:
            yield from batches()
    if len(builder):
        yield from batches()


def log_replaced(options: ReadOptions, broker: str) -> LogReplaced:
    """What is to be told where another log is found than the one that was read before."""
    return LogReplaced(
        f"topic {options.topic} on {broker} is not the one that was read before: it was deleted and made again, or "
        "lost its end. A query with a new checkpoint reads what is there now"
    )


def id_of_message(log: BrokerLog, sequence: int) -> str | None:
    """A message's id; None if it is not there. A broker that went away is waited for."""
    return log.patiently(lambda: log.id_at(sequence)) if sequence >= 0 else None


def _id_in(batch: RecordBatch, sequence: int) -> str:
    return f"{batch.first_id + sequence - batch.base_sequence:016x}"


def _lost(options: ReadOptions, broker: str, first: int, end: int, what: str) -> SourceError:
    return SourceError(
        f"messages {first} to {end - 1} of topic {options.topic} on {broker} are {what}; "
        "failOnDataLoss=false passes them over"
    )
