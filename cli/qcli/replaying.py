"""The asynchronous part of `replay`: reads, chooses, waits for the right moment, publishes, and knows how far it came."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import trio

from trio_nsq.client import Producer, PublishFailed
from trio_nsq.client.topic_reader import TopicReader
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import pack_messages

from .broker_log import note_gap
from .exit_codes import ExitCode
from .reading import Pace
from .records import MAX_BATCH_BYTES

BATCH_MESSAGES = 1000
_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class ReplayOutcome:
    """What became of it so far.

    Attributes:
        begun: The first sequence.
        position: All before this sequence is published, left out or missing.
        end: The sequence at which it ends.
        acknowledged: Messages the broker has acknowledged.
        acknowledged_bytes: Bytes of their bodies.
        left_out: Messages that do not match.
        missing: Messages that are no longer there, or damaged.
        damaged: Whether some are damaged.
        maybe_stored: Messages that were sent and not acknowledged.
        failure: Why the broker did not acknowledge.
        stopped: The exit code of the signal that came.
    """

    begun: int = 0
    position: int = 0
    end: int = 0
    acknowledged: int = 0
    acknowledged_bytes: int = 0
    left_out: int = 0
    missing: int = 0
    damaged: bool = False
    maybe_stored: int = 0
    failure: PublishFailed | None = None
    stopped: ExitCode | None = None

    @property
    def over(self) -> bool:
        """Whether it is not to be gone on with."""
        return self.failure is not None or self.stopped is not None

    @property
    def share(self) -> float:
        """How much of it is done, 0 to 1."""
        return (self.position - self.begun) / max(1, self.end - self.begun)


class Spacing:
    """Keeps messages as far apart in time as they were when they were published, or so many times nearer.

    Args:
        speed: 2: in half the time.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._first_ns: int | None = None
        self._begun_s = 0.0

    async def wait(self, timestamp_ns: int) -> None:
        """Wait for the moment of a message that was published then; the first one's is now."""
        if self._first_ns is None:
            self._first_ns, self._begun_s = timestamp_ns, trio.current_time()
        await trio.sleep_until(
            self._begun_s + (timestamp_ns - self._first_ns) / _NS_PER_S / self._speed
        )


class Replay:
    """Publishes what a reader reads.

    Args:
        source: Its topic.
        reader: Open.
        producer: Connected.
        topic: Where to.
        count: Publish no more than so many; None: all.
        pattern: Publish only bodies in which it is found; None: all.
        pace: Holds messages back; None: as fast as the broker takes them.
        spacing: Likewise.

    Attributes:
        outcome: Up to date at any time.
    """

    def __init__(
        self,
        source: str,
        reader: TopicReader,
        producer: Producer,
        topic: str,
        *,
        count: int | None,
        pattern: re.Pattern[bytes] | None,
        pace: Pace | None,
        spacing: Spacing | None,
    ) -> None:
        end = reader.position if reader.end_sequence is None else reader.end_sequence
        self.outcome = ReplayOutcome(reader.position, reader.position, end)
        self._source = source
        self._reader = reader
        self._producer = producer
        self._topic = topic
        self._count = count
        self._pattern = pattern
        self._pace = pace
        self._spacing = spacing
        self._batch_messages = min(BATCH_MESSAGES, pace.max_messages) if pace else BATCH_MESSAGES
        self._pause = trio.CancelScope()

    def stop(self, code: ExitCode) -> None:
        """Publish no more than what is on its way."""
        self.outcome.stopped = code
        self._pause.cancel()

    async def run(self) -> None:
        """Publish all there is, or as much as can be; `outcome` says how it went.

        Raises:
            ReadRefused, RawStreamError: As of the reader.
        """
        outcome = self.outcome
        while not outcome.over and self._wanted:
            with self._pausable():
                found = await self._reader.receive()
                if not found:
                    outcome.position = outcome.end
                    return
            for each in [] if outcome.over else found:
                if isinstance(each, RecordBatch):
                    await self._replay(each)
                    continue
                outcome.damaged |= note_gap(
                    self._source, each.first_sequence, each.next_sequence, each.reason
                )
                outcome.missing += each.next_sequence - each.first_sequence
                outcome.position = each.next_sequence

    @property
    def _wanted(self) -> bool:
        return self._count is None or self.outcome.acknowledged < self._count

    @contextmanager
    def _pausable(self) -> Iterator[None]:
        """Let `stop` cut short what is waited for inside."""
        with trio.CancelScope() as self._pause:
            if self.outcome.over:
                self._pause.cancel()
            yield

    async def _replay(self, batch: RecordBatch) -> None:
        """Publish what matches of a batch, unless it is over."""
        chosen = self._chosen(batch)
        while not self.outcome.over and self._wanted:
            part = list(islice(chosen, self._part_limit))
            ...


    def _chosen(self, batch: RecordBatch) -> Iterator[tuple[int, bytes]]: ...
