"""The readers of the source `nsq`: `spark.read.format("nsq")` and `spark.readStream.format("nsq")`.

In a stream, one reader on the driver returns offsets and partitions; copies of another reader read in the tasks. So a
partition has everything that its task needs. Two offsets determine the messages between them, so a repeated batch has
the same rows. Spark stores the offsets in the checkpoint of a query. An offset is a JSON object with an object for each
broker:

    {"127.0.0.1:4151": {"first": 0, "id": "9a46b01870c003e7", "sequence": 1000}}

    first     where the stream started to read this broker's log
    id        the id of the message before `sequence`, which identifies the log; absent if there is none
    sequence  the next sequence to read

The first offset is empty: the starting position is resolved once and stored with the first batch, because `latest`
would be another sequence later. A broker that is added later starts in the same way. Spark compares offsets as text, so
keys are sorted, and an unchanged broker keeps its object.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from ...client.errors import RequestRefused
from ...client.reading.broker_log import Bounds
from ...log.gaps import Span
from ..versions import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
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
"""The pause when no broker has new messages: without it, Spark would query them a hundred times a second."""

Offset: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokerOffset:
    """The read position in one broker's log."""

    first: int
    sequence: int
    last_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert to the object of an offset."""
        found: dict[str, Any] = {"first": self.first}
        if self.last_id is not None:
            found["id"] = self.last_id
        return found | {"sequence": self.sequence}


def parse_offset(offset: Mapping[str, Any]) -> dict[str, BrokerOffset]:
    """Parse an offset, by broker. Raises SourceError if it is not an offset of this source."""
    try:
        return {
            broker: BrokerOffset(int(found["first"]), int(found["sequence"]), found.get("id"))
            for broker, found in offset.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SourceError(
            f"the checkpoint belongs to another source, or another version of this one: {offset}"
        ) from None


def build_offset(positions: Mapping[str, BrokerOffset]) -> Offset:
    """Build an offset of the positions of all brokers."""
    return {broker: positions[broker].to_json() for broker in sorted(positions)}


def share_limit(available: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Divide the limit of a batch among the brokers.

    Each broker gets a share in proportion to its backlog, so that all brokers are read at the same pace. It gets at
    least one message, so that a small backlog does not wait for a large one.

    Args:
        available: The backlog of each broker.
        limit: The limit of the batch; None: no limit.
    """
    total = sum(available.values())
    if limit is None or total <= limit:
        return dict(available)
    waiting = sorted((broker for broker in available if available[broker]), key=lambda each: -available[each])
    one_each = set(waiting[:limit])
    left, rest = limit - len(one_each), total - len(one_each)
    return {
        broker: (broker in one_each) + left * (count - (broker in one_each)) // rest
        for broker, count in available.items()
    }


