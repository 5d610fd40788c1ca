"""Batches of messages from a source, and positions in a log."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar, overload

from ...client.consuming.message import MessageBatch
from ...log.record_metadata import has_headers
from ...log.records import RecordBatch
from ...protocol.headers import Headers

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading of one topic's log on one broker continues.

    Attributes:
        sequence: The next sequence to read.
        last_id: The id, 16 hex digits, of message `sequence - 1`; it tells whether the log is still the same. None:
            unknown.
    """

    sequence: int
    last_id: str | None


@dataclass(slots=True)
class SourceBatch:
    """Messages that arrived together. All sequences have the same length, which may be 0: then only `position` moves.

    Attributes:
        topic: The topic.
        broker: The broker: the HTTP address of a log, the TCP address of a channel.
        bodies: The message bodies.
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, including this time; 0 from a log.
        sequences: The sequences in the log; None from a channel.
        dues_ns: Until when each was deferred when it was published, Unix nanoseconds; 0: not deferred. None from a
            channel.
        position: Where reading continues after this batch; None from a channel.
        delivery: The messages in flight; None from a log.
        log: As `Source.log`; empty: `broker`.
        headers: The headers of each message; empty: none has headers.
    """

    topic: str
    broker: str
    bodies: Sequence[bytes]
    ids: Sequence[bytes]
    timestamps_ns: Sequence[int]
    attempts: Sequence[int]
    sequences: Sequence[int] | None = None
    dues_ns: Sequence[int] | None = None
    position: Position | None = None
    delivery: MessageBatch | None = None
    log: str = ""
    headers: Sequence[Headers] = ()

    @property
    def log_key(self) -> str:
        """The key under which `position` is kept."""
        return self.log or self.broker

    def finish(self) -> None:
        """Finish (FIN) the messages of a channel; for a log, see `Source.commit`."""
        if self.delivery is not None:
            self.delivery.finish()

    def requeue(self, delay_s: float | None = None) -> None:
        """Requeue (REQ) the messages of a channel; arguments and errors as for `MessageBatch.requeue`.

        Raises:
            RuntimeError: The batch is from a log.
        """
        if self.delivery is None:
            raise RuntimeError("messages of a log cannot be requeued")
        self.delivery.requeue(delay_s=delay_s)


class Source(Protocol):
    """Messages of one topic, from the log of one broker or from a channel.

    Attributes:
        topic: The topic.
        broker: The broker, as in `SourceBatch`; empty for a channel that is consumed from all brokers.
        is_log: Whether it is a log, which can be read exactly once.
        log: The key under which positions in the log are kept, see `FoundLog.key`; empty for a channel.
    """

    topic: str
    broker: str
    is_log: bool
    log: str

    async def receive(self) -> SourceBatch:
        """Return the next batch; waits for messages, and reconnects. Cancelling loses nothing.

        Let errors pass: `run_sources` opens the source again.
        """
        ...

    def commit(self, position: Position) -> None:
        """Tell that everything before this position is stored durably. The channel of a log soon moves there.

        Does nothing for a channel: finish its batches.
        """
        ...

    def is_starved(self) -> bool:
        """Whether nothing more arrives before some messages are finished; never of a log."""
        ...

    def next_sequence(self) -> int | None:
        """Return the sequence of the next message of a log; None: it is a channel."""
        ...

    def lag(self) -> int | None:
        """Return the number of messages that are not received yet, as of a few seconds ago; None: unknown."""
        ...


def from_delivery(topic: str, delivery: MessageBatch) -> SourceBatch:
    headers = delivery.headers
    return SourceBatch(
        topic,
        delivery.nsqd_address,
        delivery.bodies,
        delivery.ids,
        delivery.timestamps_ns,
        delivery.attempts,
        delivery=delivery,
        headers=headers if any(headers) else (),
    )


def from_records(
    topic: str, broker: str, log: str, records: Sequence[RecordBatch], position: Position
) -> SourceBatch:
    """Return records of a log as a batch. Only the bodies are copied here, the rest when it is used."""
    count = sum(record.count for record in records)

    def of_each(value: Callable[[RecordBatch], Sequence[_T]]) -> "_Computed[_T]":
        return _Computed(count, lambda: list(chain.from_iterable(map(value, records))))

    return SourceBatch(
        topic,
        broker,
        list(chain.from_iterable(record.messages.bodies() for record in records)),
        of_each(RecordBatch.ids),
        of_each(lambda record: [record.timestamp_ns] * record.count),
        _Computed(count, lambda: [0] * count),
        of_each(lambda record: range(record.base_sequence, record.next_sequence)),
        of_each(lambda record: [record.due_ns] * record.count),
        position,
        log=log,
        headers=of_each(RecordBatch.headers) if any(has_headers(each.metadata) for each in records) else (),
    )


class _Computed(Sequence[_T]):
    """A list that is computed at its first use: most connectors need the bodies only."""

    def __init__(self, count: int, compute: Callable[[], list[_T]]) -> None:
        self._count = count
        self._compute = compute
        self._items: list[_T] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...

    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        if self._items is None:
            self._items = self._compute()
        return self._items[index]
