"""From publishes to the log: one write path for both sync modes.

Publications of a topic gather while clients are served. At the end of the round the event loop writes what has gathered
for a topic with one write. Then, always in this order, what was written is

1. synced: with `--sync=always` a thread does that, see `GroupCommitter`. With `--sync=interval` the next steps do not
   wait for it: syncs follow a schedule. Ephemeral topics are not synced;
2. committed: readers of the log see it, and the topic takes it over;
3. acknowledged: its publishers are told, and can prepare the next meanwhile;
4. delivered.

When a sync fails, nothing that was written after the last good one is acknowledged or delivered: it is taken back.

A new file of a log waits for the disk. So a thread makes it, and what is published to the topic meanwhile gathers.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

import trio

from ...log import LogError, RecordBatch, is_disk_full
from ...reactor import Poller
from ..delivery import Delivery
from ..errors import PublishRefused, TopicFull
from ..monitoring.histogram import Histogram
from ..options import BrokerOptions
from ..state.broker import MessageIds
from ..state.topic import Topic
from ..storage.spare_room import SpareRoom
from .group_commit import GroupCommitter, Synced
from .publication import Group, Publication, Write, records_for
from .scheduled_syncs import ScheduledSyncs

logger = logging.getLogger("trio_nsq.broker")

_THREADS = 16
"""For new files of logs, alone."""


class Publisher:
    """Stores what is published. One for a broker.

    Args:
        nursery: Runs the threads. When it is cancelled, what was submitted is stored all the same.
        poller: In its rounds, what is submitted gathers until the end of the round.
        delivery: Told whenever messages were added to a topic. Their publishers have been told before, unless the topic
            may refuse messages.

    Attributes:
        error: Why the last write or sync failed; empty if it succeeded. A full disk is in `SpareRoom.failed_with`.
        append_duration: What a write to a log took each time, its sync included with `--sync=always`.
        sync_count: How often a log was brought to stable storage.
        syncs: Those of `--sync=interval`.
    """

    def __init__(
        self,
        options: BrokerOptions,
        ids: MessageIds,
        nursery: trio.Nursery,
        spare_room: SpareRoom,
        poller: Poller,
        delivery: Delivery,
    ) -> None:
        self.error = ""
        self.append_duration = Histogram()
        self.sync_count = 0
        self._is_synced_first = options.sync == "always"
        self._turn_s = options.pacing.turn_s
        self._ids = ids
        self._nursery = nursery
        self._spare_room = spare_room
        self._poller = poller
        self._delivery = delivery
        self._committer = GroupCommitter(nursery, poller, self._complete_synced, options.pacing)
        self.syncs = ScheduledSyncs(options, self._committer)
        self._threads = trio.CapacityLimiter(_THREADS)
        self._gathered: dict[Topic, Group] = {}  # not written
        self._due: dict[Topic, None] = {}  # what has gathered there can be written
        self._is_called = False  # `_write_gathered` is going to be
        self._written: dict[Topic, deque[Write]] = {}  # waits for a sync, in order; none is empty
        self._holds: dict[Topic, trio.Semaphore] = {}  # nothing is written to these logs
        self._changes: dict[Topic, trio.Event] = {}  # set when a hold or a sync of the topic ends
        self._closed = False

    # ------------------------------------------------------------------ submitting

    async def publish(self, topic: Topic, publications: Sequence[Publication]) -> None:
        """Store publications; when this returns, they are as safe as the sync mode says.

        One write stores them and what other tasks publish in the same turn of the event loop. Cancelling it does not
        take back what is being stored.

        Args:
            publications: At least one.

        Raises:
            PublishRefused: Nothing of them was stored. TopicFull, if a limit of the topic's is the reason.
        """
        done = trio.Event()
        error: PublishRefused | None = None

        def on_complete(reason: PublishRefused | None) -> None:
            nonlocal error
            error = reason
            done.set()

        self._gather(topic, publications, on_complete)
        await trio.lowlevel.cancel_shielded_checkpoint()
        self._write_gathered()
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
        on_complete: Callable[[PublishRefused | None], None],
    ) -> None:
        """Have publications stored, and `on_complete` called with None when they are, or with the reason why not.

        It is called after this has returned, and must not raise.

        Raises:
            PublishRefused: Nothing of them will be stored, nor `on_complete` called. TopicFull, if a limit of the
                topic's is the reason.
        """
        self._gather(topic, publications, on_complete)
        if not self._poller.in_round:
            self._write_soon()

    def _gather(
        self,
        topic: Topic,
        publications: Sequence[Publication],
        on_complete: Callable[[PublishRefused | None], None],
    ) -> None:
        if self._closed:
            raise PublishRefused("exiting")
        if (reason := self._spare_room.closed_because) and not topic.ephemeral:
            raise PublishRefused(reason)
        size = sum([publication.record_bytes for publication in publications])
        if topic.may_refuse:
            self._find_room(topic, publications, size)
        group = self._gathered.get(topic)
        if group is None:
            group = self._gathered[topic] = Group()
            if topic not in self._holds:
                self._due[topic] = None
        group.publications += publications
        group.size += size
        group.on_complete.append(on_complete)

    def _find_room(self, topic: Topic, publications: Sequence[Publication], size: int) -> None:
        """Raise TopicFull if there is no room for these, whose records have so many bytes; or PublishRefused."""
        if topic.held_back:
            raise PublishRefused(topic.held_back)
        messages = sum(publication.count for publication in publications)
        groups = [write.group for write in self._written.get(topic, ())]
        if topic in self._gathered:
            groups.append(self._gathered[topic])
        coming = sum(group.messages for group in groups), sum(group.size for group in groups)
        if reason := topic.limits.why_full(messages, size, *coming):
            raise TopicFull(f"{reason}; nothing of it was stored")

    # ------------------------------------------------------------------ rounds

    def end_round(self) -> None:
        """Clients had their turn: write what they published, then deliver. See `Rounds`."""
        self._write_gathered()
        if self._committer.is_late:
            self._committer.begin()
        self._delivery.end_round()

    def idle(self) -> bool:
        """No client has anything more to send: have threads sync what was written, and deliver what could wait."""
        if self._due:
            self._write_gathered()
        self._committer.begin()
        return self._delivery.idle()

    @property
    def is_busy(self) -> bool:
        """Whether a thread uses some topic's log."""
        return self._committer.is_busy or bool(self._holds)

    # ------------------------------------------------------------------ writing

    def _write_soon(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._poller.call_soon(self._write_called)

    def _write_called(self) -> None:
        self._is_called = False
        self._write_gathered()

    def _write_gathered(self) -> None:
        """Write what has gathered, and what its publishers publish when they hear of it, while the turn lasts."""
        turn_over_s = perf_counter() + self._turn_s
        while self._due:
            topics, self._due = self._due, {}
            # Those who wait for an OK can send the next while there is more to do here.
            for topic in [topic for topic in topics if self._write_group(topic)]:
                self._delivery.deliver_published(topic)
            if self._due and perf_counter() > turn_over_s:
                self._write_soon()
                return

    def _write_group(self, topic: Topic) -> bool:
        """Write what has gathered for a topic; whether there is something to deliver now."""
        group = self._gathered[topic]
        if topic.log.begins_file(group.size):
            if topic not in self._written:  # else when that is committed
                self._nursery.start_soon(self._begin_file, topic)
                self._holds[topic] = trio.Semaphore(0)
            return False
        del self._gathered[topic]
        began_s = perf_counter()
        try:
            records = self._write(topic, group)
        except Exception as exc:
            group.complete(self._refusal(topic, exc, group.size))
            return False
        write = Write(topic.log.writes, group, records, perf_counter() - began_s)
        if topic.ephemeral:
            return self._commit(topic, write)
        if not self._is_synced_first:
            self.syncs.record_write(topic, records)
            self.append_duration.observe(write.took_s)
            return self._commit(topic, write)
        self._written.setdefault(topic, deque()).append(write)
        self._committer.request(topic)
        return False

    def _write(self, topic: Topic, group: Group) -> Sequence[RecordBatch]:
        if not topic.ephemeral and (reason := self._spare_room.begin_append()):
            raise PublishRefused(reason)
        try:
            records = records_for(group.publications, topic.log.written_sequence, self._ids)
            topic.log.write(records)
        finally:
            if not topic.ephemeral:
                self._spare_room.end_append()
        return records

    # ------------------------------------------------------------------ committing

    def _complete_synced(self, results: Sequence[Synced]) -> None:
        """Commit, acknowledge and deliver what was synced, or take it back."""
        delivering: list[Topic] = []
        for result in results:
            topic = result.topic
            if result.error is None:
                self.sync_count += 1
                if self._commit_synced(result):
                    delivering.append(topic)
            else:
                self._refuse_written(topic, result.error)
            if not self._is_synced_first:
                if result.error is None:
                    self.error = ""
                self.syncs.record_sync(result)
            self._go_on(topic)
        for topic in delivering:
            self._delivery.deliver_published(topic)
        if not self._poller.in_round:
            self._write_gathered()

    def _commit_synced(self, result: Synced) -> bool:
        """Commit the writes that a sync has served; whether there is something to deliver."""
        topic, writes = result.topic, self._written.get(result.topic)
        to_deliver = False
        while writes and writes[0].number <= result.writes:
            write = writes.popleft()
            if not writes:
                del self._written[topic]
            self.append_duration.observe(write.took_s + result.took_s)
            to_deliver |= self._commit(topic, write)
        return to_deliver

    def _commit(self, topic: Topic, write: Write) -> bool:
        """Let readers see a write, and acknowledge it; whether it is still to be delivered."""
        error: PublishRefused | None = None
        try:
            topic.log.commit(write.records[-1].next_sequence)
            if not topic.ephemeral:
                self.error = self._spare_room.failed_with = ""
            topic.accept(write.records)
        except Exception as exc:
            error = self._refusal(topic, exc, write.group.size)
        # Where there may be no room for what they publish next, consumers come first: they make some.
        first = error is None and topic.may_refuse
        if first:
            self._delivery.deliver_published(topic)
        write.group.complete(error)
        return error is None and not first

    def _refuse_written(self, topic: Topic, error: Exception) -> None:
        """A sync failed: refuse what was written since the last good one."""
        writes = self._written.pop(topic, ())
        if not writes:
            if isinstance(error, LogError):
                self._record_error(error)
            else:
                logger.error("%s: a sync failed", topic.name, exc_info=error)
            return
        topic.log.take_back()
        reason = self._refusal(topic, error, sum(write.group.size for write in writes))
        for write in writes:
            write.group.complete(reason)

    def _refusal(self, topic: Topic, error: Exception, size: int) -> PublishRefused:
        """Return the answer to publishers if storing so many bytes failed."""
        if isinstance(error, PublishRefused):
            return error
        if isinstance(error, LogError):
            self._record_error(error, size)
            return PublishRefused(str(error))
        # A defect in the broker: it ends neither the broker nor what comes next, and the publishers hear of it.
        logger.error("%s: a publish failed", topic.name, exc_info=error)
        return PublishRefused("internal error")

    def _record_error(self, error: LogError, size: int = 0) -> None:
        """Log and remember why a write of so many bytes, or a sync, failed."""
        text = str(error)
        if text not in (self.error, self._spare_room.failed_with):
            logger.error("%s", text)
        if is_disk_full(error):
            self._spare_room.record_failure(text, size)
        else:
            self.error = text

    def _go_on(self, topic: Topic) -> None:
        """Continue with a topic after a sync of its log or a hold on it has ended."""
        if topic in self._gathered and topic not in self._holds:
            self._due[topic] = None
        if (change := self._changes.pop(topic, None)) is not None:
            change.set()

    async def sync(self, topic: Topic) -> bool:
        """Return when what a topic has accepted is on stable storage; False if that failed, which is logged."""
        return self._is_synced_first or await self.syncs.sync(topic)

    # ------------------------------------------------------------------ a log of one's own

    async def roll(self, topic: Topic) -> bool:
        """Let a topic's log begin a new file, also on a full disk; False if that failed."""
        self._write_gathered()
        await self._hold(topic)
        try:
            await trio.to_thread.run_sync(self._spare_room.use, topic.log.roll, limiter=self._threads)
        except LogError as exc:
            self._record_error(exc)
            return False
        finally:
            self._release(topic)
        return True

    async def _begin_file(self, topic: Topic) -> None:
        """Have a thread begin a file for what has gathered for a topic, whose log is held."""
        error: Exception | None = None
        try:
            with trio.CancelScope(shield=True):  # what was submitted is stored
                await trio.to_thread.run_sync(self._begin_file_now, topic, limiter=self._threads)
        except Exception as exc:
            error = exc
        if error is not None and (group := self._gathered.pop(topic, None)) is not None:
            group.complete(self._refusal(topic, error, group.size))
        self._release(topic)

    def _begin_file_now(self, topic: Topic) -> None:
        if reason := self._spare_room.begin_append():
            raise PublishRefused(reason)
        try:
            topic.log.begin_file()
        finally:
            self._spare_room.end_append()

    async def _hold(self, topic: Topic) -> None:
        """Have a topic's log: all that was written is committed, and nothing is written before `_release`."""
        if topic in self._holds:
            await self._holds[topic].acquire()
        else:
            self._holds[topic] = trio.Semaphore(0)
            self._due.pop(topic, None)
        try:
            while topic in self._written:
                await self._change(topic)
        except BaseException:
            self._release(topic)
            raise

    def _release(self, topic: Topic) -> None:
        """Let the next in line have a topic's log, or write what has gathered."""
        if self._holds[topic].statistics().tasks_waiting:
            self._holds[topic].release()
            return
        del self._holds[topic]
        self._go_on(topic)
        if not self._poller.in_round:
            self._write_soon()

    async def _change(self, topic: Topic) -> None:
        """Wait until a sync of the topic's log, or the last hold on it, has ended."""
        await self._changes.setdefault(topic, trio.Event()).wait()

    async def until_idle(self, topic: Topic) -> None:
        """Wait until nothing is being stored or synced; none is until the caller's next checkpoint."""
        while True:
            self._write_gathered()
            if topic in self._due:  # the turn was over
                await trio.lowlevel.checkpoint()
            elif topic in self._gathered or topic in self._written or topic in self._holds:
                await self._change(topic)
            elif self._committer.is_at(topic):
                await self._committer.until_idle(topic)
            else:
                return

    async def close(self) -> None:
        """Refuse further publishes, and wait for those under way and for a last sync."""
        self._closed = True
        self._write_gathered()
        self._committer.begin()
        while topic := next(iter([*self._gathered, *self._written, *self._holds]), None):
            await self.until_idle(topic)
        await self.syncs.sync_all()
        await self._committer.until_all_idle()
        self._committer.end()
