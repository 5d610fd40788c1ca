"""Blocking pauses between attempts to reach a broker."""

import random
import time

from ..connection.reconnect import ReconnectDelays

PATIENCE_S = 30.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0


class Retry:
    """Decides whether to try again, and sleeps before that.

    Args:
        patience_s: Give up when the broker has not been heard of for so long.
        first_delay_s: The first pause; the following ones double, up to 2 s.
    """

    def __init__(self, patience_s: float, first_delay_s: float = FIRST_DELAY_S) -> None:
        self._patience_s = patience_s
        self._delays = ReconnectDelays(first_delay_s, MAX_DELAY_S, random.random)
        self.reset()

    def reset(self) -> None:
        """The broker has been heard of: start again."""
        self._delays.reset()
        self._give_up_at_s = time.monotonic() + self._patience_s

    def pause(self) -> bool:
        """Sleep before the next attempt; return False at once if it is time to give up."""
        delay_s = self._delays.next_s()
        if time.monotonic() + delay_s > self._give_up_at_s:
            return False
        time.sleep(delay_s)
        return True
