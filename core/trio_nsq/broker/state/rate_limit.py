"""The limit on the deliveries of a channel per second: a token bucket, with time as a parameter."""

from typing import Final

_NS_PER_S: Final = 1_000_000_000
_BURSTS_PER_S: Final = 20


class RateLimit:
    """Allows so many deliveries per second.

    Deliveries that were not used are kept for 50 ms: a channel that was idle sends at most these at once. So any second
    has at most 5 % more than the rate, or one more.

    Args:
        per_s: Deliveries per second, at least 1.

    Attributes:
        burst: The most deliveries at once.
    """

    __slots__ = ("_credit", "_full", "_updated_ns", "burst", "per_s")

    def __init__(self, per_s: int) -> None:
        self.per_s: int = per_s
        self.burst: int = max(1, per_s // _BURSTS_PER_S)
        # Of one delivery, the credit is 10^9: it grows by the rate in each nanosecond, so no fraction is lost.
        self._full: int = self.burst * _NS_PER_S
        self._credit: int = self._full
        self._updated_ns = 0

    def available(self, now_ns: int) -> int:
        """Return how many deliveries are allowed now."""
        if now_ns > self._updated_ns:
            self._credit = min(self._full, self._credit + (now_ns - self._updated_ns) * self.per_s)
            self._updated_ns = now_ns
        return self._credit // _NS_PER_S

    def take(self, count: int) -> None:
        """Count deliveries, of those that `available` has allowed."""
        self._credit -= count * _NS_PER_S

    def next_ns(self, wanted: int) -> int:
        """Return when this many deliveries are allowed, or `burst` if that is less, if none is made before.

        Args:
            wanted: At least 1.
        """
        missing = min(wanted, self.burst) * _NS_PER_S - self._credit
        return self._updated_ns + max(0, -(-missing // self.per_s))
