"""One subscribed client, as its channel sees it."""

from collections.abc import Callable
from typing import Protocol

from .in_flight import InFlight

_NS_PER_MS = 1_000_000


class Subscriber(Protocol):
    """The connection of a consumer."""

    def deliver(self, frames: bytes | memoryview) -> None:
        """Take message frames; `send_delivered` follows."""

    def send_delivered(self) -> None:
        """Send what `deliver` took."""

    def close(self) -> None:
        """The channel is deleted: end the connection soon."""


class Consumer:
    """The channel's side of a subscription.

    Args:
        msg_timeout_ms: How long a message may be in flight here.
        subscriber: Gets the messages.
        sample: Decides for one message whether it is sent; if not, the channel forgets it. None: all are sent.
        buffer_bytes: Messages for it may wait for more of them while their frames have fewer bytes than this.
        buffer_ms: For how long they may, see `Channel.can_wait`; 0: not at all.

    Attributes:
        ready_count: RDY: be sent messages while fewer than this are in flight.
        blocked: The connection cannot take more for now: its socket is full, or gone.
        in_flight: What was sent and is not answered yet.
        message_count, finish_count, requeue_count: Sent, finished and requeued here.
        requeued_turn: If there is a choice, the next messages are requeued ones, not fresh ones.
    """

    def __init__(
        self,
        msg_timeout_ms: int,
        subscriber: Subscriber,
        sample: Callable[[], bool] | None = None,
        buffer_bytes: int = 0,
        buffer_ms: int = 0,
    ) -> None:
        self.buffer_bytes = buffer_bytes
        self.buffer_ns = buffer_ms * _NS_PER_MS
        self.msg_timeout_ns = msg_timeout_ms * _NS_PER_MS
        self.sample = sample
        self.subscriber = subscriber
        self.ready_count = 0
        self.blocked = False
        self.in_flight = InFlight()
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.requeued_turn = True

    @property
    def window(self) -> int:
        """How many messages it may be sent now; not more than 0 means none."""
        return 0 if self.blocked else self.ready_count - self.in_flight.count
