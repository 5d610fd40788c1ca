"""Reads topics' logs in threads, for channels and for HTTP clients, so that the event loop never waits for the disk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import trio

from ..http.messages import CutOff
from ..log import LogReadError, ReadWouldWaitError, RecordBatch
from ..log.disk.history import with_archives
from ..log.gaps import Gap, gaps
from ..log.records import RawRecord
from ..server.body_memory import PieceRoom
from .state.broker import Broker
from .state.message_store import Found, MessageStore, Wanted
from .state.topic import Topic

_THREADS = 8
"""Threads for channels, as many for HTTP clients, and as many that wait for the archive. A failing disk or archive
blocks them for seconds; publishes use others."""

_T = TypeVar("_T")
_Record = TypeVar("_Record", RecordBatch, RawRecord)


@dataclass(slots=True)
class _ColdRead:
    """A running read for one or more channels."""

    done: trio.Event = field(default_factory=trio.Event)
    found: Found | None = None


class ReaderPool:
    """Runs all reads of a broker's logs. One for a broker.

    Attributes:
        waiting: Number of HTTP clients that wait for messages. If it is 0, `wake` need not be called.
    """

    def __init__(self, broker: Broker) -> None:
        self.waiting: int = 0
        self._broker = broker
        self._threads = trio.CapacityLimiter(_THREADS)
        self._threads_for_channels = trio.CapacityLimiter(_THREADS)
        self._threads_for_archives = trio.CapacityLimiter(_THREADS)
        # Channels at the same position share a read.
        self._under_way: dict[tuple[MessageStore, Wanted], _ColdRead] = {}
        self._grown: dict[Topic, trio.Event] = {}

    # ------------------------------------------------------------------ for channels

    async def read_wanted(self, store: MessageStore, wanted: Wanted) -> Found:
        """Read messages from a topic's log in a thread. Errors are in the result, not raised."""
        work = partial(store.read, wanted)
        found = await trio.to_thread.run_sync(
            work, limiter=self._threads_for_channels, abandon_on_cancel=True
        )
        return await self._wait_for_archive(work) if isinstance(found.error, ReadWouldWaitError) else found

    async def _wait_for_archive(self, work: Callable[[], _T]) -> _T:
        """Run `work`, which reads what only the archive has, in a thread of those that wait for it."""
        return await trio.to_thread.run_sync(
            partial(with_archives, work), limiter=self._threads_for_archives, abandon_on_cancel=True
        )

    async def fetch(self, store: MessageStore, wanted: Wanted) -> Found:
        """Read messages that channels want from a topic's log. Disk errors are in the result, not raised."""
        key = store, wanted
        if (read := self._under_way.get(key)) is not None:
            await read.done.wait()
            if read.found is not None:
                return read.found
        read = self._under_way[key] = _ColdRead()
        try:
            found = read.found = await self.read_wanted(store, wanted)
            if self._broker.serves_store(store):
                store.remember_read(found.ahead or ())
                again = {id(batch): batch for batch in found.again.values() if batch is not None}
                store.remember_read(again.values())
        finally:
            if self._under_way.get(key) is read:
                del self._under_way[key]
            read.done.set()
        return found

    # ------------------------------------------------------------------ for HTTP clients

    async def call(self, topic: Topic, work: Callable[[], _T]) -> _T:
        """Run `work`, which reads a topic's log, in a thread. Raises LogReadError."""
        if topic.ephemeral:  # its log is in memory and not thread-safe
            await trio.lowlevel.checkpoint()
            return work()
        try:
            return await trio.to_thread.run_sync(work, limiter=self._threads)
        except ReadWouldWaitError:
            return await self._wait_for_archive(work)

    async def read(self, topic: Topic, work: Callable[[], _T]) -> _T:
        """As `call`, for a streaming response. Raises CutOff: the log cannot be read, or the topic is deleted."""
        try:
            found = await self.call(topic, work)
        except LogReadError as exc:
            self.check(topic)
            raise CutOff(str(exc)) from exc
        self.check(topic)
        return found

    def wake(self, topic: Topic) -> None:
        """Wake the HTTP clients that wait for messages of a topic: it has grown, or it is deleted."""
        if (event := self._grown.pop(topic, None)) is not None:
            event.set()

    def check(self, topic: Topic) -> None:
        """Raise CutOff if the topic is no longer served: the records read from it are not valid."""
        if not self._broker.serves(topic):
            raise CutOff(f"topic {topic.name} was deleted, or the broker is stopping")

    async def wait_past(self, topic: Topic, sequence: int) -> None:
        """Wait until the topic's log has this sequence. May return earlier."""
        if topic.log.next_sequence <= sequence:
            event = self._grown.get(topic)
            if event is None:
                event = self._grown[topic] = trio.Event()
            self.waiting += 1
            try:
                await event.wait()
            finally:
                self.waiting -= 1
                if not self.waiting:
                    self._grown.clear()  # of topics that did not grow, and may be deleted


@dataclass(slots=True)
class Reading(Generic[_Record]):
    """Reads a range of a topic's log in pieces, and can wait for messages at its end.

    Attributes:
        read_log: Returns records, starting with the one that holds a sequence: `Log.read` or `Log.read_raw`.
        position: The next sequence.
        end: The sequence after the last; None for no end.
        wait_s: How long to wait for messages at the end of the log.
        held: How much memory a record takes until the client has it.
        room: For large records.
    """

    readers: ReaderPool
    topic: Topic
    read_log: Callable[[int], list[_Record]]
    position: int
    end: int | None
    wait_s: float
    held: Callable[[_Record], int]
    room: PieceRoom | None

    async def next(self) -> list[_Record | Gap]:
        """Return the next records and gaps, in order; an empty list at the end or after `wait_s` without a message.

        The first and the last record may reach beyond the range. Raises CutOff.
        """
        while self.end is None or self.position < self.end:
            known = self.topic.log.next_sequence
            if self.position < known:
                return await self._read(known if self.end is None else min(known, self.end))
            if self.wait_s:
                self.readers.check(self.topic)  # no event will wake it after the topic was deleted
            with trio.move_on_after(self.wait_s) as waiting:
                await self.readers.wait_past(self.topic, self.position)
            if waiting.cancelled_caught or not self.wait_s:
                break
            self.readers.check(self.topic)
        return []

    async def _read(self, known: int) -> list[_Record | Gap]:
        """Read the next records; the log ends at `known` or later."""
        work = partial(self.readers.read, self.topic, partial(self.read_log, self.position))
        records = await (work() if self.room is None else self.room.read(work, self.held))
        found: list[_Record | Gap] = []
        for record in records:
            if self.end is not None and record.base_sequence >= self.end:
                records = []  # the rest of the range is a gap
                break
            found += self._missing(record.base_sequence)
            found.append(record)
            self.position = record.next_sequence
        if not records:
            found += self._missing(known)
            self.position = max(self.position, known)
        return found

    def _missing(self, up_to: int) -> list[Gap]:
        return gaps(self.position, up_to, self.topic.log.first_sequence)
