"""Sends what clients' output buffers hold back, when its time has come (NSQ protocol: output buffering).

One task does so for all of them: a task and a deadline for each client cost more than the sending. Times are rounded
up by a fiftieth of what was negotiated, so that many clients are served when it wakes.
"""

import math
from heapq import heappop, heappush
from typing import Protocol

import trio

_STEPS = 50


class Holding(Protocol):
    """Somebody for whom something is held back."""

    def send_held(self) -> None:
        """Send it now. Must not raise."""


class Holder:
    """What is held back, by when it has to be sent. One for a broker."""

    def __init__(self) -> None:
        self._due: dict[float, list[Holding]] = {}  # by trio's clock
        self._times_s: list[float] = []  # a heap of the keys
        self._earlier = trio.Event()

    def hold(self, client: Holding, at_s: float, timeout_s: float) -> None:
        """Have a client's `send_held` called once.

        Args:
            client: See there.
            at_s: When, by trio's clock.
            timeout_s: What was negotiated, above 0: a fiftieth of it later will do.
        """
        step_s = timeout_s / _STEPS
        due_s = math.ceil(at_s / step_s) * step_s
        clients = self._due.get(due_s)
        if clients is None:
            clients = self._due[due_s] = []
            if not self._times_s or due_s < self._times_s[0]:
                self._earlier.set()
            heappush(self._times_s, due_s)
        clients.append(client)

    async def run(self) -> None:
        """Send; runs until cancelled."""
        while True:
            with trio.move_on_at(self._times_s[0] if self._times_s else math.inf):
                await self._earlier.wait()
            self._earlier = trio.Event()
            while self._times_s and self._times_s[0] <= trio.current_time():
                for client in self._due.pop(heappop(self._times_s)):
                    client.send_held()
