"""Messages without a connection."""

from collections.abc import Sequence

from trio_nsq.client.consuming.message import MessageBatch
from trio_nsq.protocol.frames import MessageRun


class StubSubscription:
    """A substitute for a connection.

    Attributes:
        held: The batches that have unanswered messages.
        touched: The ids of all touches, in order.
    """

    address = "stub:1"
    msg_timeout_s = 60.0
    max_msg_timeout_s = 900.0
    last_message_at = 0.0
    live = True

    def __init__(self) -> None:
        self.held: list[MessageBatch] = []
        self.touched: list[bytes] = []

    def hold(self, batch: MessageBatch) -> None:
        self.held.append(batch)

    def release(self, batch: MessageBatch) -> None:
        self.held.remove(batch)

    def finish(self, ids: Sequence[bytes]) -> None:
        pass

    def finish_one(self, message_id: bytes) -> None:
        pass

    def requeue(self, *_: object) -> None:
        pass

    def touch(self, ids: Sequence[bytes]) -> None:
        self.touched += ids


def batch(bodies: str, source: StubSubscription | None = None) -> MessageBatch:
    """Return a batch of messages whose bodies are these characters."""
    data = [body.encode() for body in bodies]
    run = MessageRun([body * 16 for body in data], data, [0] * len(data), [1] * len(data))
    return MessageBatch(run, source or StubSubscription())
