"""What a task of the sink `nsq` does: its rows are checked, made into batches, and published."""

import http.client
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pyspark.sql.datasource import WriterCommitMessage

from ...client.errors import PublishInDoubt, RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ...client.http.idempotent_producer import KEEP_ALIVE_S, IdempotentProducer, PublishOutcome
from ...client.http.retry import PATIENCE_S
from ...protocol.errors import NSQError
from ...protocol.names import is_valid_name
from .batches import Batch, BatchNumbers, RetryCheck, RowBlock, batches, blocks, groups

BATCH_BYTES = 1024 * 1024
"""Of one request, unless `batchBytes` says otherwise: a fifth of what brokers take by default."""
_OPEN_CONNECTIONS = 32
"""Of one task, which may publish to more topics than that."""
_TRIES_IN_DOUBT = 3


class SinkError(NSQError):
    """An option, a column or a row is wrong, or a broker does not take it; the text says which, and what to do."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What is written where; it travels to the tasks.

    Attributes:
        addresses: HTTP addresses of the brokers; partitions are dealt out to them in turn.
        topic: Where rows go that name none; empty: there is none.
        columns: The columns of the rows, in order, in lower case.
        batch_bytes: Of one request.
        skips_empty: Whether rows without a body are left out; else they are errors.
        idempotent: Whether nothing is to be published twice.
        patience_s: So long is a broker waited for that went away or has no room.
    """

    addresses: tuple[str, ...]
    topic: str
    columns: tuple[str, ...]
    batch_bytes: int = BATCH_BYTES
    skips_empty: bool = False
    idempotent: bool = True
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class SinkTask:
    """Whose rows they are.

    Attributes:
        job: The id of the job or query.
        partition: Which.
        micro_batch: Of a query; None: of a batch job.
    """

    job: str
    partition: int
    micro_batch: int | None = None

    @property
    def producer(self) -> str:
        """Its name for the brokers."""
        return f"spark:{self.job}:{self.partition}"


@dataclass
class TaskResult(WriterCommitMessage):
    """What a task has done.

    Attributes:
        messages: TaskResult, now or by an attempt before.
        repeated: Those of them that had been published before.
        empty: Rows that were left out, as they had no body.
        forgetful: Brokers among those written to that do not remember what they have published.
    """

    messages: int = 0
    repeated: int = 0
    empty: int = 0
    forgetful: set[str] = field(default_factory=set)


def publish(sink: SinkOptions, task: SinkTask, arrow_batches: Iterable[Any]) -> TaskResult:
    """Publish the rows of a partition.

    Args:
        sink: Where to, and how.
        task: Whose they are.
        arrow_batches: The rows, in order.

    Raises:
        SinkError, RowsDiffer: See there.
        BrokerUnreachable: A broker went away, and stays away.
    """
    if not sink.idempotent:
        # A name that nobody has had: there is nothing before this attempt.
        task = SinkTask(uuid4().hex, task.partition, task.micro_batch)
    done = TaskResult()
    numbering = BatchNumbers(task.micro_batch)
    with _Publishers(sink, task, numbering) as publishers:
        for rows in blocks(_pieces(sink, arrow_batches)):
            checked = _checked(sink, task, rows)
            done.empty += len(rows) - len(checked)
            for batch in batches(groups(checked, sink.topic), numbering, sink.batch_bytes):
                try:
                    outcome = publishers.publish(batch)
                except RequestRefused as exc:
                    raise _explained(exc, batch, rows, task) from exc
                done.messages += len(batch.bodies)
                if outcome is PublishOutcome.REPEATED:
                    done.repeated += len(batch.bodies)
                if outcome is PublishOutcome.UNKNOWN:
                    done.forgetful.add(publishers.address)
        publishers.end()
    return done


def _pieces(sink: SinkOptions, arrow_batches: Iterable[Any]) -> Iterator[RowBlock]:
    import pyarrow as pa

    first = 0
    for arrow_batch in arrow_batches:
        columns = dict(zip(sink.columns, arrow_batch.columns, strict=True))
        bodies = columns["body"].cast(pa.binary()).to_pylist()
        topics, delays = (
            columns[name].to_pylist() if name in columns else None for name in ("topic", "defer_ms")
        )
        yield RowBlock(first, bodies, topics, delays)
        first += len(bodies)


def _checked(sink: SinkOptions, task: SinkTask, rows: RowBlock) -> RowBlock:
    """The rows that have a body. Raises SinkError: one is wrong."""

    def wrong(column: Sequence[Any], value: Any, reason: str) -> SinkError:
        return SinkError(f"{_row(task, rows.first + column.index(value))}: {reason}")

    for topic in set(rows.topics or ()):
        if topic is None and not sink.topic:
            reason = "the column topic is null, and there is no option topic that stands for it"
            raise wrong(rows.topics or (), None, reason)
        if topic is not None and not is_valid_name(topic):
            raise wrong(rows.topics or (), topic, f"the column topic: {topic!r} is no name of a topic")
    for delay_ms in set(rows.delays_ms or ()):
        if delay_ms is not None and delay_ms < 0:
            raise wrong(rows.delays_ms or (), delay_ms, f"the column defer_ms is {delay_ms}, less than 0")
    if all(rows.bodies):
        return rows
    if sink.skips_empty:
        return _with_bodies(rows)
    body = next(body for body in rows.bodies if not body)
    is_what = "null" if body is None else "empty"
    reason = (
        f"the column body is {is_what}, which no message is: filter such rows out, or say emptyBodies=skip"
    )
    raise wrong(rows.bodies, body, reason)


