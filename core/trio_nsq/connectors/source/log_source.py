"""The log of one topic on one broker as a source, with the channel that stands for the reader.

The channel is at or behind the position up to which everything is stored. So the broker keeps what was not read, and
its statistics show the lag as the channel's depth.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from ...client.background import BackgroundTask
from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.reading.batches import Found, is_for_all_channels
from ...client.reading.broker_log import BrokerLog
from ...client.reading.topic_reader import TopicReader
from ...log.records import RecordBatch
from ...protocol.errors import NSQError
from ...untrusted_json import decode_json
from ...wording import count_of
from .batch import Position, SourceBatch, from_records

logger = logging.getLogger("trio_nsq.connectors")

WATCH_S = 5.0
"""How often to ask whether the channel is paused, and for the end of the log."""
COMMIT_S = 1.0
"""The shortest time between two moves of the channel."""
LAST_COMMIT_S = 5.0
"""How long the last move may take when the source is closed."""
_Answer = TypeVar("_Answer")


class LogChanged(NSQError):
    """The log is shorter than before, or another one: its last messages were lost, or the topic was recreated."""


class LogSource:
    """See `Source`. Use `open_log_source`."""

    is_log = True

    def __init__(self, topic: str, channel: str, reader: TopicReader, requests: "LogRequests") -> None:
        self.topic = topic
        self.broker = requests.address
        self._channel = channel
        self._reader = reader
        self._requests = requests
        self._position = Position(reader.position, None)
        self._losses = reader.connections_lost
        self._receiving = trio.CancelScope()
        self._end = reader.position
        self._running = trio.Event()
        self._running.set()
        self._moved_to = -1
        self._target = -1
        self._wake = trio.Event()

    async def receive(self) -> SourceBatch:
        """See `Source`. Raises LogChanged, RequestRefused, RawStreamError."""
        await self._running.wait()
        with trio.CancelScope() as self._receiving:
            found = await self._reader.receive()
        if self._receiving.cancelled_caught or not await self._is_same_log(found[0]):
            raise LogChanged(f"the log of topic {self.topic} at {self.broker} lost its last messages")
        records: list[RecordBatch] = []
        last_id: str | None = None
        for each in found:
            if isinstance(each, RecordBatch):
                last_id = f"{each.first_id + each.count - 1:016x}"
                if self._is_for_us(each):
                    records.append(each)
            else:
                last_id = None
                self._report_gap(each.first_sequence, each.next_sequence, each.reason)
        self._position = Position(found[-1].next_sequence, last_id)
        return from_records(self.topic, self.broker, records, self._position)

    async def _is_same_log(self, next_found: Found) -> bool:
        """Return whether the log, after the connection was lost, still has what was read before."""
        if _first_sequence(next_found) < self._position.sequence:
            return False
        while self._losses != self._reader.connections_lost:
            losses = self._reader.connections_lost
            if not await self._requests.is_same_log(self._position):
                return False
            self._losses = losses
        return True

    def commit(self, position: Position) -> None:
        """See `Source`."""
        is_read = (
            position.sequence <= self._position.sequence
        )  # otherwise it is of a log that was here before
        if is_read and position.sequence > self._target:
            self._target = position.sequence
            self._wake.set()

    def is_starved(self) -> bool:
        """See `Source`."""
        return False

    def next_sequence(self) -> int | None:
        """See `Source`."""
        return self._position.sequence

    def lag(self) -> int | None:
        """See `Source`."""
        return max(0, self._end - self._position.sequence)

    # ------------------------------------------------------------------ the channel

    async def run(self) -> None:
        """Move the channel, and watch whether it is paused; runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._move_channel)
            nursery.start_soon(self._watch)

    async def _move_channel(self) -> None:
        """Move the channel when `commit` is called. Errors are logged, and repeated."""
        warned = False
        while True:
            await self._wake.wait()
            try:
                await self._move()
                if warned:
                    logger.info("channel %s/%s at %s moves again", self.topic, self._channel, self.broker)
                warned = False
            except (BrokerUnreachable, RequestRefused) as exc:
                if not warned:
                    logger.warning("channel %s/%s cannot be moved: %s", self.topic, self._channel, exc)
                warned = True
            await trio.sleep(COMMIT_S)

    async def _move(self) -> None:
        self._wake = trio.Event()
        target = self._target
        try:
            await self._requests.move_channel(self._channel, target)
        except BaseException:
            self._wake.set()
            raise
        self._moved_to = target

    async def close(self) -> None:
        """Move the channel to the last commit, if the broker answers soon."""
        if self._target > self._moved_to:
            with trio.move_on_after(LAST_COMMIT_S, shield=True):
                try:
                    await self._move()
                except (BrokerUnreachable, RequestRefused) as exc:
                    logger.warning("channel %s/%s cannot be moved: %s", self.topic, self._channel, exc)

    async def _watch(self) -> None:
        """Stop receiving while the topic or the channel is paused, or if the log ends before what was read."""
        while True:
            await trio.sleep(WATCH_S)
            read_before = self._position.sequence
            try:
                await self.update_state()
            except (BrokerUnreachable, RequestRefused):
                continue  # the reader reports it, too
            if self._end < read_before:
                self._receiving.cancel()

    async def update_state(self) -> None:
        """Ask for the end of the log, and whether it may be read. Raises BrokerUnreachable, RequestRefused."""
        self._end, paused = await self._requests.state(self._channel)
        if paused and self._running.is_set():
            self._running = trio.Event()
            logger.info(
                "%s/%s at %s is paused; it is read again when topic and channel are unpaused",
                *(self.topic, self._channel, self.broker),
            )
        elif not paused and not self._running.is_set():
            self._running.set()
            logger.info("%s/%s at %s is not paused any more", self.topic, self._channel, self.broker)

    # ------------------------------------------------------------------ records

    def _is_for_us(self, record: RecordBatch) -> bool:
        return is_for_all_channels(record) or decode_json(record.metadata)["channel"] == self._channel

    def _report_gap(self, first: int, end: int, reason: str) -> None:
        what = "are damaged" if reason == "damaged" else "were deleted by retention"
        logger.warning(
            "topic %s at %s: %s %s, sequences %d to %d; they are left out",
            *(self.topic, self.broker, count_of(end - first, "message"), what, first, end - 1),
        )


