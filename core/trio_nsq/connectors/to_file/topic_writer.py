"""Writes the messages of one topic, from all its sources, to files; waits while the disk is full."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from ...protocol.errors import NSQError
from ..source.batch import Position, Source, SourceBatch
from .topic_output import MESSAGE_BYTES, OutputCounts, TopicOutput

RETRY_S = 1.0
TOUCH_S = 20.0
"""Messages of a channel that are not synced are touched at this interval: a broker's usual time limit is 60 s."""

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")


_Result = TypeVar("_Result")


class CannotWrite(NSQError):
    """The program ends while files cannot be written. Nothing is lost: the messages are read again."""


class WriterLimits:
    """How much is kept in memory, over all topics; and the threads that write.

    Attributes:
        topics: The number of topics.
        threads: Limits the threads.
        waiting_bytes: A topic receives nothing while this many bytes wait for the disk.
        unsynced_bytes: A topic is synced when this many bytes were written.
    """

    _ALL_TOPICS_BYTES = 64 * 1024 * 1024
    _LEAST_BYTES = 1024 * 1024

    def __init__(self) -> None:
        self.threads: trio.CapacityLimiter = trio.CapacityLimiter(8)
        self.topics = 0

    @property
    def unsynced_bytes(self) -> int:
        return max(self._LEAST_BYTES, self._ALL_TOPICS_BYTES // max(1, self.topics))

    @property
    def waiting_bytes(self) -> int:
        return max(self._LEAST_BYTES, self.unsynced_bytes // 4)


@dataclass(slots=True)
class WriteFailures:
    """The failed attempts to write the files of a topic.

    Attributes:
        attempts: Their number.
        error: Why the last attempt failed; empty: it succeeded.
    """

    attempts: int = 0
    error: str = ""


class TopicWriter:
    """Receives from the sources of a topic, and writes to its output.

    Args:
        output: Is used in threads, and released at the end of `run`.
        sync_interval_s: How long messages may wait until they are synced.
        clock: Returns Unix seconds, for the names of files.
        ends_when_idle: Whether `run` returns when there was no source for one to two sync intervals.
        failures: Counts failed attempts.

    Attributes:
        ended: Is set by the caller of `run`.
    """

    def __init__(
        self,
        topic: str,
        output: TopicOutput,
        limits: WriterLimits,
        sync_interval_s: float,
        clock: Callable[[], float],
        *,
        ends_when_idle: bool = False,
        failures: WriteFailures | None = None,
    ) -> None:
        self.topic = topic
        self._output = output
        self._limits = limits
        self._sync_interval_s = sync_interval_s
        self._clock = clock
        self._sources: dict[Source, Position | None] = {}  # with a stored position that is not of its log
        self._waiting: list[SourceBatch] = []
        self._waiting_bytes = 0
        self._received: dict[str, Position] = {}  # by log: the position after everything received
        self._has_work = trio.Event()
        self._has_room = trio.Event()
        self._held: dict[int, SourceBatch] = {}  # of channels, neither finished nor requeued
        self._stopping = trio.Event()
        self._closes_file = False
        self._ends_when_idle = ends_when_idle
        self._failures = failures or WriteFailures()
        self.ended: trio.Event = trio.Event()

    @property
    def is_ending(self) -> bool:
        """Whether `stop` was called, or the writer was idle: it takes no more sources."""
        return self._stopping.is_set()

    @property
    def counts(self) -> OutputCounts:
        """What was synced."""
        return self._output.counts

    @property
    def lag(self) -> int | None:
        """Messages that were not received yet, of the sources that know it; None: no source does."""
        known = [lag for source in list(self._sources) if (lag := source.lag()) is not None]
        return sum(known) if known else None

    @property
    def log_brokers(self) -> list[str]:
        """The HTTP addresses of the brokers whose logs are read."""
        return [source.broker for source in list(self._sources) if source.is_log]

    @property
    def positions(self) -> Mapping[str, Position]:
        """Where reading of each log continues, by `FoundLog.key`."""
        return {**self._output.positions, **self._received}

    def close_file(self) -> None:
        """Finish the open file soon; the next message begins another one."""
        self._closes_file = True
        self._has_work.set()

    def stop(self) -> None:
        """Stop receiving; `run` then makes everything durable and returns."""
        self._stopping.set()
        self._has_work.set()

    # ------------------------------------------------------------------ receiving

    async def consume(self, source: Source) -> None:
        """Write the messages of a source until cancelled."""
        stored = self._output.position(source.log)
        continues = stored is not None and source.next_sequence() == stored.sequence
        # The log may be another one, or its channel may be ahead: do not move the channel to the old position.
        self._sources[source] = None if continues else stored
        try:
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as receiving:
                    nursery.start_soon(self._cancel_when_stopping, receiving)
                    while True:
                        await self._put(await source.receive())
                await trio.sleep_forever()  # the source stays open until everything is durable
        finally:
            del self._sources[source]

    async def _cancel_when_stopping(self, scope: trio.CancelScope) -> None:
        await self._stopping.wait()
        scope.cancel()

    async def _put(self, batch: SourceBatch) -> None:
        # Before waiting: a batch that was received and then dropped would be missing.
        self._waiting.append(batch)
        self._waiting_bytes += sum(map(len, batch.bodies)) + MESSAGE_BYTES * len(batch.bodies)
        if batch.position is not None:
            self._received[batch.log_key] = batch.position
        else:
            self._held[id(batch)] = batch
        self._has_work.set()
        while self._waiting_bytes > self._limits.waiting_bytes:
            await self._has_room.wait()

    async def _touch(self) -> None:
        """Touch the messages of channels that wait for a sync for long, such as while the disk is full."""
        before: list[SourceBatch] = []
        while True:
            await trio.sleep(TOUCH_S)
            for batch in before:
                if id(batch) in self._held and batch.delivery is not None:
                    batch.delivery.touch()
            before = list(self._held.values())

    # ------------------------------------------------------------------ writing

    async def run(self) -> None:
        """Write what is received, until `stop`.

        Raises:
            CannotWrite: The disk failed at the end.
            NSQError: Another process writes to the same files.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._touch)
                await self._write_until_stopped()
                nursery.cancel_scope.cancel()
        finally:
            self._output.release()

    async def _write_until_stopped(self) -> None:
        next_tick = trio.current_time() + self._sync_interval_s
        sync_at = math.inf
        is_idle = False  # since the last tick
        while not self._stopping.is_set() or self._waiting:
            with trio.move_on_at(min(next_tick, sync_at)):
                await self._has_work.wait()
            self._has_work = trio.Event()
            batches = self._take_waiting()
            now = trio.current_time()
            if batches:
                sync_at = min(sync_at, now + self._sync_interval_s)
            tick = now >= next_tick
            if tick:
                next_tick = now + self._sync_interval_s
            is_full = self._output.unsynced_bytes >= self._limits.unsynced_bytes
            sync = tick or is_full or now >= sync_at or any(source.is_starved() for source in self._sources)
            closes, self._closes_file = self._closes_file, False
            await self._work(batches, sync=sync, tick=tick, close=closes)
            if sync or closes:
                sync_at = math.inf
            if tick:
                if self._ends_when_idle and is_idle and not self._sources and not self._waiting:
                    self._stopping.set()  # the topic was deleted
                is_idle = not self._sources
        await self._work((), sync=True, tick=False, close=True)

    def _take_waiting(self) -> list[SourceBatch]:
        batches, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        self._has_room.set()
        self._has_room = trio.Event()
        return batches

    async def _work(self, batches: Sequence[SourceBatch], *, sync: bool, tick: bool, close: bool) -> None:
        """Write batches in a thread; while the disk fails, wait and try again."""
        output = self._output
        new = list(batches)

        def work() -> None:
            now = self._clock()
            taken = new[:]
            new.clear()  # a failed attempt leaves them with the output
            output.write(taken, now)
            if close:
                output.close_file(now)
            elif tick:
                output.tick(now)
            elif sync:
                output.sync(now)

        try:
            await retried(self.topic, work, self._limits.threads, self._stopping, self._failures)
        except CannotWrite:
            await self._requeue()
            raise
        finally:
            self._finish_batches()

    async def _requeue(self) -> None:
        """Let other consumers have the messages of channels."""
        await trio.to_thread.run_sync(self._output.discard, limiter=self._limits.threads)
        for batch in self._held.values():
            batch.requeue(0)
        self._held.clear()

    def _finish_batches(self) -> None:
        for batch in self._output.take_finished():
            if batch.position is None:
                del self._held[id(batch)]
                batch.finish()
        for source, stale in self._sources.items():
            position = self._output.position(source.log) if source.is_log else None
            if position is not None and position != stale:
                source.commit(position)


async def retried(
    topic: str,
    work: Callable[[], _Result],
    threads: trio.CapacityLimiter,
    stopping: trio.Event,
    failures: WriteFailures,
) -> _Result:
    """Do work on the files of a topic in a thread, and repeat it while it raises OSError, with one warning.

    Args:
        failures: Counts the failed attempts.

    Raises:
        CannotWrite: It failed, and the program ends.
    """
    failed = False
    while True:
        try:
            result = await trio.to_thread.run_sync(work, limiter=threads)
        except OSError as error:
            text = f"topic {topic}: cannot write its files: {_reason(error)}"
            failures.attempts += 1
            failures.error = text
            if stopping.is_set():
                raise CannotWrite(text) from error
            if not failed:
                failed = True
                logger.warning("%s. Waiting until this works", text)
            with trio.move_on_after(RETRY_S):
                await stopping.wait()
        else:
            failures.error = ""
            if failed:
                logger.info("topic %s: its files can be written again", topic)
            return result


def _reason(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
