"""One subscribed client, as its channel sees it."""

from bisect import bisect_left
from collections.abc import Callable

from .batch import Batch

_NS_PER_MS = 1_000_000


class Delivery:
    """What one send put in flight: one object for hundreds of messages.

    Attributes:
        deadline_ns: When the messages still unanswered go back to the channel.
        delivered_ns: When they were sent.
        attempts: How often they have been delivered, this time included.
        held: The batch they are in, if nothing but memory has it; None if it can be read again.
    """

    __slots__ = ("_first_sequence", "_ids", "attempts", "deadline_ns", "delivered_ns", "held")

    def __init__(
        self,
        ids: list[bytes],
        first_sequence: int,
        attempts: int,
        delivered_ns: int,
        deadline_ns: int,
        held: Batch | None = None,
    ) -> None:
        self._ids = ids
        self._first_sequence = first_sequence
        self.attempts = attempts
        self.delivered_ns = delivered_ns
        self.deadline_ns = deadline_ns
        self.held = held

    def sequence_of(self, message_id: bytes) -> int:
        """The sequence of one of these messages: the ids ascend, and their sequences follow each other."""
        return self._first_sequence + bisect_left(self._ids, message_id)

    def touched(self, message_id: bytes, deadline_ns: int) -> "Delivery":
        """A delivery of this one message alone, with another deadline."""
        sequence = self.sequence_of(message_id)
        return Delivery([message_id], sequence, self.attempts, self.delivered_ns, deadline_ns, self.held)


class Consumer:
    """The channel's side of a subscription.

    Args:
        msg_timeout_ms: How long a message may be in flight here.
        close: Called when the channel is deleted: ends the connection.

    Attributes:
        ready_count: RDY: be sent messages while fewer than this are in flight.
        blocked: The connection cannot take more for now: its socket is full, or gone.
        in_flight: Deliveries by message id, in the order of their deadlines (ids that were touched move to the end).
        message_count, finish_count, requeue_count: Sent, finished and requeued here.
        requeued_turn: If there is a choice, the next messages are requeued ones, not fresh ones.
    """

    __slots__ = (
        "blocked",
        "close",
        "finish_count",
        "in_flight",
        "message_count",
        "msg_timeout_ns",
        "ready_count",
        "requeue_count",
        "requeued_turn",
    )

    def __init__(self, msg_timeout_ms: int, close: Callable[[], None]) -> None:
        self.msg_timeout_ns = msg_timeout_ms * _NS_PER_MS
        self.close = close
        self.ready_count = 0
        self.blocked = False
        self.in_flight: dict[bytes, Delivery] = {}
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.requeued_turn = True

    @property
    def window(self) -> int:
        """How many messages it may be sent now; not more than 0 means none."""
        return 0 if self.blocked else self.ready_count - len(self.in_flight)

    @property
    def next_deadline_ns(self) -> int | None:
        """When the head of `in_flight` times out; None if nothing is in flight."""
        for delivery in self.in_flight.values():
            return delivery.deadline_ns
        return None

    def due(self, now_ns: int) -> list[bytes]:
        """The ids at the head of `in_flight` whose deadline has come."""
        ids: list[bytes] = []
        for message_id, delivery in self.in_flight.items():
            if delivery.deadline_ns > now_ns:
                break
            ids.append(message_id)
        return ids