def _first_sequence(found: Found) -> int:
    return found.base_sequence if isinstance(found, RecordBatch) else found.first_sequence


class LogRequests:
    """Requests about one topic to one broker, in threads of their own.

    Raises (all methods): BrokerUnreachable, RequestRefused.
    """

    def __init__(self, log: BrokerLog, address: str, topic: str, threads: trio.CapacityLimiter) -> None:
        self.address = address
        self._log = log
        self._topic = topic
        self._threads = threads

    async def _call(self, function: Callable[..., _Answer], *args: object) -> _Answer:
        return await trio.to_thread.run_sync(function, *args, limiter=self._threads, abandon_on_cancel=True)

    async def supports_logs(self) -> bool:
        """Return whether the broker can read logs; an nsqd cannot."""
        try:
            await self._call(self._log.bounds)
        except RequestRefused as exc:
            if exc.status == 404:
                return exc.text == "TOPIC_NOT_FOUND"
            raise
        return True

    async def open_channel(self, channel: str, *, creates_topic: bool) -> int:
        """Create the channel, and perhaps the topic, if it does not exist; return `BrokerLog.first_unfinished`."""
        try:
            return await self._call(self._log.first_unfinished, channel)
        except RequestRefused as exc:
            if not creates_topic or exc.status != 404 or exc.text != "TOPIC_NOT_FOUND":
                raise
        # Not before it is needed: a token that may manage this channel only may not create topics.
        await self._call(self._log.create_topic)
        return await self._call(self._log.first_unfinished, channel)

    async def move_channel(self, channel: str, sequence: int) -> None:
        """Move the channel; create it first if it was deleted."""
        try:
            await self._call(self._log.move_channel, channel, sequence)
        except RequestRefused as exc:
            if exc.status != 404 or exc.text != "CHANNEL_NOT_FOUND":
                raise
            await self._call(self._log.open_channel, channel)
            await self._call(self._log.move_channel, channel, sequence)

    async def is_same_log(self, position: Position) -> bool:
        """Return whether a position can be in this log."""
        bounds = await self._call(self._log.bounds)
        if position.sequence > bounds.end:
            return False
        if position.last_id is None or not position.sequence:
            return True
        found = await self._call(self._log.id_at, position.sequence - 1)
        return found in (None, position.last_id)

    async def state(self, channel: str) -> tuple[int, bool]:
        """Return the end of the log, and whether the topic or the channel is paused."""
        bounds = await self._call(self._log.bounds)
        return bounds.end, await self._call(self._log.is_paused, channel)


@asynccontextmanager
async def open_log_source(
    topic: str,
    channel: str,
    requests: LogRequests,
    stored: Position | None,
    reader_at: Callable[[int], TopicReader],
    *,
    creates_topic: bool,
    channel_may_lead: bool = False,
) -> AsyncIterator[LogSource]:
    """Open a log at the stored position, or at the channel's.

    If the channel is ahead of the stored position, somebody moved it, and the reader follows: for example, its messages
    were moved to another broker.

    Args:
        stored: The position up to which everything is stored; None: the channel's.
        reader_at: Makes the reader that begins at a sequence.
        creates_topic: Whether to create a missing topic; otherwise RequestRefused is raised.
        channel_may_lead: See `SourceOptions`.

    Raises:
        BrokerUnreachable, ConnectionFailed, RequestRefused: The broker cannot be reached, or refuses.
    """
    begin = await requests.open_channel(channel, creates_topic=creates_topic)
    if stored is not None:
        if not await requests.is_same_log(stored):
            logger.warning(
                "topic %s at %s is not the one that was read before: it was recreated, or lost its last messages. "
                "Reading continues at the position of channel %s, sequence %d",
                *(topic, requests.address, channel, begin),
            )
        elif begin > stored.sequence:
            if not channel_may_lead:
                logger.warning(
                    "channel %s/%s at %s is ahead of what is stored: sequences %d to %d are left out. If they were "
                    "stored and lost, move the channel back with 'qcli channel seek'",
                    *(topic, channel, requests.address, stored.sequence, begin - 1),
                )
        else:
            begin = stored.sequence
    async with reader_at(begin) as reader:
        source = LogSource(topic, channel, reader, requests)
        await source.update_state()  # a paused channel is not read at all
        background = BackgroundTask()
        await background.open(source.run)
        try:
            yield source
        finally:
            await background.close()
            await source.close()
