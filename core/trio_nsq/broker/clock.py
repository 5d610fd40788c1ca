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
_LOOKS: Final = 10
_QUICK_S: Final = 0.000_05
"""Both clocks are looked at within this time, unless the thread was interrupted."""


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
        self._offset_ns = self._measure_offset_ns()
        self._ahead_ns = 0

    def now_ns(self) -> int:
        """Unix nanoseconds by a clock that never steps."""
        return self._offset_ns + int(self.clock_s() * _NS_PER_S)

    def ahead_ns(self) -> int:
        """How far the system clock is ahead of `now_ns`, in whole milliseconds: it may have been set since the start.

        Timestamps of messages, and times that are sent to other brokers, are by the system clock; due times and
        timeouts are by `now_ns`.
        """
        if abs(time.time_ns() - self.now_ns() - self._ahead_ns) >= _NS_PER_MS:
            ahead_ns = self._measure_offset_ns() - self._offset_ns
            if abs(ahead_ns - self._ahead_ns) >= _NS_PER_MS:  # less is no reason for other due times
                self._ahead_ns = round(ahead_ns / _NS_PER_MS) * _NS_PER_MS
        return self._ahead_ns

    def _measure_offset_ns(self) -> int:
        """Return the wall-clock time minus trio's clock.

        On a busy machine, other programs may run between the looks at both clocks. So this looks several times, and
        takes the look that was quickest.
        """
        offset_ns, quickest_s = 0, math.inf
        for _ in range(_LOOKS):
            before_s = self.clock_s()
            wall_ns = time.time_ns()
            after_s = self.clock_s()
            if after_s - before_s < quickest_s:
                quickest_s = after_s - before_s
                offset_ns = wall_ns - int((before_s + after_s) / 2 * _NS_PER_S)
            if quickest_s <= _QUICK_S:
                break
        return offset_ns