def _with_bodies(rows: RowBlock) -> RowBlock:
    keep = [place for place, body in enumerate(rows.bodies) if body]

    def kept(column: Sequence[Any] | None) -> list[Any] | None:
        return None if column is None else [column[place] for place in keep]

    return RowBlock(rows.first, kept(rows.bodies) or [], kept(rows.topics), kept(rows.delays_ms))


def _row(task: SinkTask, place: int) -> str:
    return f"row {place} of partition {task.partition} (both from 0)"


class _Publishers:
    """One for each topic that a task writes to; as a context manager, for their connections."""

    def __init__(self, sink: SinkOptions, task: SinkTask, numbering: BatchNumbers) -> None:
        # By its number, so that a partition finds what an earlier attempt has left.
        self.address = sink.addresses[task.partition % len(sink.addresses)]
        self._producer = task.producer
        self._patience_s = sink.patience_s
        self._numbering = numbering
        self._of: dict[str, IdempotentProducer] = {}
        self._trails: dict[str, RetryCheck] = {}
        self._open: dict[str, None] = {}  # the one that was used last is the last
        self._stack = ExitStack()

    def __enter__(self) -> "_Publishers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publish(self, batch: Batch) -> PublishOutcome:
        """Publish it. Raises as `publish` above, and RequestRefused."""
        publisher = self._publisher(batch.topic)
        trail = self._trails[batch.topic]
        trail.meet(batch.number)
        if batch.delay_ms and not publisher.remembers:
            self._publish_singly(batch)
            return PublishOutcome.UNKNOWN
        outcome = self._persistently(publisher, batch)
        if outcome is PublishOutcome.REPEATED and (trail.last is None or batch.number > trail.last):
            # Another attempt is at work, or was until now: what it has published has to be the same.
            self._trails[batch.topic] = trail = RetryCheck(publisher.last_number(), self._numbering)
            trail.meet(batch.number)
        return outcome

    def end(self) -> None:
        """Say that there is nothing more. Raises RowsDiffer."""
        for trail in self._trails.values():
            trail.end()

    def _publisher(self, topic: str) -> IdempotentProducer:
        if topic not in self._of:
            publisher = IdempotentProducer(self.address, topic, self._producer, patience_s=self._patience_s)
            self._of[topic] = self._stack.enter_context(publisher)
            self._trails[topic] = RetryCheck(self._of[topic].last_number(), self._numbering)
        self._open.pop(topic, None)
        self._open[topic] = None
        if len(self._open) > _OPEN_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._of[oldest].close()
        return self._of[topic]

    def _persistently(self, publisher: IdempotentProducer, batch: Batch) -> PublishOutcome:
        """TaskResult, to a forgetful broker at least once: better this batch twice than, with the task, all of them."""
        for _ in range(_TRIES_IN_DOUBT - 1):
            try:
                return publisher.publish(batch.bodies, batch.number, batch.delay_ms)
            except PublishInDoubt:
                pass
        return publisher.publish(batch.bodies, batch.number, batch.delay_ms)

    def _publish_singly(self, batch: Batch) -> None:
        """Deferred, to an nsqd, which takes no delay with several."""
        with closing(BrokerHTTP(self.address, keep_alive_s=KEEP_ALIVE_S)) as http:
            for body in batch.bodies:
                http.post("/pub", {"topic": batch.topic, "defer": str(batch.delay_ms)}, body)


def _explained(error: RequestRefused, batch: Batch, rows: RowBlock, task: SinkTask) -> SinkError:
    """What a broker does not take, and what to do about it."""
    largest = max(batch.bodies, key=len)
    where = _row(task, rows.first + list(rows.bodies).index(largest))
    advice = {
        "BAD_MESSAGE": f"a body of {len(largest):,} bytes, {where}, is larger than its --max-msg-size",
        "MSG_TOO_BIG": f"a body of {len(largest):,} bytes, {where}, is larger than its --max-msg-size",
        "BODY_TOO_BIG": "a batch is larger than its --max-body-size: make the option batchBytes smaller",
        "BAD_BODY": "a batch has more messages than fit its --max-body-size: make the option batchBytes smaller",
        "INVALID_DEFER": f"defer_ms is {batch.delay_ms}, and its --max-defer less (nsqd's is called --max-req-timeout)",
    }.get(error.text)
    if advice is None and error.status == http.client.SERVICE_UNAVAILABLE:
        advice = "once there is room again, the write can be repeated"
    return SinkError(f"{error}: {advice}" if advice else str(error))
