"""One subscribed client, as its channel sees it."""

from bisect import bisect_left
from collections.abc import Callable, Container
from itertools import islice
from operator import attrgetter

from .aside import Aside
from .batch import Batch
from .note import Reason

LOOKED_AT = 1000
"""Messages at the head of a queue among which the oldest is looked for, so that it has a bounded cost."""
_NS_PER_MS = 1_000_000


class Delivery:
    """What one send put in flight: one object for hundreds of messages.

    Attributes:
        deadline_ns: When the messages still unanswered go back to the channel.
        delivered_ns: When they were sent.
        attempts: How often they have been delivered, this time included.
        held: The batch they are in, if nothing but memory has it; None if it can be read again.
        timestamp_ns: When all of them were published, or 0 where nobody wants to know.
    """

    __slots__ = (
        "_first_sequence",
        "_ids",
        "attempts",
        "deadline_ns",
        "delivered_ns",
        "held",
        "timestamp_ns",
    )

    def __init__(
        self,
        ids: list[bytes],
        first_sequence: int,
        attempts: int,
        delivered_ns: int,
        deadline_ns: int,
        held: Batch | None = None,
        timestamp_ns: int = 0,
    ) -> None:
        self._ids = ids
        self._first_sequence = first_sequence
        self.attempts = attempts
        self.delivered_ns = delivered_ns
        self.deadline_ns = deadline_ns
        self.held = held
        self.timestamp_ns = timestamp_ns

    def sequence_of(self, message_id: bytes) -> int:
        """The sequence of one of these messages: the ids ascend, and their sequences follow each other."""
        return self._first_sequence + bisect_left(self._ids, message_id)

    def touched(self, message_id: bytes, deadline_ns: int) -> "Delivery":
        """A delivery of this one message alone, with another deadline."""
        return Delivery(
            [message_id],
            self.sequence_of(message_id),
            self.attempts,
            self.delivered_ns,
            deadline_ns,
            self.held,
            self.timestamp_ns,
        )

    def returned(self, message_id: bytes, reason: Reason) -> Aside:
        """One of these messages, on its way back to the channel."""
        return Aside(self.sequence_of(message_id), self.attempts, reason, self.held)

    def first_in(self, in_flight: Container[bytes]) -> int:
        """The sequence of the first of these messages that is still in flight; one of them has to be."""
        sequences = enumerate(self._ids, self._first_sequence)
        return next(sequence for sequence, message_id in sequences if message_id in in_flight)


_FIRST_SEQUENCE = attrgetter("_first_sequence")


class Consumer:
    """The channel's side of a subscription.

    Args:
        msg_timeout_ms: How long a message may be in flight here.
        close: Called when the channel is deleted: ends the connection.
        sample: Decides for one message whether it is sent; if not, the channel forgets it. None: all are sent.

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
        "sample",
    )

    def __init__(
        self, msg_timeout_ms: int, close: Callable[[], None], sample: Callable[[], bool] | None = None
    ) -> None:
        self.msg_timeout_ns = msg_timeout_ms * _NS_PER_MS
        self.sample = sample
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

    @property
    def oldest_in_flight(self) -> int | None:
        """The lowest sequence of the first thousand in `in_flight`; None if there is none."""
        head = set(islice(self.in_flight.values(), LOOKED_AT))
        # A delivery has no gaps: what is in flight before the first of this one's began before it did.
        begins_first = min(head, key=_FIRST_SEQUENCE, default=None)
        return begins_first.first_in(self.in_flight) if begins_first is not None else None

    def due(self, now_ns: int, at_most: int) -> list[bytes]:
        """The ids at the head of `in_flight` whose deadline has come."""
        ids: list[bytes] = []
        for message_id, delivery in self.in_flight.items():
            if delivery.deadline_ns > now_ns or len(ids) >= at_most:
                break
            ids.append(message_id)
        return ids
