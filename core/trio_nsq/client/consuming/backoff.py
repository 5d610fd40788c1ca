"""How a consumer goes easy on what fails: it takes nothing for a while, then one message, and goes by its result.

Every failure makes the next pause longer, every success shorter; when as many messages have succeeded as had failed,
all flows again. There is one decision per pause: results that come during one are of messages that had arrived before,
and do not count.

Nothing here waits, and time is a parameter, in seconds of any clock that does not go back.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

BackoffStrategy = Literal["exponential", "full_jitter"]
BACKOFF_STRATEGIES: tuple[str, ...] = get_args(BackoffStrategy)


class Backoff:
    """Whether messages may come.

    Args:
        max_backoff_duration_s: The longest pause; 0: none are made.
        backoff_multiplier_s: Half of the first one; each level doubles it.
        backoff_strategy: `exponential`, or `full_jitter`: any time between nothing and that.
        random: Gives numbers in [0, 1), for the jitter.

    Attributes:
        level: Failures that are not made up for; 0: all is well.
    """

    def __init__(
        self,
        *,
        max_backoff_duration_s: float,
        backoff_multiplier_s: float,
        backoff_strategy: BackoffStrategy,
        random: Callable[[], float],
    ) -> None:
        self.level = 0
        self._longest_s = max_backoff_duration_s
        self._multiplier_s = backoff_multiplier_s
        self._jitter = random if backoff_strategy == "full_jitter" else None
        self._until: float | None = None

    @property
    def allowed(self) -> int | None:
        """How many messages may be in flight: 0 in a pause, 1 after it; None: as many as one likes."""
        if self.level == 0:
            return None
        return 1 if self._until is None else 0

    def next_deadline(self) -> float:
        """When the pause is over; infinity if there is none."""
        return math.inf if self._until is None else self._until

    def handle_timer(self, now: float) -> None:
        """End the pause if its time has come."""
        if now >= self.next_deadline():
            self._until = None

    def failed(self, now: float) -> None:
        """A message failed."""
        if self._until is None:
            if 0 < self._duration_s(self.level + 1) <= self._longest_s:
                self.level += 1
            self._pause(now)

    def succeeded(self, now: float) -> None:
        """A message was finished."""
        if self.level and self._until is None:
            self.level -= 1
            self._pause(now)

    def undecided(self, now: float) -> None:
        """A message was put back, which is no failure: another one has to be tried, after another pause."""
        if self._until is None:
            self._pause(now)

    def _pause(self, now: float) -> None:
        if self.level:
            duration_s = self._duration_s(self.level)
            self._until = now + (duration_s * self._jitter() if self._jitter else duration_s)

    def _duration_s(self, level: int) -> float:
        return math.ldexp(self._multiplier_s, level)
