"""Limits how many messages pass per second."""

import trio


class RateLimiter:
    """Lets messages pass at an even rate.

    Args:
        rate: Messages per second.
        now: The current time, by trio's clock.
    """

    SLICE_S = 0.05
    """Messages of this much time may pass together."""

    MAX_CREDIT_S = 0.1
    """How much a stretch without messages may be made up for afterwards."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._due = now
        self.max_messages = max(1, int(rate * self.SLICE_S))

    def is_due(self) -> bool:
        """Whether messages, at most `max_messages`, may pass now."""
        return trio.current_time() >= self._due

    async def wait(self) -> None:
        """Wait until they may."""
        await trio.sleep_until(self._due)

    def take(self, count: int) -> None:
        """Let `count` messages, at most `max_messages`, pass."""
        self._due = max(self._due, trio.current_time() - self.MAX_CREDIT_S) + count / self._rate
