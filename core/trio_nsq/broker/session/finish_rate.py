"""How fast a consumer finishes messages, and so whether its next FINs may be read later, together."""

from typing import Final

_FEWEST: Final = 4
"""Fewer FINs are read as they arrive."""
_KEPT_BUSY: Final = 4
"""Until its FINs are read, a consumer must have so many times as many messages in flight as it finishes: a round of the
poller can be late, and the consumer must not wait for more messages."""
_ALONE: Final = 4
"""For so many waits after an answer, FINs are read as they arrive: a client that publishes its results over the same
connection would otherwise wait longer for most answers."""


class FinishRate:
    """The rate of one consumer.

    Args:
        wait_s: How long FINs would wait.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._count = 0
        self._at_s = 0.0
        self._from_s = 0.0  # none waits before

    def note_answer(self, now_s: float) -> None:
        """The client was sent an answer: it may send the next command that has one soon, and wait for it."""
        self._from_s = now_s + _ALONE * self._wait_s

    def allows_wait(self, count: int, in_flight: int, now_s: float) -> bool:
        """Whether the next FINs may wait: several are to be expected, and the consumer has enough other messages.

        Args:
            count: How many messages the consumer has finished so far.
            in_flight: How many it has.
            now_s: By a clock that never steps.
        """
        finished, passed_s = count - self._count, now_s - self._at_s
        if not finished:
            return False
        self._count, self._at_s = count, now_s
        if now_s < self._from_s:
            return False
        # Both sides times `passed_s`: without a time there is no rate.
        expected = finished * self._wait_s
        return 0 < _FEWEST * passed_s <= expected and expected * _KEPT_BUSY <= in_flight * passed_s
