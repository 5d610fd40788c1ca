"""From publishes to the log: group commit, and the sync modes.

With `--sync=always` a topic's publishes gather while one write and sync of that topic runs in a thread; then all
of them go into the next: the more publishers wait, the more messages a sync carries. See `CommitThreads`.

With `--sync=interval`, and for ephemeral topics, a publish is written in the caller's turn, and syncs follow on a
schedule; what many clients publish in one round of the poller is one write. But what begins a new file waits for the
disk, and so goes the other way, and with it what comes meanwhile.

Publishers are told that something is stored before it is sent on: they can prepare the next meanwhile.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter

import trio

from ..log import LogError, RecordBatch, is_disk_full
from ..log.records import MAX_RECORD_BYTES, MAX_RECORD_MESSAGES, linked_records
from ..protocol import MessageSet
from .commit_threads import Commit, CommitThreads
from .errors import PublishRefused, TopicFull
from .figures.histogram import Histogram
from .options import BrokerOptions
from .publication import Publication
from .state.broker import MessageIds
from .state.note import is_about_messages
from .state.topic import Topic
from .storage.spare_room import SpareRoom

logger = logging.getLogger("trio_nsq.broker")

_SYNC_BYTES = 16 * 1024 * 1024
"""With `--sync=interval` so much is synced, however few messages that are: a file is synced before the next is begun,
and all publishers of its topic wait for that."""

_THREADS = 16
"""For syncs of logs, and new files of theirs, alone."""
_TURN_S = 0.005
"""Clients that publish again as soon as something is written let other tasks have their turn after so much time."""


@dataclass(slots=True)
class _Unsynced:
    """What was written to a log since its last sync: messages, and bytes of their records."""

    messages: int = 0
    size: int = 0


class Publisher:
    """Stores what is published. One for a broker.

    Args:
        options: The sync mode and its numbers.
        ids: Where message ids come from.
        nursery: Runs the commits. When it is cancelled, what was submitted is stored all the same.
        spare_room: Of the data folder.
        published: Called with a topic whenever messages were added to it. Their publishers have been told before,
            unless the topic may refuse messages.
        call_soon: Called in a thread, with a function and its arguments: calls it in the event loop, best in a round.
            None: trio does.

    Attributes:
        health: Empty, or what the last write of any log failed with, unless there was no room: see `SpareRoom`.
        append_duration: What writing to a log took each time, its sync included with `--sync=always`.
        sync_duration: What syncing a log took each time, where that is done by itself.
        sync_count: How often a log was brought to stable storage.
    """

    def __init__(
        self,
        options: BrokerOptions,
        ids: MessageIds,
        nursery: trio.Nursery,
        spare_room: SpareRoom,
        published: Callable[[Topic], None],
        call_soon: Callable[..., None] | None = None,
    ) -> None:
        self.health = ""
        self.append_duration = Histogram()
        self.sync_duration = Histogram()
        self.sync_count = 0
        self._options = options
        self._ids = ids
        self._nursery = nursery
        self._spare_room = spare_room
        self._published = published
        self._commits = CommitThreads(
            nursery,
            options.sync == "always",
            self._store,
            self._note_committed,
            call_soon or trio.lowlevel.current_trio_token().run_sync_soon,
        )
        self._threads = trio.CapacityLimiter(_THREADS)
        self._taking_ids = Lock()
        self._in_turn: dict[Topic, None] = {}  # what gathers there may be written in the caller's turn
        self._writing = self._writes_rest = False
        self._unsynced: dict[Topic, _Unsynced] = {}
        self._sync_soon = trio.Event()
        self._closed = False

    async def publish(
        self, topic: Topic, publications: Sequence[Publication], *, gather: bool = False
    ) -> None:
        """Store publications; when this returns, they are as safe as the sync mode says.

        Not a checkpoint when nothing has to be waited for, unless `gather`. Cancelling it does not take back what is
        being stored.

        Args:
            topic: Where to.
            publications: At least one.
            gather: Let one write store them and what other tasks publish in the same turn of the event loop.

        Raises:
            PublishRefused: Nothing of them was stored. TopicFull, if a limit of the topic's is the reason.
        """
        done = trio.Event()
        error: PublishRefused | None = None

        def then(reason: PublishRefused | None) -> None:
            nonlocal error
            error = reason
            done.set()

        self.submit(topic, publications, then, gather=gather)
        if gather and not done.is_set():
            await trio.lowlevel.cancel_shielded_checkpoint()
            self._write_gathered()
        if not done.is_set():
            await done.wait()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads here, and so would keep what was to be stored

    def submit(
        self,
        topic: Topic,
        publications: Sequence[Publication],
        then: Callable[[PublishRefused | None], None],
        *,
        gather: bool = False,
    ) -> None:
        """Have publications stored, and `then` called with None when they are, or with the reason why not.

        That may be before this returns. `then` must not raise. With `gather`, as in a round, the caller sees to it that
        what has gathered is written.

        Raises:
            PublishRefused: Nothing of them will be stored, nor `then` called. TopicFull, if a limit of the topic's
                is the reason.
        """
        if self._closed:
            raise PublishRefused("exiting")
        if (reason := self._spare_room.closed_because) and not topic.ephemeral:
            raise PublishRefused(reason)
        size = sum([publication.record_bytes for publication in publications])
        with self._commits.lock:
            if topic.may_refuse:
                self._find_room(topic, publications, size)
            self._commits.gather(topic, publications, size, then)
        if topic.ephemeral or self._options.sync == "interval":
            self._in_turn[topic] = None
            if not (self.in_round or gather):
                self._write_gathered()
        else:
            self._commits.start(topic)

    @property
    def in_round(self) -> bool:
        """What is submitted gathers for now."""
        return self._commits.waits

    def begin_round(self) -> None:
        """Let what is submitted gather: until `end_round`, or where it needs a thread until `start_commits`."""
        self._commits.waits = True

    def end_round(self) -> None:
        """Write what has gathered and needs no thread, and let every submit do so from now on."""
        self._write_gathered()
        self._commits.waits = False
        if self._commits.is_late:
            self.start_commits()

    def start_commits(self) -> None:
        """Have threads store what has gathered for them. To be called when nobody has anything more to send."""
        self._commits.begin()

    @property
    def is_busy(self) -> bool:
        """A thread is at some topic's log."""
        return self._commits.is_busy

    def _find_room(self, topic: Topic, publications: Sequence[Publication], size: int) -> None:
        """Raise TopicFull if there is no room for these, whose records have so many bytes; or PublishRefused."""
        if topic.held_back:
            raise PublishRefused(topic.held_back)
        messages = sum(publication.count for publication in publications)
        groups = self._commits.not_stored(topic)
        coming = sum(group.messages for group in groups), sum(group.size for group in groups)
        if reason := topic.why_full(messages, size, *coming):
            raise TopicFull(f"{reason}; nothing of it was stored")

    async def roll(self, topic: Topic) -> bool:
        """Let a topic's log begin a new file, also on a full disk; False if that failed."""
        return await self.in_thread(topic, partial(self._spare_room.use, topic.log.roll), alone=True)

    # ------------------------------------------------------------------ in the caller's turn

    def _write_gathered(self) -> None:
        """Write what has gathered where that waits for nothing.

        Whoever published it may publish the next meanwhile: that is written, too, or, when the turn is over, soon.
        """
        if self._writing:
            return  # called by one of those who published: what it published comes next, below
        self._writing = True
        turn_over_s = perf_counter() + _TURN_S
        try:
            while self._in_turn:
                topics, self._in_turn = self._in_turn, {}
                # Those who wait for an OK can send the next while there is more to do here.
                for topic in [topic for topic in topics if self._write_group(topic)]:
                    self._deliver(topic)
                if self._in_turn and perf_counter() > turn_over_s:
                    if not self._writes_rest:
                        self._writes_rest = True
                        self._nursery.start_soon(self._write_rest)
                    break
        finally:
            self._writing = False

    async def _write_rest(self) -> None:
        self._writes_rest = False
        self._write_gathered()

    def _write_group(self, topic: Topic) -> bool:
        """Write what has gathered for a topic, unless a thread does; whether there is something to deliver now."""
        group = self._commits.waiting(topic)
        if group is None:
            return False  # a thread writes it next, or has
        if not topic.ephemeral and topic.log.begins_file(group.size):
            self._commits.start(topic)
            return False
        commit = Commit(topic, self._commits.take(topic), sync=False)
        self._store(commit)
        return self._note_stored(commit)

    async def sync_on_schedule(self) -> None:
        """Sync what was written, after every so many messages or so much time; runs until cancelled."""
        while True:
            with trio.move_on_after(self._options.sync_timeout_ms / 1000):
                await self._sync_soon.wait()
            self._sync_soon = trio.Event()
            await self._sync_all()

    async def _sync_all(self) -> None:
        for topic in list(self._unsynced):
            await self._sync(topic)

    async def _sync(self, topic: Topic) -> bool:
        if (unsynced := self._unsynced.pop(topic, None)) is None:
            return True
        began_s, synced = perf_counter(), False
        try:
            synced = await self.in_thread(topic, topic.log.sync)
        finally:
            if not synced:  # also when it was cancelled
                self._add_unsynced(topic, unsynced.messages, unsynced.size)  # for the next time
        if synced:
            self.sync_duration.observe(perf_counter() - began_s)
            self.sync_count += 1
            self.health = ""
        return synced

    async def sync(self, topic: Topic) -> bool:
        """Return when what a topic has accepted is on stable storage; False if that failed, which is noted."""
        if self._options.sync == "always":
            return True
        await self.idle(topic)  # it may just be synced
        return await self._sync(topic)

    # ------------------------------------------------------------------ common

    def _records(self, topic: Topic, publications: Sequence[Publication]) -> list[RecordBatch]:
        """Records for these publications, from the end of the log on; neighbours share one while it is small.

        What is too large for one record has several, which recovery keeps together. But not if its note tells of each
        of its messages, in their order: there are few of those.
        """
        records: list[RecordBatch] = []
        timestamp_ns = time.time_ns()
        sequence = topic.log.next_sequence
        for together in _sharing_records(publications):
            first = together[0]
            sets: Sequence[MessageSet] = first.sets
            if len(together) > 1:
                sets = [MessageSet.join([publication.sets[0] for publication in together])]
            elif is_about_messages(first.note):
                sets = [MessageSet.join(sets)]
            else:
                sets = [
                    piece for large in sets for piece in large.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES)
                ]
            count = sum([len(messages.sizes) for messages in sets])
            with self._taking_ids:
                first_id = self._ids.take(count)
            record = RecordBatch(sequence, first_id, timestamp_ns, first.due_ns, sets[0], first.note)
            if len(sets) == 1:
                records.append(record)
            else:
                records += linked_records(record, sets[1:])
            sequence += count
        return records

    def _store(self, commit: Commit) -> None:
        try:
            if commit.topic.ephemeral:
                self._append(commit)
            elif reason := self._spare_room.begin_append():
                raise PublishRefused(reason)
            else:
                try:
                    self._append(commit)
                finally:
                    self._spare_room.end_append()
        except Exception as exc:
            commit.error = exc

    def _append(self, commit: Commit) -> None:
        records = self._records(commit.topic, commit.group.publications)
        began_s = perf_counter()
        commit.topic.log.append(records, sync=commit.sync)
        commit.took_s = perf_counter() - began_s
        commit.records = records

    def _note_committed(self, commits: Sequence[Commit]) -> None:
        stored: list[Topic] = []
        for commit in commits:
            self._commits.note_done(commit)
            if self._note_stored(commit):
                stored.append(commit.topic)
        for topic in stored:
            self._deliver(topic)

    def _note_stored(self, commit: Commit) -> bool:
        """Tell those who published; whether what they did is still to be sent on."""
        topic, error = commit.topic, None
        if commit.error is None:
            try:
                self._accept(commit)
            except Exception as exc:
                commit.error = exc
        if commit.error is not None:
            error = self._refusal(commit, commit.error)
            commit.error = None  # its traceback leads to the commit, and so would keep what was to be stored
        # Where there may be no room for what they publish next, consumers come first: they make some.
        first = error is None and topic.may_refuse
        if first:
            self._deliver(topic)
        commit.group.finish(error)
        return error is None and not first

    def _accept(self, commit: Commit) -> None:
        topic, records = commit.topic, commit.records
        if not topic.ephemeral:
            self.health = self._spare_room.failed_with = ""
            self.append_duration.observe(commit.took_s)
            if commit.sync:
                self.sync_count += 1
            else:
                messages = records[-1].next_sequence - records[0].base_sequence
                self._note_unsynced(topic, messages, sum([record.record_bytes for record in records]))
        topic.accept(records)

    def _deliver(self, topic: Topic) -> None:
        """Have what was stored sent on: it is stored, whatever comes of this."""
        try:
            self._published(topic)
        except Exception:
            logger.exception("%s: what was published could not be sent on", topic.name)

    def _note_unsynced(self, topic: Topic, messages: int, size: int) -> None:
        unsynced = self._add_unsynced(topic, messages, size)
        if unsynced.messages >= self._options.sync_every or unsynced.size >= _SYNC_BYTES:
            self._sync_soon.set()

    def _add_unsynced(self, topic: Topic, messages: int, size: int) -> _Unsynced:
        unsynced = self._unsynced.get(topic)
        if unsynced is None:
            unsynced = self._unsynced[topic] = _Unsynced()
        unsynced.messages += messages
        unsynced.size += size
        return unsynced

    def _refusal(self, commit: Commit, error: Exception) -> PublishRefused:
        topic = commit.topic
        if isinstance(error, PublishRefused):
            return error
        if isinstance(error, LogError):
            return self._failed(error, commit.group.size)
        # A mistake of ours: it ends neither the broker nor what comes next, and the publishers hear of it.
        logger.error("%s: a publish failed", topic.name, exc_info=error)
        return PublishRefused("internal error")

    def _failed(self, error: LogError, size: int = 0) -> PublishRefused:
        """Note an error; `size` is what was to be appended."""
        text = str(error)
        if text not in (self.health, self._spare_room.failed_with):
            logger.error("%s", text)
        if is_disk_full(error):
            self._spare_room.note_failed(text, size)
        else:
            self.health = text
        return PublishRefused(text)

    async def in_thread(self, topic: Topic, work: Callable[[], None], *, alone: bool = False) -> bool:
        """Do something to a topic's log in a thread, with no commit beside it.

        Args:
            topic: Whose log.
            work: What to do.
            alone: What is published meanwhile waits, with any sync mode.

        Returns:
            False if that failed; the error is noted in `health`.
        """
        self._write_gathered()
        await self._commits.take_over(topic, alone=alone)
        try:
            await trio.to_thread.run_sync(work, limiter=self._threads)
        except LogError as exc:
            self._failed(exc)
            return False
        finally:
            self._commits.release(topic)
        return True

    async def idle(self, topic: Topic) -> None:
        """Wait until no thread is at the topic's log; none is until the caller's next checkpoint."""
        self._write_gathered()
        await self._commits.idle(topic)

    def forget(self, topic: Topic) -> None:
        """Let go of a topic that is being deleted."""
        self._unsynced.pop(topic, None)

    async def close(self) -> None:
        """Refuse further publishes, and wait for those under way and for a last sync."""
        self._closed = True
        self._write_gathered()
        self.start_commits()
        await self._commits.all_idle()
        await self._sync_all()
        self._commits.end()


def _sharing_records(publications: Sequence[Publication]) -> Sequence[Sequence[Publication]]:
    """Neighbours that share a record: while it is small, and nothing is to be said of them that is not said of all."""
    if len(publications) == 1:
        return [publications]
    shares: list[list[Publication]] = []
    size = count = 0
    open_for_more = False
    for publication in publications:
        messages = publication.sets[0]
        plain = not (publication.due_ns or publication.note or len(publication.sets) > 1)
        size += len(messages.data)
        count += len(messages.sizes)
        if open_for_more and plain and size <= MAX_RECORD_BYTES and count <= MAX_RECORD_MESSAGES:
            shares[-1].append(publication)
        else:
            shares.append([publication])
            size, count = len(messages.data), len(messages.sizes)
            open_for_more = plain
    return shares
