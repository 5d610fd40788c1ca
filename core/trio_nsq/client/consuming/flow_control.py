"""Flow control of a consumer: how many messages may be in flight, and over which of its connections."""

import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import trio

from .backoff import Backoff
from .options import ConsumerSettings
from .rdy_distribution import ReadyDistribution

_logger = logging.getLogger("trio_nsq.client")


class FlowControlled(Protocol):
    """A connection whose ready count is set here.

    Attributes:
        max_rdy_count: The highest ready count that the broker allows.
        ready_count: The one that was set last.
        last_message_at: When the last messages came, on trio's clock.
    """

    max_rdy_count: int
    ready_count: int
    last_message_at: float

    @property
    def in_flight(self) -> int:
        """How many messages are not answered."""
        ...

    def set_ready_count(self, count: int) -> None:
        """Send RDY, if the count is another one than before."""

    def __hash__(self) -> int: ...


_Connection = TypeVar("_Connection", bound=FlowControlled)


class FlowControl(Generic[_Connection]):
    """Sets the ready count of every connection, by max_in_flight, backoff, and the turns of the connections.

    Args:
        max_in_flight: Over all connections.
        settings: For distribution and backoff.
        random: Gives numbers in [0, 1).
    """

    def __init__(self, max_in_flight: int, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self._max_in_flight = max_in_flight
        self._paused = self._stopped = False
        self._distribution: ReadyDistribution[_Connection] = ReadyDistribution(
            low_rdy_idle_timeout_s=settings.low_rdy_idle_timeout_s,
            low_rdy_timeout_s=settings.low_rdy_timeout_s,
            rdy_redistribute_interval_s=settings.rdy_redistribute_interval_s,
            random=random,
        )
        self._backoff = Backoff(
            max_backoff_duration_s=settings.max_backoff_duration_s,
            backoff_multiplier_s=settings.backoff_multiplier_s,
            backoff_strategy=settings.backoff_strategy,
            random=random,
        )
        self._changed = trio.Event()

    @property
    def connections(self) -> list[_Connection]:
        """The connections, oldest first."""
        return list(self._distribution.ready_counts)

    @property
    def max_in_flight(self) -> int:
        """As given, or changed."""
        return self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._max_in_flight = count
        self._update()

    @property
    def paused(self) -> bool:
        """Whether nothing may come."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._update()

    def stop(self) -> None:
        """Leave the ready counts as they are from here on."""
        self._stopped = True

    def add(self, connection: _Connection) -> None:
        """A connection is subscribed."""
        self._distribution.add(connection, connection.max_rdy_count, trio.current_time())
        self._update()

    def remove(self, connection: _Connection) -> None:
        """A connection is over."""
        self._distribution.remove(connection, trio.current_time())
        self._update()

    def record_messages(self, connection: _Connection) -> None:
        """Messages came."""
        self._distribution.record_messages(connection, connection.last_message_at)

    def record_success(self) -> None:
        """Messages were finished."""
        if self._backoff.level:
            self._backoff.record_success(trio.current_time())
            self._update()

    def record_failure(self) -> None:
        """Messages were requeued because they failed."""
        now = trio.current_time()
        before = self._backoff.next_deadline()
        self._backoff.record_failure(now)
        if (until := self._backoff.next_deadline()) != before:
            _logger.warning(
                "messages fail: taking none for %.1f s (backoff level %d)", until - now, self._backoff.level
            )
        self._update()

    def record_requeue(self) -> None:
        """Messages were requeued for another reason."""
        if self._backoff.level:
            self._backoff.record_requeue(trio.current_time())
            self._update()

    @property
    def is_starved(self) -> bool:
        """Whether some broker waits, or soon will, for answers before it sends more."""
        return any(
            (in_flight := each.in_flight) and in_flight >= int(0.85 * each.ready_count)
            for each in self.connections
        )

    @property
    def is_blocked(self) -> bool:
        """Whether some broker waits for answers before it sends more."""
        return any(
            (in_flight := each.in_flight) and in_flight >= each.ready_count for each in self.connections
        )

    async def run(self) -> None:
        """Do what is due in time; never ends."""
        while True:
            self._changed = trio.Event()
            deadline = min(self._backoff.next_deadline(), self._distribution.next_deadline())
            with trio.move_on_at(deadline):
                await self._changed.wait()
            now = trio.current_time()
            self._backoff.handle_timer(now)
            if now >= self._distribution.next_deadline():
                self._distribution.redistribute(now, {each for each in self.connections if each.in_flight})
            self._apply(now)

    def _update(self) -> None:
        if self.connections:  # if there are none, this may be outside of trio, where there is no clock
            self._apply(trio.current_time())
        self._changed.set()

    def _apply(self, now: float) -> None:
        allowed = self._backoff.allowed
        limit = self._max_in_flight if allowed is None else min(allowed, self._max_in_flight)
        self._distribution.set_limit(0 if self._paused else limit, now)
        if not self._stopped:
            for connection, count in self._distribution.ready_counts.items():
                connection.set_ready_count(count)
