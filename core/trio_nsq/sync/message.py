"""What a consumer hands out to programs without async code."""

from collections.abc import Iterator

from ..client.consuming import message as client
from .portal import Portal, mirrors


class Message:
    """One message. Answer it with `finish` or `requeue`, once; until then `touch` gives it more time.

    It is a `trio_nsq.Message` whose answers may be given in any thread. They are queued for the connection's next
    write, without waiting for that. Once the connection is lost, or the consumer closed, they have no effect: the
    broker delivers the message again.
    """

    __slots__ = ("_message", "_portal")

    def __init__(self, message: client.Message, portal: Portal) -> None:
        self._message = message
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._message)

    @property
    @mirrors(client.Message.id)
    def id(self) -> bytes:
        return self._message.id

    @property
    @mirrors(client.Message.body)
    def body(self) -> bytes:
        return self._message.body

    @property
    @mirrors(client.Message.timestamp_ns)
    def timestamp_ns(self) -> int:
        return self._message.timestamp_ns

    @property
    @mirrors(client.Message.attempts)
    def attempts(self) -> int:
        return self._message.attempts

    @property
    @mirrors(client.Message.nsqd_address)
    def nsqd_address(self) -> str:
        return self._message.nsqd_address

    @property
    @mirrors(client.Message.timeout_s)
    def timeout_s(self) -> float:
        return self._message.timeout_s

    @property
    @mirrors(client.Message.answered)
    def answered(self) -> bool:
        return self._message.answered

    @mirrors(client.Message.finish)
    def finish(self) -> None:
        self._portal.run_sync(self._message.finish)

    @mirrors(client.Message.requeue)
    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._portal.run_sync(lambda: self._message.requeue(delay_ms, backoff=backoff))

    @mirrors(client.Message.touch)
    def touch(self) -> None:
        self._portal.run_sync(self._message.touch)


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
        self._portal.run_sync(lambda: self._batch.requeue(delay_ms, backoff=backoff))

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