class _Reader:
    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Read a range as Arrow batches. Raises the errors of `read_partition`."""
        return read_partition(self._options, self._columns, partition)

    def _start_on(self, broker: str) -> tuple[Bounds, int]:
        """Return the bounds of a log, and the sequence of the starting position."""
        options = self._options
        position = position_on(options.starting, broker, options.brokers[broker])
        bounds = options.log(broker).bounds(position)
        return bounds, int(position) if position.isdecimal() else bounds.at


class NsqReader(_Reader, DataSourceReader):
    """Reads a batch. `partitions` runs on the driver, `read` in the tasks."""

    def partitions(self) -> list[NsqPartition]:
        """Return the current ranges of the logs."""
        spans = {broker: self._span(broker) for broker in self._options.brokers}
        return make_partitions(
            {broker: span for broker, span in spans.items() if span}, self._options.min_partitions
        )

    def _span(self, broker: str) -> Span | None:
        options = self._options
        bounds, first = self._start_on(broker)
        end = options.log(broker).bounds(position_on(options.ending, broker, options.brokers[broker])).at
        return without_lost(options, broker, Span(first, end), bounds.first) if first < end else None


class NsqStreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream. `read` runs in the tasks, everything else on the driver."""

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        super().__init__(options, columns)
        self._targets: dict[str, int] = {}  # ends of the logs for Trigger.AvailableNow
        self._ends: dict[str, int] = {}  # ends of the logs, as of the last request
        self._nothing_until_s = 0.0  # on the monotonic clock: no request before

    # ------------------------------------------------------------------ offsets

    def initialOffset(self) -> Offset:
        """Return an empty offset."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of `maxOffsetsPerTrigger`."""
        limit = self._options.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query. Waits for an unreachable broker."""
        for broker in self._options.brokers:
            log = self._options.log(broker)
            self._targets[broker] = log.patiently(log.bounds).end

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next batch; `start`, unchanged, if there is nothing to read.

        Raises:
            SourceError: Messages are lost, a broker was removed from the options, or a new one does not have the topic.
            LogReplaced: The log is not the one that was read before.
            BrokerUnreachable: A broker was unreachable for longer than `patience_s`, or a new one does not answer.
        """
        time.sleep(max(0, self._nothing_until_s - time.monotonic()))
        before = parse_offset(start)
        self._check_brokers(before)
        starts: dict[str, BrokerOffset] = {}
        available: dict[str, int] = {}
        for broker in self._options.brokers:
            if broker in before:
                bounds, position = self._known_broker(broker, before[broker]), before[broker]
                span = Span(position.sequence, bounds.end)
                if (left := without_lost(self._options, broker, span, bounds.first)) is not None:
                    position = BrokerOffset(position.first, left.first, position.last_id)
            else:
                bounds, position = self._new_broker(broker)
            self._ends[broker] = bounds.end
            starts[broker] = position
            end = min(bounds.end, self._targets.get(broker, bounds.end))
            available[broker] = max(0, end - position.sequence)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        after = dict(before)
        for broker, count in share_limit(available, most).items():
            if count or broker not in before:
                after[broker] = self._advance(broker, starts[broker], count)
        if after == before:
            self._nothing_until_s = time.monotonic() + _PAUSE_S
        return build_offset(after)

    def reportLatestOffset(self) -> Offset | None:
        """Return the ends of the logs, which the progress of a query shows as `latestOffset`."""
        return {broker: {"sequence": self._ends[broker]} for broker in sorted(self._ends)} or None

    def _check_brokers(self, before: dict[str, BrokerOffset]) -> None:
        missing = sorted(before.keys() - self._options.brokers.keys())
        if missing and self._options.fail_on_data_loss:
            raise SourceError(
                f"the checkpoint has the broker {', '.join(missing)}, which nsqdHttpAddress does not have: add it, or "
                "set failOnDataLoss=false to continue without it"
            )

    def _known_broker(self, broker: str, position: BrokerOffset) -> Bounds:
        """Return the bounds of a log that was read before. Raises LogReplaced if it is another log."""
        log = self._options.log(broker)
        try:
            bounds = log.patiently(log.bounds)
        except RequestRefused as exc:
            if exc.status == _NOT_FOUND:
                raise log_replaced(self._options, broker) from exc
            raise
        last = position.sequence - 1
        nothing_new = position.sequence == bounds.end == self._ends.get(broker)
        found = None
        if position.last_id and bounds.first <= last < bounds.end and not nothing_new:
            found = id_of_message(log, last)
        if position.sequence > bounds.end or found not in (None, position.last_id):
            raise log_replaced(self._options, broker)
        return bounds

    def _new_broker(self, broker: str) -> tuple[Bounds, BrokerOffset]:
        """Return the bounds of a log that is new to the query, and its starting position."""
        bounds, first = self._start_of_new(broker)
        left = without_lost(self._options, broker, Span(first, bounds.end), bounds.first)
        first = bounds.end if left is None else left.first
        return bounds, BrokerOffset(first, first)

    def _start_of_new(self, broker: str) -> tuple[Bounds, int]:
        """Return the bounds of a log that is new to the query, and the sequence to start at, retained or not."""
        options = self._options
        try:
            bounds, first = self._start_on(broker)
        except RequestRefused as exc:
            if exc.status != _NOT_FOUND:
                raise
            raise SourceError(
                f"there is no topic {options.topic} on {broker}: create it (qcli topic create), or remove the broker "
                "from nsqdHttpAddress"
            ) from exc
        if first > bounds.end:
            raise SourceError(
                f"topic {options.topic} on {broker} ends before message {bounds.end}, and the query starts at {first}"
            )
        return bounds, first

    def _advance(self, broker: str, position: BrokerOffset, count: int) -> BrokerOffset:
        sequence = position.sequence + count
        return BrokerOffset(position.first, sequence, id_of_message(self._options.log(broker), sequence - 1))

    # ------------------------------------------------------------------ partitions

    def partitions(self, start: Offset, end: Offset) -> list[NsqPartition]:
        """Return the ranges between two offsets. Raises the errors of `latestOffset`: the plan may be old."""
        before, after = parse_offset(start), parse_offset(end)
        self._check_brokers(after)
        spans: dict[str, Span] = {}
        for broker, position in after.items():
            first = before[broker].sequence if broker in before else position.first
            if first >= position.sequence or broker not in self._options.brokers:
                continue
            bounds = self._known_broker(broker, position)
            left = without_lost(self._options, broker, Span(first, position.sequence), bounds.first)
            if left is not None:
                spans[broker] = left
        pieces = make_partitions(spans, self._options.min_partitions)
        for piece in pieces:
            if piece.span.end == after[piece.broker].sequence:
                piece.last_id = after[piece.broker].last_id
        return pieces
