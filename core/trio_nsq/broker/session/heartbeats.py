"""Heartbeats of all TCP clients, from one task: with thousands of clients, a task for each costs time and memory."""

import math
from collections.abc import Callable
from typing import Final

import trio

from ..state.deadline_heap import DeadlineHeap

_CLIENTS_AT_ONCE: Final = 100
"""Heartbeats sent before the event loop serves other tasks."""
_NS_PER_S: Final = 1e9
_EARLY_S: Final = 1e-6
"""So much early is on time. Otherwise a client whose time was rounded down is called for nothing, again and again."""


class Heartbeat:
    """The heartbeats of one client.

    Args:
        beat: Does what is due at this time, by trio's clock, and returns when to call it again; math.inf: never.
    """

    def __init__(self, beat: Callable[[float], float], due: "DeadlineHeap[Heartbeat]") -> None:
        self.beat: Callable[[float], float] = beat
        self._due = due

    def end(self) -> None:
        """Call the client no more. The heap may keep this for a while, but not the client."""
        self.beat = _never
        self._due.forget(self)


def _never(now_s: float) -> float:
    return math.inf


class Heartbeats:
    """Calls clients when their heartbeats are due. One for a broker."""

    def __init__(self) -> None:
        self._due: DeadlineHeap[Heartbeat] = DeadlineHeap()
        self._earlier = trio.Event()  # set when the first deadline is earlier than before

    def begin(self, beat: Callable[[float], float]) -> Heartbeat:
        """Return the heartbeats of a new client, which must be watched."""
        return Heartbeat(beat, self._due)

    def watch(self, heartbeat: Heartbeat, at_s: float) -> None:
        """Have `run` call a client at this time at the latest, by trio's clock; math.inf: not because of this call."""
        if at_s < math.inf and self._due.watch(heartbeat, int(at_s * _NS_PER_S)):
            self._earlier.set()

    async def run(self) -> None:
        """Call the clients that are due; runs until cancelled."""
        while True:
            next_ns = self._due.next_ns
            with trio.move_on_at(math.inf if next_ns is None else next_ns / _NS_PER_S):
                await self._earlier.wait()
            self._earlier = trio.Event()
            now_s = trio.current_time() + _EARLY_S
            called = 0
            while (heartbeat := self._due.take_due(int(now_s * _NS_PER_S))) is not None:
                self.watch(heartbeat, heartbeat.beat(now_s))
                called += 1
                if called % _CLIENTS_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
                    now_s = trio.current_time() + _EARLY_S
