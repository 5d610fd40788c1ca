"""Limits the rate of messages."""

import trio


class RateLimiter:
    """Limits messages to an even rate.

    Args:
        rate: Messages per second.
        now: The current time of trio's clock.
    """

    SLICE_S = 0.05
    """The messages of this time may be sent together."""

    MAX_CREDIT_S = 0.1
    """The maximum time without messages that later messages may make up for."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._due = now
        self.max_messages = max(1, int(rate * self.SLICE_S))

    async def wait(self) -> None:
        """Wait until messages may be sent."""
        await trio.sleep_until(self._due)

    def take(self, count: int) -> None:
        """Record that `count` messages, at most `max_messages`, are sent."""
        self._due = max(self._due, trio.current_time() - self.MAX_CREDIT_S) + count / self._rate
