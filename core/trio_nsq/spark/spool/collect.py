"""Receive the messages of a channel into a spool. A message is acknowledged after it is synced there."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

import trio

from ...client import Consumer, MessageBatch
from .spool import Spool

IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""The limit of bodies in flight. Brokers limit messages, not bytes, so all count as large as the largest."""
FIRST_IN_FLIGHT = 64
"""Messages in flight before the first arrives: this many messages of nsqd's default maximum size fit the limit."""
PATIENCE_S = 30.0
"""How long to wait for nsqds that are not connected, after the others have no more messages."""
_QUIET_S, _DRAIN_S = 0.1, 2.0
"""After RDY 0, wait until nothing arrives for the first time, and at most for the second."""
_CHECKS, _POLL_S = 5, 0.1
"""A channel is silent only after this many checks, because a busy machine may delay them; and the time between them."""


class StopReason(Enum):
    """Why receiving stopped."""

    IDLE = auto()
    FULL = auto()
    TIME = auto()
    STOPPED = auto()
    UNREACHABLE = auto()
    """Some nsqds could not be reached, and the others had no more messages."""


@dataclass(frozen=True, slots=True)
class CollectLimits:
    """The conditions to stop receiving.

    Attributes:
        spool_bytes: Stop when the spool has this size.
        time_s: Stop after this time.
        idle_s: Stop when no message that was published before `began_ns` has arrived for this time. Later messages are
            received, but not waited for: an active channel would never be empty.
        began_ns: Unix nanoseconds, compared with the clocks of brokers.
        connections: The number of nsqds that must be connected before the channel counts as idle.
        patience_s: How long to wait for these connections, after the others have no more messages.
    """

    spool_bytes: int
    time_s: float = inf
    idle_s: float = inf
    began_ns: int = 0
    connections: int = 1
    patience_s: float = PATIENCE_S


class Collector:
    """Receives messages until a limit is reached.

    Args:
        spool: Stores the messages. Nothing else may change it meanwhile.
        consumer: The consumer, entered by the caller.
        max_in_flight: The limit of messages in flight over all nsqds.
        advance: Called with the number of stored and acknowledged messages, and the size of their bodies.

    Attributes:
        repeated: Redelivered messages, which were not stored again.
    """

    def __init__(
        self,
        spool: Spool,
        consumer: Consumer,
        limits: CollectLimits,
        max_in_flight: int,
        advance: Callable[[int, int], None],
    ) -> None:
        self.repeated: int = 0
        self._spool = spool
        self._consumer = consumer
        self._limits = limits
        self._max_in_flight = max_in_flight
        self._advance = advance
        self._sending, self._waiting = trio.open_memory_channel[MessageBatch](
            inf
        )  # limited by `max_in_flight`
        self._stopped = trio.Event()
        self._draining = False
        self._silent_since = trio.current_time()
        self._checks = 0  # since then

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> StopReason:
        """Receive until there is a reason to stop. Then all received messages are stored and acknowledged.

        Raises:
            LogWriteError, InvalidMessageId: Messages cannot be stored (in an exception group); they stay
                unacknowledged.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._store)
            async with self._sending, trio.open_nursery() as receiving:
                receiving.start_soon(self._receive)
                while True:
                    reason = await self._wait_for_reason()
                    silent_since = self._silent_since
                    await self._drain()
                    if reason is not StopReason.IDLE or self._silent_since == silent_since:
                        break
                    # Messages were in nsqd's output buffer, for up to 250 ms: there may be more.
                    self._draining = False
                    self._consumer.max_in_flight = max(FIRST_IN_FLIGHT, self._limits.connections)
                receiving.cancel_scope.cancel()
        return reason

    async def _receive(self) -> None:
        async for batch in self._consumer.batches():
            self._sending.send_nowait(batch)
            if min(batch.timestamps_ns) < self._limits.began_ns:
                self._silent_since, self._checks = trio.current_time(), 0
            if not self._draining:
                in_flight, largest = self._consumer.max_in_flight, max(map(len, batch.bodies))
                wanted = in_flight_for(largest, in_flight, self._max_in_flight, self._limits.connections)
                if wanted != in_flight:
                    self._consumer.max_in_flight = wanted

    async def _store(self) -> None:
        async for first in self._waiting:
            batches = [first]
            with suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:  # messages that arrived during a sync are stored together
                    batches.append(self._waiting.receive_nowait())
            self.repeated += await trio.to_thread.run_sync(self._spool.store, batches)
            for batch in batches:
                batch.finish()
                self._advance(len(batch), sum(map(len, batch.bodies)))

    async def _wait_for_reason(self) -> StopReason:
        limits, began_s = self._limits, trio.current_time()
        unconnected_since = began_s
        poll_s = min(_POLL_S, limits.idle_s / _CHECKS)
        while True:
            now_s = trio.current_time()
            if self._stopped.is_set():
                return StopReason.STOPPED
            if now_s - began_s >= limits.time_s:
                return StopReason.TIME
            if self._spool.size_bytes >= limits.spool_bytes:
                return StopReason.FULL
            if self._consumer.stats().connections >= limits.connections:
                unconnected_since = now_s
            else:
                self._checks = 0
            if self._checks * poll_s >= limits.idle_s and not self._waiting.statistics().current_buffer_used:
                return StopReason.IDLE
            if now_s - unconnected_since >= limits.patience_s and now_s - self._silent_since >= limits.idle_s:
                return StopReason.UNREACHABLE
            with trio.move_on_after(min(poll_s, max(0.0, began_s + limits.time_s - now_s))):
                await self._stopped.wait()
            self._checks += 1

    async def _drain(self) -> None:
        """Wait until no message is in flight: requeueing a message would increase its attempts."""
        self._draining = True
        self._consumer.max_in_flight = 0
        with trio.move_on_after(_DRAIN_S):
            checks = 0
            while checks < _CHECKS:
                before = self._consumer.stats().received
                await trio.sleep(_QUIET_S / _CHECKS)
                checks = checks + 1 if self._consumer.stats().received == before else 0


def in_flight_for(largest_bytes: int, in_flight: int, max_in_flight: int, connections: int) -> int:
    """Return how many messages in flight fit `IN_FLIGHT_BYTES`; the current limit if the difference is small.

    Args:
        largest_bytes: The size of the largest received message.
        in_flight: The current limit.
        connections: The minimum: with fewer messages, connections would have to take turns.
    """
    wanted = max(min(max_in_flight, IN_FLIGHT_BYTES // max(1, largest_bytes)), connections)
    return in_flight if wanted / 2 < in_flight <= wanted else wanted
