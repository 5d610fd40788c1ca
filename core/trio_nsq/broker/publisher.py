"""From publishes to the log: group commit, and the sync modes.

With `--sync=always` a topic's publishes gather while one write and sync of that topic runs in a thread; then all
of them go into the next: the more publishers wait, the more messages a sync carries. With `--sync=interval`, and
for ephemeral topics, a publish is written at once, in the caller's turn, and syncs follow on a schedule. But what
begins a new file waits for the disk, and so goes the other way, and with it what comes meanwhile.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import trio

from ..log import LogError, RecordBatch
from ..log.records import HEADER_BYTES
from ..protocol import MessageSet
from .errors import PublishRefused, TopicFull
from .figures.histogram import Histogram
from .options import BrokerOptions
from .state.broker import MessageIds
from .state.topic import Topic

logger = logging.getLogger("trio_nsq.broker")

_MAX_RECORD_BYTES = 256 * 1024
"""Publishes that are stored together share a record up to this size: few records are cheap to write, read and
deliver, but damage costs a whole record."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What one command publishes.

    Attributes:
        messages: A set of messages.
        due_ns: When it may be delivered, Unix nanoseconds; 0: at once.
        note: What the broker has to know of it besides, see `note.py`; empty: nothing.
    """

    messages: MessageSet
    due_ns: int = 0
    note: bytes = b""

    @property
    def record_bytes(self) -> int:
        """What it takes in the log if it shares its record with none."""
        return HEADER_BYTES + len(self.messages.data) + len(self.note)


@dataclass(slots=True)
class _Group:
    """Publications of one topic that will be stored by one write."""

    publications: list[Publication] = field(default_factory=list)
    messages: int = 0  # counted for a topic that may be full
    size: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    error: PublishRefused | None = None


class Publisher:
    """Stores what is published. One for a broker.

    Args:
        options: The sync mode and its numbers.
        ids: Where message ids come from.
        nursery: Runs the commits; cancel it only after `close`.
        published: Called with a topic whenever messages were added to it.

    Attributes:
        health: Empty, or what the last write of any log failed with.
        append_duration: What writing to a log took each time, its sync included with `--sync=always`.
        sync_duration: What syncing a log took each time, where that is done by itself.
        sync_count: How often a log was brought to stable storage.
    """

    def __init__(
        self,
        options: BrokerOptions,
        ids: MessageIds,
        nursery: trio.Nursery,
        published: Callable[[Topic], None],
    ) -> None:
        self.health = ""
        self.append_duration = Histogram()
        self.sync_duration = Histogram()
        self.sync_count = 0
        self._options = options
        self._ids = ids
        self._nursery = nursery
        self._published = published
        self._gathering: dict[Topic, _Group] = {}
        # A thread may be at the topic's log; the event is set when it no longer is.
        self._busy: dict[Topic, trio.Event] = {}
        self._committing: dict[Topic, _Group | None] = {}  # those of them where it appends, and what
        self._unsynced: dict[Topic, int] = {}  # messages written since the last sync, by topic
        self._sync_soon = trio.Event()
        self._closed = False

    async def publish(self, topic: Topic, publications: Sequence[Publication]) -> None:
        """Store publications; when this returns, they are as safe as the sync mode says.

        Not a checkpoint when nothing has to be waited for. Cancelling it does not take back what is being stored.

        Raises:
            PublishRefused: Nothing of them was stored. TopicFull, if a limit of the topic's is the reason.
        """
        if self._closed:
            raise PublishRefused("exiting")
        messages = size = 0
        if topic.may_refuse:
            messages, size = self._find_room(topic, publications)
        if topic.ephemeral or (self._options.sync == "interval" and self._is_quick(topic, publications)):
            self._write_now(topic, publications)
            return
        group = self._gathering.get(topic)
        if group is None:
            group = self._gathering[topic] = _Group()
            if topic not in self._busy:
                self._start_commit(topic)
        group.publications += publications
        group.messages += messages
        group.size += size
        await group.done.wait()
        if group.error is not None:
            raise group.error

    def _find_room(self, topic: Topic, publications: Sequence[Publication]) -> tuple[int, int]:
        """How many messages and bytes of records these are. Raises TopicFull if there is no room."""
        messages = sum(len(publication.messages) for publication in publications)
        size = sum(publication.record_bytes for publication in publications)
        waiting = [g for g in (self._gathering.get(topic), self._committing.get(topic)) if g is not None]
        coming = sum(g.messages for g in waiting), sum(g.size for g in waiting)
        if reason := topic.why_full(messages, size, *coming):
            raise TopicFull(f"{reason}; nothing of it was stored")
        return messages, size

    async def roll(self, topic: Topic) -> bool:
        """Let a topic's log begin a new file; False if that failed."""
        await self.idle(topic)
        self._committing[topic] = None  # what is published meanwhile waits
        try:
            return await self.in_thread(topic, topic.log.roll)
        finally:
            self._committing.pop(topic, None)

    def _is_quick(self, topic: Topic, publications: Sequence[Publication]) -> bool:
        if topic in self._gathering or topic in self._committing:
            return False
        return not topic.log.begins_file(sum(publication.record_bytes for publication in publications))

    # ------------------------------------------------------------------ in a thread

    def _start_commit(self, topic: Topic) -> None:
        self._busy[topic] = trio.Event()
        self._nursery.start_soon(self._commit, topic)

    async def _commit(self, topic: Topic) -> None:
        """Store groups of one topic until none is left."""
        with trio.CancelScope(shield=True):  # bounded by the disk: publishers wait for an answer
            try:
                while (group := self._gathering.pop(topic, None)) is not None:
                    self._committing[topic] = group
                    await self._commit_group(topic, group)
            finally:
                self._committing.pop(topic, None)
                self._release(topic)

    def _release(self, topic: Topic) -> None:
        self._busy.pop(topic).set()
        if topic in self._gathering:
            self._start_commit(topic)

    async def _commit_group(self, topic: Topic, group: _Group) -> None:
        try:
            records = self._records(topic, group.publications)
            sync = self._options.sync == "always"
            began_s = perf_counter()
            await trio.to_thread.run_sync(partial(topic.log.append, records, sync=sync))
            self._committing[topic] = None
            self._stored(topic, records, perf_counter() - began_s, synced=sync)
        except LogError as exc:
            group.error = self._failed(exc)
        except Exception:
            # A mistake of ours: it ends neither the broker nor what comes next, and the publishers hear of it.
            logger.exception("%s: a publish failed", topic.name)
            group.error = PublishRefused("internal error")
        finally:
            group.done.set()

    # ------------------------------------------------------------------ in the caller's turn

    def _write_now(self, topic: Topic, publications: Sequence[Publication]) -> None:
        records = self._records(topic, publications)
        began_s = perf_counter()
        try:
            topic.log.append(records, sync=False)
        except LogError as exc:
            raise self._failed(exc) from exc
        self._stored(topic, records, perf_counter() - began_s, synced=False)

    async def sync_on_schedule(self) -> None:
        """Sync what was written, after every so many messages or so much time; runs until cancelled."""
        while True:
            with trio.move_on_after(self._options.sync_timeout_ms / 1000):
                await self._sync_soon.wait()
            self._sync_soon = trio.Event()
            await self._sync_all()

    async def _sync_all(self) -> None:
        for topic in list(self._unsynced):
            if not (count := self._unsynced.pop(topic, 0)):
                continue
            began_s = perf_counter()
            if await self.in_thread(topic, topic.log.sync):
                self.sync_duration.observe(perf_counter() - began_s)
                self.sync_count += 1
                self.health = ""
            else:
                self._unsynced[topic] = self._unsynced.get(topic, 0) + count  # for the next time

    # ------------------------------------------------------------------ common

    def _records(self, topic: Topic, publications: Sequence[Publication]) -> list[RecordBatch]:
        """Records for these publications, from the end of the log on; neighbours share one while it is small."""
        records: list[RecordBatch] = []
        timestamp_ns = time.time_ns()
        sequence = topic.log.next_sequence
        joined: list[MessageSet] = []
        size = 0

        def finish(due_ns: int, note: bytes) -> None:
            nonlocal sequence
            messages = MessageSet.join(joined)
            first_id = self._ids.take(len(messages))
            records.append(RecordBatch(sequence, first_id, timestamp_ns, due_ns, messages, note))
            sequence += len(messages)
            joined.clear()

        for index, publication in enumerate(publications):
            joined.append(publication.messages)
            size += len(publication.messages.data)
            following = publications[index + 1] if index + 1 < len(publications) else None
            if (
                following is None
                or publication.due_ns
                or following.due_ns
                or publication.note
                or following.note
                or size + len(following.messages.data) > _MAX_RECORD_BYTES
            ):
                finish(publication.due_ns, publication.note)
                size = 0
        return records

    def _stored(self, topic: Topic, records: Sequence[RecordBatch], took_s: float, *, synced: bool) -> None:
        if not topic.ephemeral:
            self.health = ""
            self.append_duration.observe(took_s)
            if synced:
                self.sync_count += 1
            else:
                self._note_unsynced(topic, sum(record.count for record in records))
        topic.accept(records)
        self._published(topic)

    def _note_unsynced(self, topic: Topic, messages: int) -> None:
        unsynced = self._unsynced[topic] = self._unsynced.get(topic, 0) + messages
        if unsynced >= self._options.sync_every:
            self._sync_soon.set()

    def _failed(self, error: LogError) -> PublishRefused:
        if self.health != str(error):
            logger.error("%s", error)
        self.health = str(error)
        return PublishRefused(str(error))

    async def in_thread(self, topic: Topic, work: Callable[[], None]) -> bool:
        """Do something to a topic's log in a thread, with no commit beside it.

        Returns:
            False if that failed; the error is noted in `health`.
        """
        await self.idle(topic)
        self._busy[topic] = trio.Event()
        try:
            await trio.to_thread.run_sync(work)
        except LogError as exc:
            self._failed(exc)
            return False
        finally:
            self._release(topic)
        return True

    async def idle(self, topic: Topic) -> None:
        """Wait until no thread is at the topic's log; none is until the caller's next checkpoint."""
        while (busy := self._busy.get(topic)) is not None:
            await busy.wait()

    def forget(self, topic: Topic) -> None:
        """Let go of a topic that is being deleted."""
        self._unsynced.pop(topic, None)

    async def close(self) -> None:
        """Refuse further publishes, and wait for those under way and for a last sync."""
        self._closed = True
        for topic in list(self._busy):
            await self.idle(topic)
        await self._sync_all()
