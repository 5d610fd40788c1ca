"""Backoff: after a failure a consumer takes nothing for a while, then one message, and goes by its result.

Every failure makes the next pause longer, every success shorter. When as many messages have succeeded as had failed,
the consumer takes `max_in_flight` again. There is one decision per pause: results that come during a pause belong to
messages that had arrived before, and do not count.

No IO; time is a parameter, in seconds of any monotonic clock.
"""

import math
from collections.abc import Callable

from .options import ConsumerSettings


class Backoff:
    """The state of the backoff of one consumer.

    Args:
        random: Returns numbers in [0, 1), for the jitter.

    Attributes:
        level: Failures that no success has made up for; 0: there is no backoff.
    """

    def __init__(self, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self.level = 0
        self._longest_s = settings.max_backoff_duration_s
        self._multiplier_s = settings.backoff_multiplier_s
        self._jitter = random if settings.backoff_strategy == "full_jitter" else None
        self._until: float | None = None

    @property
    def allowed(self) -> int | None:
        """How many messages may be in flight: 0 in a pause, 1 after it; None: no limit."""
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

    def record_failure(self, now: float) -> None:
        """A message failed."""
        if self._until is None:
            if 0 < self._duration_s(self.level + 1) <= self._longest_s:
                self.level += 1
            self._pause(now)

    def record_success(self, now: float) -> None:
        """A message was finished."""
        if self.level and self._until is None:
            self.level -= 1
            self._pause(now)

    def record_requeue(self, now: float) -> None:
        """A message was requeued and did not fail: try another one, after another pause."""
        if self._until is None:
            self._pause(now)

    def _pause(self, now: float) -> None:
        if self.level:
            duration_s = self._duration_s(self.level)
            self._until = now + (duration_s * self._jitter() if self._jitter else duration_s)

    def _duration_s(self, level: int) -> float:
        return math.ldexp(self._multiplier_s, level)
