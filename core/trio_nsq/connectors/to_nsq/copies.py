"""Publish the messages of one source to one topic of the destinations, in order.

Numbered batches: one is sent after the other, and one that may be stored is sent again to the same destination only. So
the greatest number over all destinations tells which messages are stored, and a restarted program continues there.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from ...event_loop.retries import Delays
from ..host_pool import HostPool
from .destination import Destination
from .errors import Unavailable
from .numbers import least_number, number_of, sequence_in
from .parts import MAX_BATCH_MESSAGES, Part

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

_MIN_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_NS_PER_MS = 1_000_000


@dataclass(slots=True)
class Copies:
    """The copies of one source's messages in one topic.

    Attributes:
        topic: The topic at the destinations.
        destinations: In the order of `pool`.
        producer: The name under which numbered batches are published; None: without numbers.
        last: The last sequence that is stored, or was left out at the start.
        stored: The greatest number that is known to be stored at each destination, by index.
        record_attempt: See `SourceProgress`.
    """

    topic: str
    destinations: Sequence[Destination]
    pool: HostPool
    producer: str | None = None
    last: int = -1
    stored: dict[int, int] = field(default_factory=dict)
    record_attempt: Callable[[str], None] = lambda error: None
    _delays: Delays = field(default_factory=lambda: Delays(_MIN_DELAY_S, _MAX_DELAY_S, random.random))
    _doubtful: int | None = None  # the destination that may have stored the last batch
    _has_stored: bool = False  # a numbered batch
    _has_rival: bool = False
    _failed: set[int] = field(default_factory=set)  # destinations, since the last success or pause
    _most: int = (
        MAX_BATCH_MESSAGES  # the messages of a batch; fewer after a refusal, as there may be room for them
    )

    async def publish(self, part: Part) -> None:
        """Publish messages; returns when they are stored. Raises CopyRefused."""
        while True:
            if self.producer is not None:
                part = part.without_stored(self.last)
            if not part.bodies:
                return
            batch = part.between(0, self._most)
            if await self._try(batch):
                part = part.between(len(batch.bodies), len(part.bodies))

    async def _try(self, batch: Part) -> bool:
        """Publish a batch to a destination. Returns whether it is stored; waits if it should be tried again later."""
        index = self.pool.pick(trio.current_time()) if self._doubtful is None else self._doubtful
        destination = self.destinations[index]
        began_s = trio.current_time()
        try:
            done = await self._publish_to(index, batch)
        except Unavailable as error:
            self.pool.failed(index, trio.current_time())
            destination.report_failure(error)
            self.record_attempt(str(error))
            self._failed.add(index)
            if error.in_doubt and self.producer is not None:
                self._doubtful = index
            if error.is_full:
                self._most = max(1, len(batch.bodies) // 4)
            if self._doubtful is not None or len(self._failed) == len(self.destinations):
                self._failed.clear()
                await trio.sleep(self._delays.next_s())
            return False
        self.pool.succeeded(index, trio.current_time() - began_s, trio.current_time())
        destination.report_success()
        self.record_attempt("")
        self._delays.reset()
        self._doubtful = None
        self._failed.clear()
        self._most = min(2 * self._most, MAX_BATCH_MESSAGES)
        return done

    async def _publish_to(self, index: int, part: Part) -> bool:
        """Publish messages. Returns False if some of them are stored already; `last` tells which."""
        destination = self.destinations[index]
        defer_ms = -(-max(0, part.due_ns - time.time_ns()) // _NS_PER_MS) if part.due_ns else 0
        if self.producer is None:
            await destination.publish(self.topic, part.bodies, defer_ms, part.headers)
            return True
        number, first = number_of(part.sequences[-1], part.ids[-1]), least_number(part.sequences[0])
        if await destination.publish_numbered(
            *(self.topic, self.producer, part.bodies, number, first, defer_ms, self.stored.get(index)),
            headers=part.headers,
        ):
            self.last, self.stored[index] = part.sequences[-1], number
            self._has_stored = True
            return True
        # Another program, or a request of a killed one, has stored them.
        if len(self.destinations) > 1 and self._doubtful is None and self._has_stored:
            if not self._has_rival:
                logger.warning(
                    "another command copies to topic %s at %s, too. With several destinations, only one command may "
                    "run: messages may be stored twice. End one of them",
                    *(self.topic, destination.label),
                )
            self._has_rival = True
        try:
            await self.update_last(destination)
        except Unavailable as error:
            raise Unavailable(error.address, error.reason, in_doubt=True) from error
        return False

    async def update_last(self, destination: Destination) -> None:
        """Ask a destination which messages it has. Raises Unavailable."""
        assert self.producer is not None
        number = await destination.last_number(self.topic, self.producer)
        if number is not None:
            self.last = max(self.last, sequence_in(number))
