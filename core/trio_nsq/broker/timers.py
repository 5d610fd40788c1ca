"""The broker's clock, and a wait for the next timer of a channel."""

import math
import time
from typing import Final

import trio

from .state.broker import Broker
from .state.channel import Channel

_NS_PER_S: Final = 1_000_000_000


class Timers:
    """Returns the time, and waits for the next timer of the broker's channels."""

    def __init__(self, broker: Broker) -> None:
        # Bound once: `trio.current_time` looks the clock up at each call.
        self.clock_s = trio.lowlevel.current_clock().current_time
        # Wall-clock time at the start, minus trio's clock, which never steps.
        self._offset_ns = time.time_ns() - int(self.clock_s() * _NS_PER_S)
        self._broker = broker
        self._moved = trio.Event()  # the next timer may be earlier than before

    def now_ns(self) -> int:
        """Unix nanoseconds by a clock that never steps."""
        return self._offset_ns + int(self.clock_s() * _NS_PER_S)

    def watch(self, channel: Channel, at_ns: int | None) -> None:
        """Have the timer of a channel run at `at_ns` at the latest; None sets no timer."""
        if self._broker.alarms.watch(channel, at_ns):
            self._moved.set()

    def recompute(self) -> None:
        """End `wait`, so that it starts with the timers of new channels."""
        self._moved.set()

    async def wait(self) -> None:
        """Wait until the next timer is due, or timers change."""
        self._moved = trio.Event()
        due_ns = self._broker.alarms.next_ns
        wait_s = math.inf if due_ns is None else max(0.0, (due_ns - self.now_ns()) / _NS_PER_S)
        with trio.move_on_after(wait_s):
            await self._moved.wait()
