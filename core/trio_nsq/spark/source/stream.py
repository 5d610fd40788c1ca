"""The data source `nsq` as a stream: `spark.readStream.format("nsq")`.

Spark asks one reader for offsets, plans with it, and has copies of another one read: all that a task knows is in its
partition. What is read between two offsets is settled by them alone, so a batch that is done again is the same.
`stream_offsets` says what they hold.
"""

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ...client.errors import RequestRefused
from ..broker_log import Bounds
from ..ranges import Span
from .offsets import BrokerOffset, Offset, build_offset, parse_offset, share_limit
from .options import ReadOptions, SourceError, position_on
from .partitions import (
    NsqPartition,
    id_of_message,
    log_replaced,
    make_partitions,
    read_partition,
    without_lost,
)

_NOT_FOUND = 404
_PAUSE_S = 0.1
"""Between two looks at brokers that have nothing new: Spark would have a hundred of them in a second."""


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans where Spark's driver is, and reads in its tasks.

    Args:
        options: What is to be read.
        columns: Which of its columns.
    """

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns
        self._targets: dict[str, int] = {}  # before which a query ends that reads what is available now
        self._ends: dict[str, int] = {}  # of the logs, when they were looked at last
        self._nothing_until_s = 0.0  # by the monotonic clock; so long nothing is looked for

    # ------------------------------------------------------------------ how far

    def initialOffset(self) -> Offset:
        """Nothing: see `stream_offsets`."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """What `maxOffsetsPerTrigger` says."""
        most = self._options.most_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Settle where the query is to end. A broker that is away is waited for."""
        for broker in self._options.brokers:
            log = self._options.log(broker)
            self._targets[broker] = log.patiently(log.bounds).end

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """How far the next batch goes; `start`, as it is, if there is nothing.

        Raises:
            SourceError: Messages are gone, a broker is no longer named, or one that joins does not have the topic.
            LogReplaced: The topic is another one than the one that was read before.
            BrokerUnreachable: A broker was gone for longer than our patience, or one that joins does not answer.
        """
        time.sleep(max(0, self._nothing_until_s - time.monotonic()))
        before = parse_offset(start)
        self._check_named(before)
        begins: dict[str, BrokerOffset] = {}
        available: dict[str, int] = {}
        for broker in self._options.brokers:
            if broker in before:
                bounds, place = self._known(broker, before[broker]), before[broker]
                span = Span(place.sequence, bounds.end)
                if (left := without_lost(self._options, broker, span, bounds.first)) is not None:
                    place = BrokerOffset(place.first, left.first, place.last_id)
            else:
                bounds, place = self._joining(broker)
            self._ends[broker] = bounds.end
            begins[broker] = place
            end = min(bounds.end, self._targets.get(broker, bounds.end))
            available[broker] = max(0, end - place.sequence)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        after = dict(before)
        for broker, count in share_limit(available, most).items():
            if count or broker not in before:
                after[broker] = self._ahead(broker, begins[broker], count)
        if after == before:
            self._nothing_until_s = time.monotonic() + _PAUSE_S
        return build_offset(after)

    def reportLatestOffset(self) -> Offset | None:
        """Where the logs ended when they were looked at last: what the progress of a query calls `latestOffset`."""
        return {broker: {"sequence": self._ends[broker]} for broker in sorted(self._ends)} or None

    def _check_named(self, before: dict[str, BrokerOffset]) -> None:
        missing = sorted(before.keys() - self._options.brokers.keys())
        if missing and self._options.fails_on_loss:
            raise SourceError(
                f"the checkpoint is of a query that also reads {', '.join(missing)}, which nsqdHttpAddress does not "
                "name any more; failOnDataLoss=false goes on without, and where it was if it is named again"
            )

    def _known(self, broker: str, place: BrokerOffset) -> Bounds:
        """The bounds of a log that was read before. Raises LogReplaced if that is another one."""
        log = self._options.log(broker)
        try:
            bounds = log.patiently(log.bounds)
        except RequestRefused as exc:
            if exc.status == _NOT_FOUND:
                raise log_replaced(self._options, broker) from exc
            raise
        last = place.sequence - 1
        nothing_new = place.sequence == bounds.end == self._ends.get(broker)
        found = None
        if place.last_id and bounds.first <= last < bounds.end and not nothing_new:
            found = id_of_message(log, last)
        if place.sequence > bounds.end or found not in (None, place.last_id):
            raise log_replaced(self._options, broker)
        return bounds

    def _joining(self, broker: str) -> tuple[Bounds, BrokerOffset]:
        """The bounds of a log that is new to the query, and where that begins."""
        options = self._options
        log = options.log(broker)
        wanted = position_on(options.starting, broker, options.brokers[broker])
        try:
            bounds = log.bounds(wanted)
        except RequestRefused as exc:
            if exc.status != _NOT_FOUND:
                raise
            raise SourceError(
                f"there is no topic {options.topic} on {broker}: make it (qcli topic create), or name the brokers that "
                "have it"
            ) from exc
        first = int(wanted) if wanted.isdecimal() else bounds.at
        if first > bounds.end:
            raise SourceError(
                f"topic {options.topic} on {broker} ends before message {bounds.end}, and is to be read from {first} on"
            )
        left = without_lost(options, broker, Span(first, bounds.end), bounds.first)
        first = bounds.end if left is None else left.first
        return bounds, BrokerOffset(first, first)

    def _ahead(self, broker: str, place: BrokerOffset, count: int) -> BrokerOffset:
        sequence = place.sequence + count
        return BrokerOffset(place.first, sequence, id_of_message(self._options.log(broker), sequence - 1))

    # ------------------------------------------------------------------ the messages

    def partitions(self, start: Offset, end: Offset) -> list[NsqPartition]:
        """The ranges between two offsets. Raises as `latestOffset`: this may be a batch that was planned long ago."""
        before, after = parse_offset(start), parse_offset(end)
        self._check_named(after)
        spans: dict[str, Span] = {}
        for broker, place in after.items():
            first = before[broker].sequence if broker in before else place.first
            if first >= place.sequence or broker not in self._options.brokers:
                continue
            bounds = self._known(broker, place)
            left = without_lost(self._options, broker, Span(first, place.sequence), bounds.first)
            if left is not None:
                spans[broker] = left
        pieces = make_partitions(spans, self._options.least_partitions)
        for piece in pieces:
            if piece.span.end == after[piece.broker].sequence:
                piece.last_id = after[piece.broker].last_id
        return pieces

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Arrow batches of a range. Raises as `read_partition`."""
        return read_partition(self._options, self._columns, partition)
