"""How many messages may come to a consumer, and over which of its connections."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from .backoff import Backoff
from .options import ConsumerSettings
from .rdy_distribution import Distribution

if TYPE_CHECKING:
    from .subscription import Feed

_logger = logging.getLogger("trio_nsq.client")


class Flow:
    """Gives every connection its ready count, by what is allowed, what failed, and whose turn it is.

    Args:
        max_in_flight: Over all connections.
        settings: For distribution and backoff.
        random: Gives numbers in [0, 1).
    """

    def __init__(self, max_in_flight: int, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self._max_in_flight = max_in_flight
        self._paused = self._stopped = False
        self._distribution: Distribution[Feed] = Distribution(
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
    def feeds(self) -> list["Feed"]:
        """The connections, the one that was added first first."""
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
        """Change no ready count any more."""
        self._stopped = True

    def add(self, feed: "Feed") -> None:
        """A connection is subscribed."""
        self._distribution.add(feed, feed.max_rdy_count, trio.current_time())
        self._update()

    def remove(self, feed: "Feed") -> None:
        """A connection is over."""
        self._distribution.remove(feed, trio.current_time())
        self._update()

    def received(self, feed: "Feed") -> None:
        """Messages came."""
        self._distribution.heard(feed, feed.heard_at)

    def succeeded(self) -> None:
        """Messages were finished."""
        if self._backoff.level:
            self._backoff.succeeded(trio.current_time())
            self._update()

    def failed(self) -> None:
        """Messages were put back as they had failed."""
        now = trio.current_time()
        before = self._backoff.next_deadline()
        self._backoff.failed(now)
        if (until := self._backoff.next_deadline()) != before:
            _logger.warning(
                "messages fail: taking none for %.1f s (backoff level %d)", until - now, self._backoff.level
            )
        self._update()

    def undecided(self) -> None:
        """Messages were put back for another reason."""
        if self._backoff.level:
            self._backoff.undecided(trio.current_time())
            self._update()

    @property
    def is_starved(self) -> bool:
        """Whether some broker waits, or soon will, for answers before it sends more."""
        return any(
            (in_flight := feed.in_flight) and in_flight >= int(0.85 * feed.ready_count) for feed in self.feeds
        )

    @property
    def is_blocked(self) -> bool:
        """Whether some broker waits for answers before it sends more."""
        return any((in_flight := feed.in_flight) and in_flight >= feed.ready_count for feed in self.feeds)

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
                self._distribution.pass_on(now, {feed for feed in self.feeds if feed.in_flight})
            self._apply(now)

    def _update(self) -> None:
        if self.feeds:  # if there are none, this may be outside of trio, where there is no clock
            self._apply(trio.current_time())
        self._changed.set()

    def _apply(self, now: float) -> None:
        allowed = self._backoff.allowed
        limit = self._max_in_flight if allowed is None else min(allowed, self._max_in_flight)
        self._distribution.set_limit(0 if self._paused else limit, now)
        if not self._stopped:
            for feed, count in self._distribution.ready_counts.items():
                feed.set_ready_count(count)
