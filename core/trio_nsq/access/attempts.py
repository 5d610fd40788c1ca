"""Slows down failed logins, by the client's address."""

from collections import OrderedDict

MAX_ADDRESSES = 10_000
FORGET_S = 60.0
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0


class FailedAttempts:
    """Counts failed logins by address.

    Each failure within a minute doubles the time before the next one is answered. A valid login is never delayed, so
    an attacker cannot lock out others behind the same address.

    Attributes:
        total: Failed logins since the start.
    """

    def __init__(self) -> None:
        self.total = 0
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()  # least recent first

    def record_failure(self, host: str, now_s: float) -> float:
        """Record a failed login at a time of any clock. Returns how long to delay its answer, in seconds."""
        self.total += 1
        count, last_s = self._failures.pop(host, (0, now_s))
        count = 1 if now_s - last_s > FORGET_S else min(count + 1, 32)
        self._failures[host] = count, now_s
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)
        return min(FIRST_DELAY_S * 2.0 ** (count - 1), MAX_DELAY_S)
