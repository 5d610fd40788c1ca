"""How long to wait between attempts to reach a broker, and blocking pauses for callers without trio."""

import random as random_module
import time
from collections.abc import Callable

MIN_DELAY_S = 0.1
MAX_DELAY_S = 15.0
"""pynsq's fixed interval; the Go client's is a minute. Doubling gets there after eight attempts."""

PATIENCE_S = 30.0
FIRST_DELAY_S, MAX_RETRY_DELAY_S = 0.1, 2.0


class ReconnectDelays:
    """Exponential delays with jitter.

    Args:
        min_s: The first delay, before jitter.
        max_s: The longest one.
        random: Returns numbers in [0, 1). A delay is cut by up to half at random, so that the clients of a broker
            that comes back do not all arrive in the same instant.
    """

    def __init__(self, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        if not 0 < min_s <= max_s:
            raise ValueError(f"reconnect delays of {min_s} s to {max_s} s; they must be above 0 and in order")
        self._min_s = min_s
        self._max_s = max_s
        self._random = random
        self._next_s = min_s

    def next_s(self) -> float:
        """The delay before the next attempt, in seconds."""
        delay_s = self._next_s
        self._next_s = min(self._max_s, 2 * delay_s)
        return delay_s * (1 - self._random() / 2)

    def connection_lasted(self, seconds: float) -> None:
        """Start again with the first delay if the last connection lived longer than the longest delay.

        A broker that accepts and then drops every connection must not be asked again at full speed.
        """
        if seconds >= self._max_s:
            self.reset()

    def reset(self) -> None:
        """Start again with the first delay."""
        self._next_s = self._min_s


class Retry:
    """Decides whether to try again, and sleeps before that.

    Args:
        patience_s: Give up when the broker has not answered for so long.
        first_delay_s: The first pause; the following ones double, up to 2 s.
    """

    def __init__(self, patience_s: float, first_delay_s: float = FIRST_DELAY_S) -> None:
        self._patience_s = patience_s
        self._delays = ReconnectDelays(first_delay_s, MAX_RETRY_DELAY_S, random_module.random)
        self.reset()

    def reset(self) -> None:
        """The broker has answered: start again."""
        self._delays.reset()
        self._give_up_at_s = time.monotonic() + self._patience_s

    def pause(self) -> bool:
        """Sleep before the next attempt; return False at once if it is time to give up."""
        delay_s = self._delays.next_s()
        if time.monotonic() + delay_s > self._give_up_at_s:
            return False
        time.sleep(delay_s)
        return True
