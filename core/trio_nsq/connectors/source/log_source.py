"""The log of one topic on one broker as a source, with the channel that stands for the reader.

The channel is at or behind the position up to which everything is stored. So the broker keeps what was not read, and
its statistics show the lag as the channel's depth.
"""

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import trio

from ...client.background import BackgroundTask
from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.reading.broker_log import Bounds, BrokerLog, LogReplaced
from ...client.reading.log_stream import Found, is_for
from ...client.reading.topic_reader import TopicReader
from ...fleet.log_identity import CopyDiffers, FoundAt, LogMark, known_as, missing_at
from ...log.gaps import Span
from ...log.records import RecordBatch
from ...protocol.errors import NSQError
from ...text.wording import count_of
from .batch import Position, SourceBatch, from_records
from .options import SourceOptions

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

WATCH_S = 5.0
"""How often to ask whether the channel is paused, and for the end of the log."""
COMMIT_S = 1.0
"""The shortest time between two moves of the channel."""
LAST_COMMIT_S = 5.0
"""How long the last move may take when the source is closed."""
_INCARNATION = re.compile(r"[0-9a-f]{32}")
_Answer = TypeVar("_Answer")


class LogChanged(NSQError):
    """The log is shorter than before, or another one: its last messages were lost, or the topic was recreated."""


class LogIdentified(NSQError):
    """The log has its first messages, and with them its identity: it must be opened again, to be known by it."""


