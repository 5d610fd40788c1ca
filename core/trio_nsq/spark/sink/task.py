"""A task of the sink `nsq`: check the rows of a partition, batch them and publish the batches."""

import http.client
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pyspark.sql.datasource import WriterCommitMessage

from ...api.broker import publish as publish_one
from ...client.errors import RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ...client.http.idempotent_producer import KEEP_ALIVE_S, IdempotentProducer, PublishOutcome
from ...protocol.errors import NSQError
from ...protocol.limits import SECOND_MS
from ...protocol.names import is_valid_name
from ...text.arguments import MAX_SECONDS
from .batches import Batch, BatchNumbers, RetryCheck, RowBlock, group_by_topic, make_batches, make_blocks
from .options import SinkOptions

_MAX_RESENDS = 2
"""With a broker that does not deduplicate, publishing a batch twice is better than repeating the whole task."""


class SinkError(NSQError):
    """A row is invalid, or a broker refuses it; the text has the row and what to do."""


@dataclass(frozen=True, slots=True)
class SinkTask:
    """A partition to publish.

    Attributes:
        micro_batch: The micro-batch of a query; None: this is a batch job.
    """

    job: str
    partition: int
    micro_batch: int | None = None

    @property
    def producer(self) -> str:
        """The name of the task as a producer; the same for all attempts."""
        return f"spark:{self.job}:{self.partition}"


@dataclass
class TaskResult(WriterCommitMessage):
    """The result of a task.

    Attributes:
        messages: Published messages, including those of an earlier attempt.
        repeated: Messages that an earlier attempt published.
        empty: Skipped rows without a body.
        at_least_once: The addresses of brokers that do not deduplicate.
    """

    messages: int = 0
    repeated: int = 0
    empty: int = 0
    at_least_once: set[str] = field(default_factory=set)


def publish(options: SinkOptions, task: SinkTask, arrow_batches: Iterable[Any]) -> TaskResult:
    """Publish the rows of a partition.

    Raises:
        SinkError: A row is invalid, or a broker refuses it.
        RowsDiffer: An earlier attempt has published other rows.
        BrokerUnreachable: A broker was unreachable for longer than `patience_s`.
    """
    if not options.idempotent:
        # With a new name, the broker has no earlier batches.
        task = SinkTask(uuid4().hex, task.partition, task.micro_batch)
    result = TaskResult()
    numbers = BatchNumbers(task.micro_batch)
    with _Producers(options, task, numbers) as producers:
        for block in make_blocks(_read(options, arrow_batches), options.block_rows, options.block_bytes):
            rows = _check(options, task, block)
            result.empty += len(block) - len(rows)
            for batch in make_batches(group_by_topic(rows, options.topic), numbers, options.batch_bytes):
                try:
                    outcome = producers.publish(batch)
                except RequestRefused as exc:
                    raise _explain(exc, batch, block, task) from exc
                result.messages += len(batch.bodies)
                if outcome is PublishOutcome.REPEATED:
                    result.repeated += len(batch.bodies)
                if outcome is PublishOutcome.UNKNOWN:
                    result.at_least_once.add(producers.address)
        producers.check_complete()
    return result


