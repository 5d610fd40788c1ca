"""From one source to the destinations: receives ahead while the last messages are being published, within limits."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ...filters.bodies import Filter, OtherBodies
from ..source.batch import Source, SourceBatch
from .copies import Copies
from .loops import LoopCheck
from .parts import MAX_BATCH_BYTES, Load
from .progress import SourceProgress

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

STOP_S = 5.0
"""How long a publish may take to end when the program ends."""
TOUCH_S = 20.0
"""How often messages of a channel are touched that cannot be published."""
IDLE_S = 5.0
"""A channel without messages for this time counts as empty."""
_SLICE = 512
"""Messages to filter before other tasks run."""


_FATES = {
    OtherBodies.DEAD_LETTER: "go to topic {}",
    OtherBodies.PASS: "are copied",
    OtherBodies.DROP: "are left out",
}


@dataclass(slots=True)
class Pipe:
    """Copies the messages of one source.

    Attributes:
        copies: For messages.
        others: For bodies that are not JSON objects.
        goal: End at this sequence, or for a channel when it is empty; None: never.
        limit: Returns how many bytes may be received ahead.
        loops: Checks the brokers of a channel.
        with_headers: See `CopyOptions`.
    """

    source: Source
    chosen: Filter
    copies: Copies
    others: Copies
    progress: SourceProgress
    goal: int | None
    limit: Callable[[], int]
    loops: LoopCheck
    with_headers: bool = True
    _pending: Load = field(default_factory=Load)
    _publishing: Load = field(default_factory=Load)
    _changed: trio.Event = field(default_factory=trio.Event)
    _stopping: bool = False
    _published: trio.Event = field(default_factory=trio.Event)

    async def run(self) -> None:
        """Copy until cancelled, or until the goal is reached. A publish that has begun may end first.

        Raises the errors of `Source.receive`, and CopyRefused.
        """
        error: Exception | None = None
        finishing, touching = trio.CancelScope(shield=True), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            if not self.source.is_log:
                nursery.start_soon(self._touch, touching)
            nursery.start_soon(self._publish_all, finishing, touching)
            try:
                try:
                    await self._receive_all()
                except Exception as exc:  # raised when what was received is published
                    error = exc
                self._stop_receiving()
                await self._published.wait()
            except BaseException:  # a cancellation, in a group if it comes from a nursery
                finishing.deadline = trio.current_time() + STOP_S
                self._pending = Load()
                raise
            finally:
                self._stop_receiving()
        if error is not None:
            raise error

    def _stop_receiving(self) -> None:
        self._stopping = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------------ receiving

    async def _receive_all(self) -> None:
        while not self._is_done():
            while self._pending.size >= self.limit():
                await self._changed.wait()
            batch = None
            with trio.move_on_after(
                IDLE_S if self.goal is not None and not self.source.is_log else float("inf")
            ):
                batch = await self.source.receive()
            if batch is None:
                return
            if not self.source.is_log:
                await self.loops.check(batch.topic, batch.broker)
            load = await self._filtered(batch)
            self._pending.join(load)
            self.progress.waiting += load.received
            self._notify()

    async def _filtered(self, batch: SourceBatch) -> Load:
        load, now_ns, count = Load(), time.time_ns(), len(batch.bodies)
        if not self.with_headers:
            batch.headers = ()
        step = _SLICE if not self.chosen.passes_all else max(1, count)
        for first in range(0, count, step):
            load.add(batch, first, min(first + step, count), self.chosen, now_ns)
            await trio.lowlevel.checkpoint()
        load.end_batch(batch)
        return load

    def _is_done(self) -> bool:
        at = self.source.next_sequence()
        return self.goal is not None and at is not None and at >= self.goal

    async def _touch(self, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                await trio.sleep(TOUCH_S)
                for batch in (*self._publishing.batches, *self._pending.batches):
                    if batch.delivery is not None and batch.delivery.unanswered_count:
                        batch.delivery.touch()

    # ------------------------------------------------------------------ publishing

    async def _publish_all(self, finishing: trio.CancelScope, touching: trio.CancelScope) -> None:
        with finishing:
            while True:
                while not self._pending.batches and not self._stopping:
                    await self._changed.wait()
                if not self._pending.batches:
                    break
                self._publishing, self._pending = self._pending, Load()
                self._notify()
                await self._publish(self._publishing)
        touching.cancel()
        self._published.set()

    async def _publish(self, load: Load) -> None:
        for part in load.others:
            await self.others.publish(part)
        for part in load.parts:
            await self.copies.publish(part)
            self.progress.copied += len(part.bodies)
            self.progress.copied_bytes += sum(map(len, part.bodies))
        if load.not_json and not self.progress.not_json:
            logger.warning(
                "topic %s has bodies that are not JSON objects; such bodies %s",
                *(self.source.topic, _FATES[self.chosen.others].format(self.others.topic)),
            )
        self.progress.dropped += load.dropped
        self.progress.not_json += load.not_json
        self.progress.waiting -= load.received
        load.finish()
        if load.position is not None:
            self.source.commit(load.position)
        load.batches = []


MAX_AHEAD_BYTES = 64 * 1024 * 1024
"""What all sources together may receive ahead."""


def ahead_limit(sources: int) -> int:
    """Return how many bytes one of several sources may receive ahead."""
    return min(MAX_BATCH_BYTES, MAX_AHEAD_BYTES // max(1, sources))