class ChannelAhead(NSQError):
    """The channel has passed messages that are not stored, see `SourceOptions.refuses_gaps`.

    Attributes:
        topic, channel: The channel.
        first: The sequence of the first of these messages.
    """

    def __init__(self, topic: str, channel: str, broker: str, first: int, end: int) -> None:
        super().__init__(
            f"channel {topic}/{channel} at {broker} is ahead of what is stored: "
            f"sequences {first} to {end - 1} are missing"
        )
        self.topic = topic
        self.channel = channel
        self.first = first


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A log that can be read.

    Attributes:
        topic, broker: See `Source`.
        bounds: Its bounds; None: the broker does not have the topic yet.
        requests: Requests about it.
    """

    topic: str
    broker: str
    bounds: Bounds | None
    requests: "LogRequests"

    @property
    def incarnation(self) -> str | None:
        """The identity of the log; None: unknown, see `LogMark`."""
        return self.bounds.incarnation if self.bounds is not None else None

    @property
    def key(self) -> str:
        """The key under which positions in the log are kept: the incarnation, or the address if it is unknown."""
        return self.incarnation or self.broker

    async def known_as(self, positions: Mapping[str, Position]) -> str | None:
        """Return the key under which a position in this log is kept; None: there is none.

        Args:
            positions: By `key`. Older versions kept them by address.

        Raises BrokerUnreachable, RequestRefused.
        """
        if self.bounds is None or not positions:
            return None
        marks = {key: mark_of(key, position) for key, position in positions.items()}
        return await self.requests.known_as(self.bounds, self.broker, marks)


def mark_of(key: str, position: Position) -> LogMark:
    """Return what identifies the log of a position that is kept under a key, see `FoundLog.key`."""
    return LogMark.before(position.sequence, position.last_id, key if _INCARNATION.fullmatch(key) else None)


class LogSource:
    """See `Source`. Use `open_log_source`."""

    is_log = True

    def __init__(self, found: FoundLog, channel: str, reader: TopicReader) -> None:
        requests = found.requests
        self.topic: str = found.topic
        self.broker: str = found.broker
        self.log: str = found.key
        self._incarnation = found.incarnation
        self._channel = channel
        self._reader = reader
        self._requests = requests
        self._position = Position(reader.position, None)
        self._losses = reader.connections_lost
        self._receiving = trio.CancelScope()
        self._end = reader.position
        self._has_other_identity = False
        self._running = trio.Event()
        self._running.set()
        self._moved_to = -1
        self._target = -1
        self._wake = trio.Event()

    async def receive(self) -> SourceBatch:
        """See `Source`. Raises LogIdentified, LogChanged, RequestRefused, RawStreamError."""
        await self._running.wait()
        with trio.CancelScope() as self._receiving:
            found = await self._reader.receive()
        if self._receiving.cancelled_caught or not await self._is_same_log(found[0]):
            raise LogChanged(f"the log of topic {self.topic} at {self.broker} lost its last messages")
        if self._incarnation is None and self._position.sequence == 0:
            # Nothing must be kept under an address: another broker may have it later.
            await self.update_state()
            if self._has_other_identity:
                raise LogIdentified
        records: list[RecordBatch] = []
        last_id: str | None = None
        for each in found:
            if isinstance(each, RecordBatch):
                last_id = each.last_id
                if is_for(self._channel, each):
                    records.append(each)
            else:
                last_id = None
                self._report_gap(each.first_sequence, each.next_sequence, each.reason)
        self._position = Position(found[-1].next_sequence, last_id)
        return from_records(self.topic, self.broker, self.log, records, self._position)

    async def _is_same_log(self, next_found: Found) -> bool:
        """Return whether the log, after the connection was lost, still has what was read before."""
        if _first_sequence(next_found) < self._position.sequence:
            return False
        while self._losses != self._reader.connections_lost:
            losses = self._reader.connections_lost
            if not await self._requests.is_same_log(mark_of(self.log, self._position)):
                return False
            self._losses = losses
        return True

    def commit(self, position: Position) -> None:
        is_read = (
            position.sequence <= self._position.sequence
        )  # otherwise it is of a log that was here before
        if is_read and position.sequence > self._target:
            self._target = position.sequence
            self._wake.set()

    def is_starved(self) -> bool:
        return False

    def next_sequence(self) -> int | None:
        return self._position.sequence

    def lag(self) -> int | None:
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
            # Another broker may have the address now: its channel would pass messages that are not stored.
            if not await self._requests.is_same_log(mark_of(self.log, self._position)):
                return
            await self._requests.move_channel(self._channel, target, self._incarnation)
        except LogReplaced:
            return
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
            if self._end < read_before or (self._incarnation is not None and self._has_other_identity):
                self._receiving.cancel()

    async def update_state(self) -> None:
        """Ask for the end of the log, and whether it may be read. Raises BrokerUnreachable, RequestRefused."""
        self._end, paused, incarnation = await self._requests.state(self._channel)
        self._has_other_identity = incarnation not in (None, self._incarnation)
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

    async def find(self) -> FoundLog | None:
        """Return the log; None: the broker cannot read logs, as an nsqd."""
        try:
            bounds = await self._call(self._log.bounds)
        except RequestRefused as exc:
            if exc.status != 404:
                raise
            return FoundLog(self._topic, self.address, None, self) if exc.is_without_topic else None
        return FoundLog(self._topic, self.address, bounds, self)

    async def known_as(self, bounds: Bounds, address: str, marks: Mapping[str, LogMark]) -> str | None:
        return await self._call(known_as, self._log, bounds, address, marks)

    async def open_channel(self, channel: str, *, creates_topic: bool) -> int:
        """Create the channel, and perhaps the topic, if it does not exist; return `BrokerLog.first_unfinished`."""
        try:
            return await self._call(self._log.first_unfinished, channel)
        except RequestRefused as exc:
            if not (creates_topic and exc.is_without_topic):
                raise
        # Not before it is needed: a token that may manage this channel only may not create topics.
        await self._call(self._log.create_topic)
        return await self._call(self._log.first_unfinished, channel)

    async def has_channel(self, channel: str) -> bool:
        return await self._call(self._log.has_channel, channel)

    async def first_for(self, channel: str, span: Span) -> int | None:
        """Return the first message of a span that is for a channel and can be read; None: there is none."""

        def find() -> int | None:
            for found in self._log.read(span):
                if isinstance(found, RecordBatch) and is_for(channel, found):
                    return max(span.first, found.base_sequence)
            return None

        try:
            return await self._call(find)
        except LogReplaced as exc:
            raise LogChanged(str(exc)) from exc

    async def drops_messages(self) -> bool:
        """See `BrokerLog.drops_messages`; False if the broker does not tell."""
        try:
            return await self._call(self._log.drops_messages)
        except RequestRefused:
            return False

    async def move_channel(self, channel: str, sequence: int, incarnation: str | None) -> None:
        """Move the channel, if the topic has this log; create it first if it was deleted."""
        try:
            await self._call(self._log.move_channel, channel, sequence, incarnation)
        except RequestRefused as exc:
            if exc.status != 404 or exc.text != "CHANNEL_NOT_FOUND":
                raise
            await self._call(self._log.open_channel, channel)
            await self._call(self._log.move_channel, channel, sequence, incarnation)

    async def is_same_log(self, mark: LogMark) -> bool:
        """Return whether this is the log of a mark, and still has what was read."""
        return await self._call(lambda: mark.continues(self._log, self._log.bounds()))

    async def missing_at(self, other: "LogRequests") -> int | None:
        """See `missing_at` of the library; None also if the other address cannot be asked.

        Raises:
            CopyDiffers: The other address has a copy, and both have got messages since.
            BrokerUnreachable, RequestRefused: This address cannot be asked.
        """

        def compare() -> int | None:
            try:
                found = FoundAt(self.address, self._log, self._log.bounds())
                return missing_at(FoundAt(other.address, other._log, other._log.bounds()), found)
            except CopyDiffers:
                raise
            except (BrokerUnreachable, RequestRefused) as exc:
                if exc.address == self.address:
                    raise
                return None
            except LogReplaced:  # one has lost messages meanwhile: the next call compares what is left
                return 0

        return await self._call(compare)

    async def state(self, channel: str) -> tuple[int, bool, str | None]:
        """Return the end of the log, whether the topic or the channel is paused, and the log's incarnation."""
        bounds = await self._call(self._log.bounds)
        return bounds.end, await self._call(self._log.is_paused, channel), bounds.incarnation


