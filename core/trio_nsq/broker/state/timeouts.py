"""Timeouts of the messages that a channel's consumers have in flight."""

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from .consumer import Consumer
from .in_flight_batch import InFlightBatch

TimedOut = list[tuple[int, InFlightBatch]]
"""(sequence, delivery) of each message."""


class Timeouts:
    """The deadlines of one channel.

    Args:
        watch: Called with each deadline that may be the new earliest one.

    Attributes:
        first_ns: A lower bound of the deadlines at the heads of the consumers' deliveries; None if there is none.
    """

    __slots__ = ("_capped", "_capped_count", "_watch", "first_ns")

    def __init__(self, watch: Callable[[int], None]) -> None:
        self.first_ns: int | None = None
        self._watch = watch
        # TOUCH near its cap sets a deadline earlier than those of older deliveries, so such messages are watched
        # singly. A heap of (deadline_ns, tie breaker, consumer, message id).
        self._capped: list[tuple[int, int, Consumer, bytes]] = []
        self._capped_count = 0

    def add_delivery(self, deadline_ns: int) -> None:
        """Add the deadline of a consumer's newest delivery."""
        if self.first_ns is None or deadline_ns < self.first_ns:
            self.first_ns = deadline_ns
            self._watch(deadline_ns)

    def add_capped(self, deadline_ns: int, consumer: Consumer, message_id: bytes) -> None:
        """Add the deadline of one message, which may be earlier than those of older deliveries."""
        self._capped_count += 1
        heappush(self._capped, (deadline_ns, self._capped_count, consumer, message_id))
        self._watch(deadline_ns)

    @property
    def next_ns(self) -> int | None:
        """When to call `take_due` next; None: never."""
        if not self._capped:
            return self.first_ns
        capped_ns = self._capped[0][0]
        return capped_ns if self.first_ns is None else min(self.first_ns, capped_ns)

    def take_due(
        self, consumers: Iterable[Consumer], now_ns: int, at_most: int
    ) -> Iterator[tuple[Consumer, TimedOut]]:
        """Remove due messages from flight, at most `at_most`, grouped by consumer.

        A watched message that was answered meanwhile also counts, and yields an empty list.
        """
        taken = 0
        if self.first_ns is not None and self.first_ns <= now_ns:
            heads: list[int] = []
            for consumer in consumers:
                if due := consumer.in_flight.time_out(now_ns, at_most - taken):
                    taken += len(due)
                    yield consumer, due
                if (head_ns := consumer.in_flight.next_deadline_ns) is not None:
                    heads.append(head_ns)
            self.first_ns = min(heads, default=None)
        while self._capped and self._capped[0][0] <= now_ns and taken < at_most:
            _, _, consumer, message_id = heappop(self._capped)
            taken += 1
            delivery = consumer.in_flight.find(message_id)
            is_due = delivery is not None and delivery.deadline_ns <= now_ns
            found = consumer.in_flight.take(message_id) if is_due else None
            yield consumer, [] if found is None else [found]

    def extend(self, by_ns: int) -> None:
        """Move all deadlines; those of the deliveries are moved separately."""
        if self.first_ns is not None:
            self.first_ns += by_ns
        self._capped = [
            (deadline_ns + by_ns, number, consumer, message_id)
            for deadline_ns, number, consumer, message_id in self._capped
        ]

    def clear(self) -> None:
        self.first_ns = None
        self._capped.clear()