def _read(options: SinkOptions, arrow_batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows as Arrow tables."""
    import pyarrow as pa

    for arrow_batch in arrow_batches:
        columns = dict(zip(options.columns, arrow_batch.columns, strict=True))
        yield pa.table(columns | {"body": columns["body"].cast(pa.binary())})


def _check(options: SinkOptions, task: SinkTask, rows: RowBlock) -> RowBlock:
    """Return the rows that have a body. Raises SinkError if a row is invalid."""

    def wrong(column: Sequence[Any], value: Any, reason: str) -> SinkError:
        return SinkError(f"{_row(task, rows.first + column.index(value))}: {reason}")

    for topic in set(rows.topics or ()):
        if topic is None and not options.topic:
            reason = "the column topic is null, and the option topic is not set"
            raise wrong(rows.topics or (), None, reason)
        if topic is not None and not is_valid_name(topic):
            raise wrong(rows.topics or (), topic, f"the column topic: {topic!r} is not a valid topic name")
    for delay_ms in set(rows.delays_ms or ()):
        if delay_ms is not None and delay_ms < 0:
            raise wrong(rows.delays_ms or (), delay_ms, f"the column defer_ms is {delay_ms}, less than 0")
    if all(rows.bodies):
        return rows
    if options.skips_empty:
        return rows.take([index for index, body in enumerate(rows.bodies) if body])
    body = next(body for body in rows.bodies if not body)
    is_what = "null" if body is None else "empty"
    reason = (
        f"the column body is {is_what}, which a message cannot be: filter such rows, or set emptyBodies=skip"
    )
    raise wrong(rows.bodies, body, reason)


def _row(task: SinkTask, number: int) -> str:
    return f"row {number} of partition {task.partition} (both from 0)"


class _Producers(ExitStack):
    """The producers of a task, one for each topic; closed at the end."""

    def __init__(self, options: SinkOptions, task: SinkTask, numbers: BatchNumbers) -> None:
        super().__init__()
        # Chosen by partition, so that another attempt uses the same broker.
        self.address = options.addresses[task.partition % len(options.addresses)]
        self._options = options
        self._name = task.producer
        self._numbers = numbers
        self._producers: dict[str, IdempotentProducer] = {}
        self._checks: dict[str, RetryCheck] = {}
        self._open: dict[str, None] = {}  # topics, the most recently used last

    def publish(self, batch: Batch) -> PublishOutcome:
        """Publish a batch. Raises the errors of the function `publish`, and RequestRefused."""
        producer = self._producer(batch.topic)
        check = self._checks[batch.topic]
        check.check(batch.number)
        if batch.delay_ms and not producer.remembers:
            self._publish_one_by_one(batch)
            return PublishOutcome.UNKNOWN
        delay_s = min(
            batch.delay_ms / SECOND_MS, MAX_SECONDS
        )  # the broker refuses long delays with its own limit
        outcome = producer.publish(batch.bodies, batch.number, defer_s=delay_s)
        if outcome is PublishOutcome.REPEATED and (check.last is None or batch.number > check.last):
            # Another attempt runs at the same time: it must have published the same rows.
            self._checks[batch.topic] = check = RetryCheck(producer.last_number(), self._numbers)
            check.check(batch.number)
        return outcome

    def check_complete(self) -> None:
        """Check that no earlier attempt published more. Raises RowsDiffer."""
        for check in self._checks.values():
            check.check_complete()

    def _producer(self, topic: str) -> IdempotentProducer:
        if topic not in self._producers:
            options = self._options
            producer = options.access.producer(
                self.address, topic, self._name, options.patience_s, _MAX_RESENDS
            )
            self._producers[topic] = self.enter_context(producer)
            self._checks[topic] = RetryCheck(producer.last_number(), self._numbers)
        self._open.pop(topic, None)
        self._open[topic] = None
        if len(self._open) > self._options.max_connections:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._producers[oldest].close()
        return self._producers[topic]

    def _publish_one_by_one(self, batch: Batch) -> None:
        """Publish deferred messages to an nsqd, whose /mpub ignores the delay."""
        access = self._options.access
        http = BrokerHTTP(self.address, access.tls, access.secret, keep_alive_s=KEEP_ALIVE_S)
        with closing(http):
            for body in batch.bodies:
                http.ask(publish_one(batch.topic, batch.delay_ms, body=body))


def _explain(error: RequestRefused, batch: Batch, rows: RowBlock, task: SinkTask) -> SinkError:
    """Add the row and what to do to the refusal of a broker."""
    largest = max(batch.bodies, key=len)
    where = _row(task, rows.first + list(rows.bodies).index(largest))
    advice = {
        "BAD_MESSAGE": f"a body of {len(largest):,} bytes, {where}, is larger than its --max-msg-size",
        "MSG_TOO_BIG": f"a body of {len(largest):,} bytes, {where}, is larger than its --max-msg-size",
        "BODY_TOO_BIG": "a batch is larger than its --max-body-size: make the option batchBytes smaller",
        "BAD_BODY": "a batch has more messages than fit its --max-body-size: make the option batchBytes smaller",
        "INVALID_DEFER": f"defer_ms is {batch.delay_ms}, more than its --max-defer (nsqd: --max-req-timeout)",
    }.get(error.text)
    if error.is_about_secret:
        advice = "the options authSecretFile and authSecret give a secret"
    if advice is None and error.status == http.client.SERVICE_UNAVAILABLE:
        advice = "repeat the write once the topic or the disk has space again"
    return SinkError(f"{error}: {advice}" if advice else str(error))