@asynccontextmanager
async def open_log_source(
    found: FoundLog,
    options: SourceOptions,
    stored: Position | None,
    reader_at: Callable[[int], TopicReader],
    *,
    creates_topic: bool,
    ask_again: Callable[[], Awaitable[Position | None]],
) -> AsyncIterator[LogSource]:
    """Open a log at the stored position, or at the channel's.

    If the channel is ahead of the stored position, somebody moved it, and the reader follows, unless the options refuse
    that: for example, its messages were moved to another broker.

    Args:
        stored: The position up to which everything is stored; None: the channel's.
        reader_at: Makes the reader that begins at a sequence.
        creates_topic: Whether to create a missing topic; otherwise RequestRefused is raised.
        ask_again: Returns `stored` as it is now.

    Raises:
        BrokerUnreachable, ConnectionFailed, RequestRefused: The broker cannot be reached, or refuses.
        ChannelAhead: See `SourceOptions.refuses_gaps`.
    """
    channel, requests = options.channel, found.requests
    is_known = stored is None and options.refuses_gaps and await requests.has_channel(channel)
    begin = await requests.open_channel(channel, creates_topic=creates_topic)
    if stored is not None and stored.sequence < begin and not options.channel_may_lead:
        stored = await ask_again()  # another program may have stored messages and moved the channel meanwhile
    behind: Position | None = None
    if stored is None:
        if is_known:
            _warn_of_passed(found, channel, begin)
    elif not await requests.is_same_log(mark_of(found.key, stored)):
        logger.warning(
            "topic %s at %s is not the one that was read before: it was recreated, or lost its last messages. "
            "Reading continues at the position of channel %s, sequence %d",
            *(found.topic, requests.address, channel, begin),
        )
    elif begin <= stored.sequence:
        begin, behind = stored.sequence, stored
    elif not options.channel_may_lead:
        await _check_gap(found, options, Span(stored.sequence, begin))
    async with reader_at(begin) as reader:
        source = LogSource(found, channel, reader)
        await source.update_state()  # a paused channel is not read at all
        if behind is not None:
            source.commit(behind)
        background = BackgroundTask()
        await background.open(source.run)
        try:
            yield source
        finally:
            await background.close()
            await source.close()


async def _check_gap(found: FoundLog, options: SourceOptions, passed: Span) -> None:
    """Warn if the channel has passed messages that are not stored. Raises ChannelAhead, see `SourceOptions`."""
    topic, channel, requests = found.topic, options.channel, found.requests
    first = await requests.first_for(channel, passed)
    if found.bounds is not None and (deleted := min(found.bounds.first, passed.end)) > passed.first:
        logger.warning(
            "channel %s/%s at %s has passed sequences %d to %d, retention has deleted them, and they are not stored. "
            "If a backup of what was stored has been restored, they are missing there",
            *(topic, channel, requests.address, passed.first, deleted - 1),
        )
    if first is None:
        return  # the others are for other channels only
    if options.refuses_gaps and not await requests.drops_messages():
        raise ChannelAhead(topic, channel, requests.address, first, passed.end)
    logger.warning(
        "channel %s/%s at %s is ahead of what is stored: sequences %d to %d are left out",
        *(topic, channel, requests.address, first, passed.end - 1),
    )


def _warn_of_passed(found: FoundLog, channel: str, begin: int) -> None:
    """Warn before the first messages are stored, if the channel has passed others."""
    # Nothing may be stored yet if there was nothing to copy since a new channel began at the end.
    if found.bounds is not None and found.bounds.first < begin < found.bounds.end:
        logger.warning(
            "none of the messages of topic %s at %s is known at the destination: channel %s has passed sequences %d to "
            "%d, and they are left out. If they were stored and lost, end the command, delete the topic at the "
            "destination, and move the channel back with 'qcli channel seek'",
            *(found.topic, found.requests.address, channel, found.bounds.first, begin - 1),
        )
