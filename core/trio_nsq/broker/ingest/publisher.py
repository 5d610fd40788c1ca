"""The publisher: one write path to the log for both sync modes.

The broker collects publications while it serves clients. At the end of the round, the event loop stores a topic's
publications with one write, or with several if they are large. The following steps are, always in this order:

1. Sync: with `--sync=always`, a thread syncs the log, see `GroupCommitter`. With `--sync=interval`, syncs follow a
   schedule and the next steps do not wait for them. Ephemeral topics are not synced.
2. Commit: readers of the log can see the messages, and the topic accepts them.
3. Acknowledge: the producers get OK, and can prepare their next command.
4. Deliver.

If a sync fails, all messages written after the last good sync are removed from the log, and their producers get an
error.

Creating a file of a log blocks on the disk, so a thread does it. Publications to the topic are collected meanwhile.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

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
from .write_ahead import WriteAhead

logger = logging.getLogger("trio_nsq.broker")

_THREADS: Final = 16
"""Threads for creating files of logs only."""
_LARGE_BYTES: Final = 1024 * 1024
"""A group of this size gets no more publications, so that its producers send on while the next group is written:
bench/README.md, "Large bodies"."""


class Publisher:
    """Stores published messages. One per broker.

    Args:
        nursery: Runs the threads. If it is cancelled, submitted publications are still stored.
        poller: Publications submitted in its rounds are collected until the end of the round.
        delivery: Delivers messages added to a topic. Producers are acknowledged first, unless the topic may refuse
            messages.
        write_ahead: The write-ahead log, used with `--sync=always`; None: each topic's log is synced by itself.

    Attributes:
        error: Why the last write or sync failed; empty if it succeeded. A full disk is in `SpareRoom.failed_with`.
        append_duration: Durations of writes to logs; with `--sync=always` they include the sync.
        sync_count: Number of successful syncs.
        syncs: The schedule of `--sync=interval`.
    """

    def __init__(
        self,
        options: BrokerOptions,
        ids: MessageIds,
        nursery: trio.Nursery,
        spare_room: SpareRoom,
        poller: Poller,
        delivery: Delivery,
        write_ahead: WriteAhead | None = None,
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
        self._write_ahead = write_ahead if self._is_synced_first else None
        self._committer = GroupCommitter(
            nursery, poller, self._complete_synced, options.pacing, write_ahead=self._write_ahead
        )
        if write_ahead is not None:
            write_ahead.sync_alone = self._committer.request_alone
        self.syncs = ScheduledSyncs(options, self._committer)
        self._threads = trio.CapacityLimiter(_THREADS)
        # Collected, not written; several groups if they are large. No deque is empty.
        self._gathered: dict[Topic, deque[Group]] = {}
        self._due: dict[Topic, None] = {}  # topics in `_gathered` that can be written now
        self._is_called = False  # a call of `_write_gathered` is scheduled
        self._written: dict[
            Topic, deque[Write]
        ] = {}  # writes that wait for a sync, in order; no deque is empty
        self._holds: dict[Topic, trio.Semaphore] = {}  # topics whose logs must not be written
        self._changes: dict[Topic, trio.Event] = {}  # set when a hold or a sync of the topic ends
        self._closed = False

    # ------------------------------------------------------------------ submitting

    async def publish(self, topic: Topic, publications: Sequence[Publication]) -> None:
        """Store publications, and return when they are as durable as the sync mode says.

        One write stores them together with those that other tasks publish in the same turn of the event loop.
        Cancellation does not undo the write.

        Args:
            publications: At least one.

        Raises:
            PublishRefused: None of them was stored. TopicFull, if a limit of the topic is the reason.
        """
        done = trio.Event()
        refusals: list[PublishRefused] = []

        def on_complete(reason: PublishRefused | None) -> None:
            if reason is not None:
                refusals.append(reason)
            done.set()

        self._gather(topic, publications, on_complete)
        await trio.lowlevel.cancel_shielded_checkpoint()
        self._write_gathered()
        await done.wait()
        if refusals:
            raise refusals.pop()  # not kept: the error's traceback keeps this frame, and with it the messages

    def submit(
        self,
        topic: Topic,
        publications: Sequence[Publication],
        on_complete: Callable[[PublishRefused | None], None],
    ) -> None:
        """Submit publications. Calls `on_complete` with None when they are stored, or with the error if that fails.

        `on_complete` is called after this method returns, and must not raise.

        Raises:
            PublishRefused: None of them will be stored, and `on_complete` is not called. TopicFull, if a limit of the
                topic is the reason.
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
        size = 0
        for publication in publications:
            size += publication.record_bytes
        if topic.may_refuse:
            self._check_limits(topic, publications, size)
        groups = self._gathered.get(topic)
        if groups is None:
            groups = self._gathered[topic] = deque([Group()])
            if topic not in self._holds:
                self._due[topic] = None
        elif groups[-1].size >= _LARGE_BYTES:
            groups.append(Group())
        group = groups[-1]
        group.publications += publications
        group.size += size
        group.on_complete.append(on_complete)

    def _check_limits(self, topic: Topic, publications: Sequence[Publication], size: int) -> None:
        """Raise TopicFull if publications with records of `size` bytes exceed a limit; PublishRefused if held back."""
        if topic.held_back:
            raise PublishRefused(topic.held_back)
        messages = sum(publication.count for publication in publications)
        groups = [write.group for write in self._written.get(topic, ())]
        groups += self._gathered.get(topic, ())
        coming = sum(group.messages for group in groups), sum(group.size for group in groups)
        if reason := topic.limits.why_full(messages, size, *coming):
            raise TopicFull(f"{reason}; nothing of it was stored")

    # ------------------------------------------------------------------ rounds

    def end_round(self) -> None:
        """Write the publications of this round, then deliver. See `Rounds`."""
        self._write_gathered()
        if self._committer.is_late:
            self._committer.begin()
        self._delivery.end_round()

    def idle(self) -> bool:
        """Make the requested syncs, or begin them, and make deliveries that could wait. See `Rounds`."""
        if self._due:
            self._write_gathered()
        # With --sync=interval, no client waits for syncs, which store more.
        if self._is_synced_first and not self._delivery.has_work and self._committer.sync_in_loop():
            return True
        self._committer.begin()
        return self._delivery.idle()

    def before_sleep(self) -> bool:
        """Make deliveries that wait for answers of their consumers. See `Rounds`."""
        return self._delivery.before_sleep()

    @property
    def is_busy(self) -> bool:
        """Whether a thread uses any topic's log."""
        return self._committer.is_busy or bool(self._holds)

    @property
    def is_call_near(self) -> bool:
        """See `Rounds`."""
        return self._committer.is_call_near

    # ------------------------------------------------------------------ writing

    def _write_soon(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._poller.call_soon(self._write_called)

    def _write_called(self) -> None:
        self._is_called = False
        self._write_gathered()

    def _write_gathered(self) -> None:
        """Write collected publications, including those that producers submit on completion, for at most one turn."""
        turn_over_s = perf_counter() + self._turn_s
        while self._due:
            topics, self._due = self._due, {}
            # Write and acknowledge first, deliver second: producers can prepare the next command meanwhile.
            for topic in [topic for topic in topics if self._write_group(topic)]:
                self._delivery.deliver_published(topic)
            if self._due and perf_counter() > turn_over_s:
                self._write_soon()
                break
        if not self._poller.in_round:
            self._committer.begin()

    def _write_group(self, topic: Topic) -> bool:
        """Write a topic's collected publications; returns whether there are messages to deliver now."""
        group = self._gathered[topic][0]
        if topic.log.begins_file(group.size):
            if topic not in self._written:  # otherwise after the written ones are committed
                self._nursery.start_soon(self._begin_file, topic)
                self._holds[topic] = trio.Semaphore(0)
            return False
        self._take_group(topic)
        if topic in self._gathered:
            self._due[topic] = None
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
        self._committer.request(topic, begins=False)
        return False

    def _take_group(self, topic: Topic) -> Group:
        """Remove and return the first of a topic's collected groups."""
        groups = self._gathered[topic]
        group = groups.popleft()
        if not groups:
            del self._gathered[topic]
        return group

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
        """Commit, acknowledge and deliver synced writes, or remove them if the sync failed."""
        delivering: list[Topic] = []
        for result in results:
            topic = result.topic
            if result.error is None:
                self.sync_count += 1
                if self._commit_synced(result):
                    delivering.append(topic)
            else:
                self._refuse_written(topic, result.error)
            if self._write_ahead is not None and not result.is_ahead:
                self._write_ahead.record_sync(topic, result.writes, result.error)
            if not self._is_synced_first:
                if result.error is None:
                    self.error = ""
                self.syncs.record_sync(result)
            self._resume(topic)
        for topic in delivering:
            self._delivery.deliver_published(topic)
        if not self._poller.in_round:
            self._write_gathered()

    def _commit_synced(self, result: Synced) -> bool:
        """Commit the writes that a sync has served; returns whether there are messages to deliver."""
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
        """Commit and acknowledge a write; returns whether its messages are still to be delivered."""
        error: PublishRefused | None = None
        try:
            topic.log.commit(write.records[-1].next_sequence)
            if not topic.ephemeral:
                self.error = self._spare_room.failed_with = ""
            topic.accept(write.records)
        except Exception as exc:
            error = self._refusal(topic, exc, write.group.size)
        # If the topic may be full, deliver before acknowledging, because consumers make room for the next publish.
        delivers_first = error is None and topic.may_refuse
        if delivers_first:
            self._delivery.deliver_published(topic)
        write.group.complete(error)
        return error is None and not delivers_first

    def _refuse_written(self, topic: Topic, error: Exception) -> None:
        """Remove the writes since the last good sync, and refuse their publications."""
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
        """Return the answer to producers after storing `size` bytes failed."""
        if isinstance(error, PublishRefused):
            return error
        if isinstance(error, LogError):
            self._record_error(error, size)
            return PublishRefused(str(error))
        # A defect in the broker must not stop it, nor later publishes. The producers get the error.
        logger.error("%s: a publish failed", topic.name, exc_info=error)
        return PublishRefused("internal error")

    def _record_error(self, error: LogError, size: int = 0) -> None:
        """Log and record why a write of `size` bytes, or a sync, failed."""
        text = str(error)
        if text not in (self.error, self._spare_room.failed_with):
            logger.error("%s", text)
        if is_disk_full(error):
            self._spare_room.record_failure(text, size)
        else:
            self.error = text

    def _resume(self, topic: Topic) -> None:
        """Continue with a topic after a sync of its log or a hold on it has ended."""
        if topic in self._gathered and topic not in self._holds:
            self._due[topic] = None
        if (change := self._changes.pop(topic, None)) is not None:
            change.set()

    async def sync(self, topic: Topic) -> bool:
        """Return when all messages of a topic are on stable storage; False if that failed, which is logged."""
        return self._is_synced_first or await self.syncs.sync(topic)

    def forget(self, topic: Topic) -> None:
        """Forget a topic that was deleted."""
        self.syncs.forget(topic)
        if self._write_ahead is not None:
            self._write_ahead.forget(topic)

    # ------------------------------------------------------------------ exclusive use of a log

    async def roll(self, topic: Topic) -> bool:
        """Begin a new file of a topic's log, even on a full disk; False if that failed."""
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
        """Begin a file, in a thread, for the publications of a topic whose log is held."""
        error: Exception | None = None
        try:
            with trio.CancelScope(shield=True):  # submitted publications are stored even if cancelled
                await trio.to_thread.run_sync(self._begin_file_now, topic, limiter=self._threads)
        except Exception as exc:
            error = exc
        if error is not None:
            for group in self._gathered.pop(topic, ()):
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
        """Take exclusive use of a topic's log: all writes are committed, and none follows before `_release`."""
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
        """Hand a topic's log to the next waiting task, or write the collected publications."""
        if self._holds[topic].statistics().tasks_waiting:
            self._holds[topic].release()
            return
        del self._holds[topic]
        self._resume(topic)
        if not self._poller.in_round:
            self._write_soon()

    async def _change(self, topic: Topic) -> None:
        """Wait until a sync of the topic's log, or the last hold on it, has ended."""
        await self._changes.setdefault(topic, trio.Event()).wait()

    async def until_idle(self, topic: Topic) -> None:
        """Wait until no message is being stored or synced. None is until the caller's next trio checkpoint."""
        while True:
            self._write_gathered()
            if topic in self._due:  # `_write_gathered` stopped at the end of its turn
                await trio.lowlevel.checkpoint()
            elif topic in self._gathered or topic in self._written or topic in self._holds:
                await self._change(topic)
            elif self._committer.is_at(topic):
                await self._committer.until_idle(topic)
            else:
                return

    async def until_stored(self) -> None:
        """Wait until the publications submitted so far are stored or refused."""
        for topic in dict.fromkeys([*self._gathered, *self._written, *self._holds]):
            await self.until_idle(topic)

    async def close(self) -> None:
        """Refuse further publishes, and wait for those in progress and for a last sync."""
        self._closed = True
        self._write_gathered()
        self._committer.begin()
        while topic := next(iter([*self._gathered, *self._written, *self._holds]), None):
            await self.until_idle(topic)
        await self.syncs.sync_all()
        if self._write_ahead is not None:
            await self._write_ahead.close()
        await self._committer.until_all_idle()
        self._committer.end()
