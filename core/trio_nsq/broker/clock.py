"""The broker's clock, and how long the event loop was held up."""

import logging
import math
import time
from collections.abc import Callable
from typing import Final

import trio

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000
_LATE_S: Final = 0.4
"""The event loop counts as late from this on. A busy machine often holds it up for less."""


class Lateness(trio.abc.Instrument):
    """Measures how long the event loop did not run although it should have: the process was stopped (SIGSTOP), the
    virtual machine was paused, or a disk or other programs held it up.

    It counts what both trio's clock and the real one missed: if trio has another clock, a delay of the machine moves no
    timer, and a jump of that clock is no delay.
    """

    def __init__(self) -> None:
        self._clock_s = trio.lowlevel.current_clock().current_time
        self._late_s = 0.0
        self._next_s = self._next_real_s = math.inf  # when the event loop should run again, by each clock

    def before_io_wait(self, timeout: float) -> None:
        self._add(timeout)

    def after_io_wait(self, timeout: float) -> None:
        self._add(0.0)

    def _add(self, next_after_s: float) -> None:
        now_s, real_s = self._clock_s(), time.perf_counter()
        late_s = min(now_s - self._next_s, real_s - self._next_real_s)
        if late_s > _LATE_S:
            self._late_s += late_s
        self._next_s = now_s + next_after_s
        self._next_real_s = real_s + next_after_s

    def take_ns(self) -> int:
        """Return the nanoseconds since the last call; 0 if there were only short delays."""
        self._add(0.0)
        late_s, self._late_s = self._late_s, 0.0
        if late_s:
            logger.warning(
                "the broker was stopped or held up for %.1f s: messages in flight get as much more time",
                late_s,
            )
        return int(late_s * _NS_PER_S)


class BrokerClock:
    """Returns the time."""

    def __init__(self) -> None:
        # Bound once: `trio.current_time` looks the clock up at each call.
        self.clock_s: Callable[[], float] = trio.lowlevel.current_clock().current_time
        # Wall-clock time at the start, minus trio's clock, which never steps.
        self._offset_ns = time.time_ns() - int(self.clock_s() * _NS_PER_S)

    def now_ns(self) -> int:
        """Unix nanoseconds by a clock that never steps."""
        return self._offset_ns + int(self.clock_s() * _NS_PER_S)

    def ahead_ns(self) -> int:
        """How far the system clock is ahead of `now_ns`, in whole milliseconds: it may have been set since the start.

        Timestamps of messages, and times that are sent to other brokers, are by the system clock; due times and
        timeouts are by `now_ns`.
        """
        return round((time.time_ns() - self.now_ns()) / _NS_PER_MS) * _NS_PER_MS
