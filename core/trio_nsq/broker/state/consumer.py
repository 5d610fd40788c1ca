"""A channel's view of a subscribed client."""

from collections.abc import Callable
from typing import Final, Protocol

from .in_flight import InFlight

_NS_PER_MS: Final = 1_000_000


ZONE, REGION, ELSEWHERE = range(3)
"""How near a consumer is: in the broker's zone, in another zone of its region, or anywhere else."""


class Subscriber(Protocol):
    """The connection of a consumer."""

    def deliver(self, frames: bytes | memoryview) -> None:
        """Take message frames; `send_delivered` follows."""

    def send_delivered(self) -> None:
        """Send the frames passed to `deliver`."""

    def close(self) -> None:
        """Close the connection soon: the channel is deleted, or an operator disconnects its consumers."""


class Consumer:
    """The channel's side of a subscription.

    Args:
        msg_timeout_ms: How long a message may be in flight here.
        subscriber: Receives the messages.
        sample: Decides for each message whether to send it; if not, the channel drops it. None: all are sent.
        buffer_bytes: Output buffer size: messages may wait for more while their frames have fewer bytes than this.
        buffer_ms: Output buffer timeout: the maximum wait, see `Dispatcher.can_wait`; 0: no wait.
        wants_headers: It gets the headers of messages, in frames that only clients know which asked for them.
        nearness: `ZONE`, `REGION` or `ELSEWHERE`: messages go to the nearest consumers that are ready.

    Attributes:
        ready_count: RDY: the maximum number of messages in flight.
        closing: The client has sent CLS: a message that it returns at once was not handled.
        blocked: The connection cannot take more messages, because its socket is full or closed.
        in_flight: Messages that were sent and are not answered.
        message_count, finish_count, requeue_count: Messages sent to, finished and requeued by this consumer.
        requeued_turn: If the channel has both, send requeued messages next, not fresh ones.
    """

    def __init__(
        self,
        msg_timeout_ms: int,
        subscriber: Subscriber,
        sample: Callable[[], bool] | None = None,
        buffer_bytes: int = 0,
        buffer_ms: int = 0,
        *,
        wants_headers: bool = False,
        nearness: int = ELSEWHERE,
    ) -> None:
        self.buffer_bytes = buffer_bytes
        self.buffer_ns: int = buffer_ms * _NS_PER_MS
        self.msg_timeout_ns: int = msg_timeout_ms * _NS_PER_MS
        self.sample = sample
        self.wants_headers = wants_headers
        self.nearness = nearness
        self.subscriber = subscriber
        self.ready_count = 0
        self.closing = False
        self.blocked = False
        self.in_flight: InFlight = InFlight()
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.requeued_turn = True

    @property
    def window(self) -> int:
        """How many messages may be sent now; 0 or less: none."""
        return 0 if self.blocked else self.ready_count - self.in_flight.count
