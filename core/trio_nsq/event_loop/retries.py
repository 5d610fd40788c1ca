"""Exponential back-off: the delays between attempts at what fails, and blocking retries for callers without trio."""

import math
import random as random_module
import time
from collections.abc import Callable

from ..text.arguments import check_seconds

MIN_DELAY_S = 0.1
MAX_DELAY_S = 15.0
"""pynsq's fixed interval; the Go client's is a minute. Doubling reaches it after eight attempts."""

PATIENCE_S = 30.0
FIRST_DELAY_S, MAX_RETRY_DELAY_S = 0.1, 2.0


def doubled_s(first_s: float, times: int, longest_s: float) -> float:
    """Return a delay that was doubled so many times."""
    return min(longest_s, math.ldexp(first_s, min(times, 62)))


class Delays:
    """The delays between attempts: each is twice the one before.

    Args:
        min_s: The first delay, before jitter.
        max_s: The longest delay.
        random: Returns numbers in [0, 1). Each delay is shortened by up to half at random, so that the clients of a
            restarted broker do not all reconnect at the same time. None: without jitter.
    """

    def __init__(self, min_s: float, max_s: float, random: Callable[[], float] | None = None) -> None:
        if not 0 < min_s <= max_s:
            raise ValueError(f"delays of {min_s} s to {max_s} s; they must be above 0 and in order")
        self._min_s = min_s
        self._max_s = max_s
        self._random = random
        self._attempts = 0

    def next_s(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        delay_s = doubled_s(self._min_s, self._attempts, self._max_s)
        self._attempts += 1
        return delay_s if self._random is None else delay_s * (1 - self._random() / 2)

    def connection_lasted(self, seconds: float) -> None:
        """Reset the delay if the last connection lasted longer than the longest delay.

        Otherwise a broker that accepts and then drops every connection would get attempts at the highest rate.
        """
        if seconds >= self._max_s:
            self.reset()

    def reset(self) -> None:
        """Restart with the first delay."""
        self._attempts = 0


class Retry:
    """Sleeps between attempts, until the broker has not answered for too long.

    Args:
        patience_s: Stop retrying when the broker has not answered for this time.
        first_delay_s: The first delay; later ones double, up to 2 s.
    """

    def __init__(self, patience_s: float, first_delay_s: float = FIRST_DELAY_S) -> None:
        self._patience_s = patience_s
        self._delays = Delays(first_delay_s, MAX_RETRY_DELAY_S, random_module.random)
        self.reset()

    def reset(self) -> None:
        """Restart with the first delay and the full patience: the broker has answered."""
        self._delays.reset()
        self._give_up_at_s = time.monotonic() + self._patience_s

    def pause(self) -> bool:
        """Sleep before the next attempt; return False at once if the patience is exhausted."""
        delay_s = self._delays.next_s()
        if time.monotonic() + delay_s > self._give_up_at_s:
            return False
        time.sleep(delay_s)
        return True


def reconnect_delays(min_s: float, max_s: float, random: Callable[[], float]) -> Delays:
    """Return the delays of these options. Raises TypeError or ValueError."""
    check_seconds("reconnect_min_s", min_s, positive=True)
    check_seconds("reconnect_max_s", max_s, positive=True)
    if min_s > max_s:
        raise ValueError(f"reconnect_min_s is {min_s}, more than reconnect_max_s, {max_s}")
    return Delays(min_s, max_s, random)
