"""What a consumer hands out to programs without async code."""

from collections.abc import Iterator
from functools import partial

from ..client.consuming import message as client
from .portal import Portal, mirrors


class Message(client.Message):
    """One message. Answer it with `finish` or `requeue`, once; until then `touch` gives it more time.

    It is a `trio_nsq.Message` whose answers may be given in any thread. They are queued for the connection's next
    write, without waiting for that. Once the connection is lost, or the consumer closed, they have no effect: the
    broker delivers the message again.
    """

    __slots__ = ("_portal",)

    def __init__(self, message: client.Message, portal: Portal) -> None:
        super().__init__(message._batch, message._index)
        self._portal = portal

    @mirrors(client.Message.finish)
    def finish(self) -> None:
        self._portal.run_sync(super().finish)

    @mirrors(client.Message.requeue)
    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._portal.run_sync(partial(super().requeue, delay_ms, backoff=backoff))

    @mirrors(client.Message.touch)
    def touch(self) -> None:
        self._portal.run_sync(super().touch)


class MessageBatch:
    """Messages that arrived together: four lists of equal length, oldest first.

    It is a `trio_nsq.MessageBatch` whose answers may be given in any thread; answering all of it at once costs no more
    than answering one message.

    Attributes:
        bodies: The messages.
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, this time included; 1 is the first.
        nsqd_address: The broker they came from, `host:port`; several, separated by commas, if it was combined.
    """

    __slots__ = ("_batch", "_portal", "attempts", "bodies", "ids", "nsqd_address", "timestamps_ns")

    def __init__(self, batch: client.MessageBatch, portal: Portal) -> None:
        self.bodies = batch.bodies
        self.ids = batch.ids
        self.timestamps_ns = batch.timestamps_ns
        self.attempts = batch.attempts
        self.nsqd_address = batch.nsqd_address
        self._batch = batch
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._batch)

    def __len__(self) -> int:
        return len(self.ids)

    @mirrors(client.MessageBatch.__iter__)
    def __iter__(self) -> Iterator[Message]:
        return (Message(message, self._portal) for message in self._batch)

    @mirrors(client.MessageBatch.finish)
    def finish(self) -> None:
        self._portal.run_sync(self._batch.finish)

    @mirrors(client.MessageBatch.requeue)
    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._portal.run_sync(partial(self._batch.requeue, delay_ms, backoff=backoff))

    @mirrors(client.MessageBatch.touch)
    def touch(self) -> None:
        self._portal.run_sync(self._batch.touch)

    @mirrors(client.MessageBatch.unanswered_ids)
    def unanswered_ids(self) -> list[bytes]:
        return self._portal.run_sync(self._batch.unanswered_ids)

    @property
    @mirrors(client.MessageBatch.unanswered_count)
    def unanswered_count(self) -> int:
        return self._batch.unanswered_count
