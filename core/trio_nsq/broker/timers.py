"""The broker's clock, and waiting until something is due in a channel."""

import math
import time

import trio

from .state.broker import Broker
from .state.channel import Channel

_NS_PER_S = 1_000_000_000


class Timers:
    """Knows what time it is, and when a channel of the broker has to be looked at."""

    def __init__(self, broker: Broker) -> None:
        # trio's clock, without the steps that `trio.current_time` takes to find it.
        self.clock_s = trio.lowlevel.current_clock().current_time
        # Wall-clock time at the start plus what trio's clock, which never steps, has counted since.
        self._offset_ns = time.time_ns() - int(self.clock_s() * _NS_PER_S)
        self._broker = broker
        self._moved = trio.Event()  # something may be due earlier than it was

    def now_ns(self) -> int:
        """Unix nanoseconds by a clock that never steps."""
        return self._offset_ns + int(self.clock_s() * _NS_PER_S)

    def watch(self, channel: Channel, at_ns: int | None) -> None:
        """See to it that a channel is looked at by `at_ns`; None: never."""
        if self._broker.alarms.watch(channel, at_ns):
            self._moved.set()

    def look_again(self) -> None:
        """Channels were added: something may be due in them."""
        self._moved.set()

    async def wait(self) -> None:
        """Wait until something is due."""
        self._moved = trio.Event()
        due_ns = self._broker.alarms.next_ns
        wait_s = math.inf if due_ns is None else max(0.0, (due_ns - self.now_ns()) / _NS_PER_S)
        with trio.move_on_after(wait_s):
            await self._moved.wait()
