"""Backoff: after several failures in a row, a consumer pauses, then receives one message and decides by its result.

A few failing messages among many do not slow the consumer down. Once it pauses, each failure makes the next pause
longer, each success makes it shorter. After as many successes as failures, the consumer receives `max_in_flight`
messages again. Results during a pause do not count: they belong to messages that arrived before it.

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
        level: Failures minus successes since the first pause; 0: no backoff.
        failures: Failures in a row that have not started a pause yet.
    """

    def __init__(self, settings: ConsumerSettings, random: Callable[[], float]) -> None:
        self.level: int = 0
        self.failures: int = 0
        self._after = settings.backoff_after
        self._longest_s = settings.max_backoff_duration_s
        self._multiplier_s = settings.backoff_multiplier_s
        self._jitter = random if settings.backoff_strategy == "full_jitter" else None
        self._until: float | None = None

    @property
    def allowed(self) -> int | None:
        """The limit of messages in flight: 0 during a pause, 1 after it; None: no limit."""
        if self.level == 0:
            return None
        return 1 if self._until is None else 0

    def next_deadline(self) -> float:
        """Return when the pause ends; infinity if there is none."""
        return math.inf if self._until is None else self._until

    def handle_timer(self, now: float) -> None:
        """End the pause if it is due."""
        if now >= self.next_deadline():
            self._until = None

    def record_failure(self, now: float) -> None:
        """Start a longer pause, unless one runs or too few messages failed in a row: a message failed."""
        if self.level == 0:
            self.failures += 1
            if self.failures < self._after:
                return
            self.failures = 0
        if self._until is None:
            if 0 < self._duration_s(self.level + 1) <= self._longest_s:
                self.level += 1
            self._pause(now)

    def record_success(self, now: float) -> None:
        """Start a shorter pause, unless one runs: a message was finished."""
        self.failures = 0
        if self.level and self._until is None:
            self.level -= 1
            self._pause(now)

    def record_requeue(self, now: float) -> None:
        """Start another pause of the same level: a message was requeued without having failed."""
        if self._until is None:
            self._pause(now)

    def _pause(self, now: float) -> None:
        if self.level:
            duration_s = self._duration_s(self.level)
            self._until = now + (duration_s * self._jitter() if self._jitter else duration_s)

    def _duration_s(self, level: int) -> float:
        return math.ldexp(self._multiplier_s, level)
