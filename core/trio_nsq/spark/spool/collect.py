"""Receiving messages of a channel into a spool: each is finished once it is on stable storage, and not before."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

import trio

from ...client import Consumer, MessageBatch
from .spool import Spool

BUDGET_BYTES = 64 * 1024 * 1024
"""So many bytes of bodies are under way at most, about: brokers count messages, so it goes by the largest that came."""
FIRST_IN_FLIGHT = 64
"""Until one has come: so many of the largest that nsqd takes by default."""
PATIENCE_S = 30.0
"""So long are nsqds waited for that are not connected, when what they have is all that is wanted."""
_QUIET_S, _DRAIN_S = 0.1, 2.0
"""What was sent before we asked for no more is waited for until there is such a pause, or for so long."""
_LOOKS, _POLL_S = 5, 0.1
"""Silence counts if we have looked so many times, for a busy machine may not let us look; and how often we look."""


class StopReason(Enum):
    """Why no more was received."""

    IDLE = auto()
    FULL = auto()
    TIME = auto()
    STOPPED = auto()
    UNREACHABLE = auto()
    """Not all nsqds could be reached, and the others had nothing more."""


@dataclass(frozen=True, slots=True)
class CollectLimits:
    """When to receive no more, at the latest.

    Attributes:
        spool_bytes: The spool has grown to this.
        time_s: So long after the beginning.
        idle_s: For so long nothing has come that was published before `began_ns`. What is published later comes, too,
            but is not waited for: a channel that is in use would never be empty.
        began_ns: Unix nanoseconds; the clocks of brokers are compared with it.
        connections: So many nsqds have to be connected for their silence to count.
        patience_s: So long is waited for that, after what others have.
    """

    spool_bytes: int
    time_s: float = inf
    idle_s: float = inf
    began_ns: int = 0
    connections: int = 1
    patience_s: float = PATIENCE_S


class Collector:
    """One time of receiving.

    Args:
        spool: Where to. Nobody else may change it meanwhile.
        consumer: Entered; to be left by the caller.
        limits: When to end.
        max_in_flight: Messages to have under way at most, of all nsqds together.
        advance: Is told of messages and bytes of bodies that are in the spool, and finished.

    Attributes:
        repeated: Messages that were in the spool, or in files, before they came.
    """

    def __init__(
        self,
        spool: Spool,
        consumer: Consumer,
        limits: CollectLimits,
        max_in_flight: int,
        advance: Callable[[int, int], None],
    ) -> None:
        self.repeated = 0
        self._spool = spool
        self._consumer = consumer
        self._limits = limits
        self._max_in_flight = max_in_flight
        self._advance = advance
        self._waiting: list[MessageBatch] = []
        self._arrived = trio.Event()
        self._stopped = trio.Event()
        self._draining = self._drained = False
        self._silent_since = trio.current_time()
        self._looks = 0  # since then

    def stop(self) -> None:
        """Receive no more, whatever was agreed."""
        self._stopped.set()

    async def run(self) -> StopReason:
        """Receive until there is a reason to end. What has been received then is in the spool, and finished.

        Raises:
            LogWriteError, InvalidMessageId: Messages cannot be stored; in a group. They are not finished.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._store)
            async with trio.open_nursery() as receiving:
                receiving.start_soon(self._receive)
                while True:
                    end = await self._watch()
                    silent_since = self._silent_since
                    await self._drain()
                    if end is not StopReason.IDLE or self._silent_since == silent_since:
                        break
                    # It was silent because what it had for us lay in its buffer, for up to 250 ms: there may be more.
                    self._draining = False
                    self._consumer.max_in_flight = max(FIRST_IN_FLIGHT, self._limits.connections)
                receiving.cancel_scope.cancel()
            self._drained = True
            self._arrived.set()
        return end

    async def _receive(self) -> None:
        async for batch in self._consumer.batches():
            self._waiting.append(batch)
            if min(batch.timestamps_ns) < self._limits.began_ns:
                self._silent_since, self._looks = trio.current_time(), 0
            self._adapt(max(map(len, batch.bodies)))
            self._arrived.set()

    def _adapt(self, largest_bytes: int) -> None:
        """Have as much under way as there is memory for; not for each message a little more or less."""
        wanted = min(self._max_in_flight, BUDGET_BYTES // max(1, largest_bytes))
        wanted = max(wanted, self._limits.connections)  # for with less they would take turns
        if not self._draining and not wanted / 2 < self._consumer.max_in_flight <= wanted:
            self._consumer.max_in_flight = wanted

    async def _store(self) -> None:
        # While the disk works, more arrives, and goes with the next sync.
        while self._waiting or not self._drained:
            if not self._waiting:
                await self._arrived.wait()
                self._arrived = trio.Event()
                continue
            batches, self._waiting = self._waiting, []
            self.repeated += await trio.to_thread.run_sync(self._spool.store, batches)
            for batch in batches:
                batch.finish()
                self._advance(len(batch), sum(map(len, batch.bodies)))

    async def _watch(self) -> StopReason:
        limits, began_s = self._limits, trio.current_time()
        apart_since = began_s
        poll_s = min(_POLL_S, limits.idle_s / _LOOKS)
        while True:
            now_s = trio.current_time()
            if self._stopped.is_set():
                return StopReason.STOPPED
            if now_s - began_s >= limits.time_s:
                return StopReason.TIME
            if self._spool.size_bytes >= limits.spool_bytes:
                return StopReason.FULL
            if self._consumer.stats().connections >= limits.connections:
                apart_since = now_s
            else:
                self._looks = 0
            if self._looks * poll_s >= limits.idle_s and not self._waiting:
                return StopReason.IDLE
            if now_s - apart_since >= limits.patience_s and now_s - self._silent_since >= limits.idle_s:
                return StopReason.UNREACHABLE
            with trio.move_on_after(min(poll_s, max(0.0, began_s + limits.time_s - now_s))):
                await self._stopped.wait()
            self._looks += 1

    async def _drain(self) -> None:
        """Have nothing under way any more: what would be put back would count as one more attempt."""
        self._draining = True
        self._consumer.max_in_flight = 0
        with trio.move_on_after(_DRAIN_S):
            looks = 0
            while looks < _LOOKS:
                before = self._consumer.stats().received
                await trio.sleep(_QUIET_S / _LOOKS)
                looks = looks + 1 if self._consumer.stats().received == before else 0
