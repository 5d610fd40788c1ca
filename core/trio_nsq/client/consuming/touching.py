"""Touch messages that are worked on for long, so that the broker does not deliver them again meanwhile."""

import logging

from ...event_loop import runtime
from ...protocol.limits import SECOND_MS
from ...text.durations import duration_text
from .message import Message

TOUCHES_IN_A_TIMEOUT = 3
"""A touch may be late by two thirds of the message timeout."""
MIN_INTERVAL_S = 0.1
"""A lower bound, whatever timeout a broker announces; nsqd's timeouts are at least a second."""

_logger = logging.getLogger("trio_nsq.client")


class TouchSchedule:
    """When to touch a message: at these intervals, until the broker delivers it again whatever happens.

    Args:
        received_at: When the message arrived, in seconds of any clock.
        timeout_s: The message timeout.
        max_timeout_s: The longest time for which touches extend it.

    Attributes:
        next_at: When the next touch is due.
    """

    __slots__ = ("_ends_at", "_interval_s", "_max_timeout_s", "next_at")

    def __init__(self, received_at: float, timeout_s: float, max_timeout_s: float) -> None:
        self._interval_s = max(MIN_INTERVAL_S, timeout_s / TOUCHES_IN_A_TIMEOUT)
        self._max_timeout_s = max_timeout_s
        self._ends_at = received_at + max_timeout_s
        self.next_at: float = received_at + self._interval_s

    def is_due(self, now: float) -> bool:
        """Whether to touch the message now; the caller does so, and the next touch is due later."""
        if now < self.next_at:
            return False
        self.next_at = now + self._interval_s
        return now < self._ends_at

    @property
    def is_over(self) -> bool:
        """Whether no touch is due any more."""
        return self.next_at >= self._ends_at

    def warning(self, message: object) -> str:
        """Return what to log once it is over."""
        longest = duration_text(round(self._max_timeout_s * SECOND_MS))
        return f"{message} is not acknowledged after {longest}: the broker will deliver it again"


async def keep_touched(message: Message) -> None:
    """Touch a message while it is unanswered. Returns when touching has no effect any more; that is logged."""
    schedule = TouchSchedule(message.received_at, message.timeout_s, message.max_timeout_s)
    while not schedule.is_over:
        await runtime.sleep_until(schedule.next_at)
        if message.answered or not message.connected:
            return
        if schedule.is_due(runtime.current_time()):
            message.touch()
    _logger.warning("%s", schedule.warning(message))
