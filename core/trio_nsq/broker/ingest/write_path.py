"""The write path: from publishes to the log, for both sync modes.

The broker collects publications while it serves clients. At the end of the round, the event loop stores a topic's
publications with one write, or with several if they are large. The following steps are, always in this order:

1. Sync: with `--sync=always`, the write waits in the `SyncStage`, for the `LocalSync`. With `--sync=interval`, syncs
   follow a schedule and the next steps do not wait for them. In a cluster, the write waits for the other members in
   both modes. Ephemeral topics are neither synced nor replicated.
2. Commit: readers of the log can see the messages, and the topic accepts them.
3. Acknowledge: the producers get OK, and can prepare their next command.
4. Deliver.

If a sync fails, all messages written after the last good sync are removed from the log, and their producers get an
error. The removal itself is synced in the background, until that succeeds: before, a crash can bring them back.

Publications to a topic are collected while a new file of its log is created: see `Rotations`.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from math import inf
from time import perf_counter
from typing import Final, TypeAlias

import trio

from ...event_loop.reactor import Poller
from ...event_loop.retries import Delays
from ...log import LogError, RecordBatch, is_disk_full
from ...replication.barrier import ReplicationBarrier
from ..delivery import Deliverer
from ..errors import NotLeading, PublishRefused, TooFewInSync, TopicFull
from ..monitoring.histogram import Histogram
from ..options import BrokerOptions
from ..state.broker import MessageIds
from ..state.topic import Topic
from ..storage.disk_reserve import DiskReserve
from .local_sync import LocalSync, SyncJob
from .publication import Group, Publication, Write, records_for
from .rotations import Rotations
from .scheduled_syncs import ScheduledSyncs
from .sync_stage import LOCAL, MEMBERS, SyncStage
from .write_ahead import WriteAhead

Replicated: TypeAlias = tuple[Topic, int] | trio.Event
"""What waits for members: the write of a topic with this number, or a task."""

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_PATIENCE_S: Final = 5.0
_LARGE_BYTES: Final = 1024 * 1024
"""A group of this size gets no more publications, so that its producers send on while the next group is written:
bench/README.md, "Large bodies"."""


class WritePath:
    """Stores published messages. One per broker.

    Args:
        nursery: Runs the threads. If it is cancelled, submitted publications are still stored.
        poller: Publications submitted in its rounds are collected until the end of the round.
        delivery: Delivers messages added to a topic. Producers are acknowledged first, unless the topic may refuse
            messages.
        write_ahead: The write-ahead log, used with `--sync=always`; None: each topic's log is synced by itself.
        members: The other members of a cluster, or the archive, that an OK waits for; None: nothing.
        ahead_ns: Returns how far the system clock is ahead of the broker's, by which messages are due.

    Attributes:
        error: Why the last write or sync failed; empty if it succeeded. A full disk is in `DiskReserve.failed_with`.
        append_duration: Durations of writes to logs; with `--sync=always` they include the sync.
        sync_count: Number of successful syncs.
        local: The local sync.
        syncs: The schedule of `--sync=interval`.
        due: Topics with collected publications that can be written now.
        on_refused: Called with the topic of each refused publish, before its producer gets the answer.
    """

    def __init__(
        self,
        options: BrokerOptions,
        ids: MessageIds,
        nursery: trio.Nursery,
        disk_reserve: DiskReserve,
        poller: Poller,
        delivery: Deliverer,
        write_ahead: WriteAhead | None = None,
        members: ReplicationBarrier[Replicated] | None = None,
        ahead_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self.error: str = ""
        self.append_duration: Histogram = Histogram()
        self.sync_count: int = 0
        self._is_synced_first = options.sync == "always"
        self._pacing = options.pacing
        self._ids = ids
        self._nursery = nursery
        self._disk_reserve = disk_reserve
        self._poller = poller
        self._delivery = delivery
        self._ahead_ns = ahead_ns
        self._write_ahead = write_ahead if self._is_synced_first else None
        self._members = members
        if members is not None:
            members.on_reached = self._report_replicated
        self._stage = SyncStage(1 if members is None else 2)
        self.local: LocalSync = LocalSync(
            nursery, poller, self._complete_synced, options.pacing, write_ahead=self._write_ahead
        )
        self.syncs: ScheduledSyncs = ScheduledSyncs(options, self.local)
        self._rotations = Rotations(nursery, disk_reserve, self._resume)
        # Collected, not written; several groups if they are large. No list is empty.
        self._gathered: dict[Topic, list[Group]] = {}
        self.due: dict[Topic, None] = {}
        self.on_refused: Callable[[Topic], None] = lambda topic: None
        self._is_called = False  # a call of `write_gathered` is scheduled
        self._holds: dict[Topic, trio.Semaphore] = {}  # topics whose logs must not be written
        self._changes: dict[Topic, trio.Event] = {}  # set when a hold, a sync or a rotation of the topic ends
        self._cutting: set[Topic] = set()  # topics whose refused messages are being removed durably
        self._abandoned_as: type[NotLeading] = NotLeading
        self._closed = False
        self._closing = trio.Event()

    # ------------------------------------------------------------------ submitting

    async def publish(self, topic: Topic, publications: Sequence[Publication]) -> None:
        """As `submit`; returns when the publications are as durable as the sync mode says.

        Cancellation does not undo the write.

        Raises:
            PublishRefused: None of them was stored. TopicFull, if a limit of the topic is the reason.
        """
        done = trio.Event()
        refusals: list[PublishRefused] = []

        def on_complete(reason: PublishRefused | None) -> None:
            if reason is not None:
                refusals.append(reason)
            done.set()

        self.submit(topic, publications, on_complete)
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

        One write stores them together with those of other clients, at the end of this round or in the next one.

        Args:
            publications: At least one.
            on_complete: Is called after this method returns, and must not raise.

        Raises:
            PublishRefused: None of them will be stored, and `on_complete` is not called. TopicFull, if a limit of the
                topic is the reason.
        """
        if self._closed:
            self.refuse_unless_leading()
            raise self._refuse(topic, PublishRefused("exiting"))
        if self._members is not None and self._members.held_because and not topic.ephemeral:
            raise self._refuse(topic, TooFewInSync(self._members.held_because))
        if (reason := self._disk_reserve.closed_because) and not topic.ephemeral:
            raise self._refuse(topic, PublishRefused(reason))
        size = 0
        for publication in publications:
            size += publication.record_bytes
        if topic.may_refuse:
            self._check_limits(topic, publications, size)
        groups = self._gathered.get(topic)
        if groups is None:
            groups = self._gathered[topic] = [Group()]
            if topic not in self._holds:
                self.due[topic] = None
        elif groups[-1].size >= _LARGE_BYTES:
            groups.append(Group())
        group = groups[-1]
        group.publications += publications
        group.size += size
        group.on_complete.append(on_complete)
        if not self._poller.in_round:
            self._write_soon()

    def _check_limits(self, topic: Topic, publications: Sequence[Publication], size: int) -> None:
        """Raise TopicFull if publications with records of `size` bytes exceed a limit; PublishRefused if held back."""
        if topic.refuses_because:
            raise self._refuse(topic, PublishRefused(topic.refuses_because))
        messages = sum(publication.count for publication in publications)
        groups = [write.group for write in self._stage.waiting(topic)]
        groups += self._gathered.get(topic, ())
        coming = sum(group.messages for group in groups), sum(group.size for group in groups)
        if reason := topic.limits.why_full(messages, size, *coming):
            raise self._refuse(topic, TopicFull(f"{reason}; nothing of it was stored"))

    def _refuse(self, topic: Topic, refusal: PublishRefused) -> PublishRefused:
        """Report a refused publish to this topic."""
        self.on_refused(topic)
        return refusal

    @property
    def is_busy(self) -> bool:
        """Whether a thread uses any topic's log, or a write waits for members."""
        return self.local.is_busy or bool(self._holds) or self._waits_for_members

    @property
    def is_call_near(self) -> bool:
        """Whether a thread or a member syncs, and will probably report within `Pacing.nap_s`."""
        return self.local.is_call_near or self._waits_for_members

    @property
    def _waits_for_members(self) -> bool:
        return self._members is not None and self._members.is_waited_for

    # ------------------------------------------------------------------ writing

    def _write_soon(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._poller.call_soon(self._write_called)

    def _write_called(self) -> None:
        self._is_called = False
        self.write_gathered()

    def write_gathered(self) -> None:
        """Write collected publications, including those that producers submit on completion, for at most one turn."""
        self._check_leading()
        turn_over_s = perf_counter() + self._pacing.turn_s
        while self.due:
            topics, self.due = self.due, {}
            # Write and acknowledge first, deliver second: producers can prepare the next command meanwhile.
            for topic in [topic for topic in topics if self._write_group(topic)]:
                self._delivery.deliver_published(topic)
            if self.due and perf_counter() > turn_over_s:
                self._write_soon()
                break
        if not self._poller.in_round:
            self.local.begin()

    def _write_group(self, topic: Topic) -> bool:
        """Write a topic's collected publications; returns whether there are messages to deliver now."""
        group = self._gathered[topic][0]
        began_s = perf_counter()
        try:
            if topic.log.needs_rotation(group.size):
                if topic not in self._stage.topics:  # otherwise after the written ones are committed
                    self._nursery.start_soon(self._rotate_for_group, topic)
                    self._holds[topic] = trio.Semaphore(0)
                return False
            ahead_ns = self._ahead_ns()
            records = self._write(topic, group, ahead_ns)
        except Exception as exc:
            self._take_group(topic)
            self._sync_cut_soon(topic)
            group.complete(self._refusal(topic, exc, group.size))
            return False
        self._take_group(topic)
        write = Write(topic.log.writes, group, records, perf_counter() - began_s, ahead_ns)
        if topic.ephemeral:
            return self._commit(topic, write)
        if not self._is_synced_first:
            self.syncs.record_write(topic, records)
            if self._members is None:
                self.append_duration.observe(write.took_s)
                return self._commit(topic, write)
        self._stage.add(topic, write)
        if self._members is not None and not self._members.request((topic, write.number)):
            self._stage.reach(MEMBERS, topic, write.number)
        if self._is_synced_first:
            self.local.request(topic, begins=False)
            return False
        return self._commit_reached(topic, self._stage.reach(LOCAL, topic, write.number), 0.0)

    def _take_group(self, topic: Topic) -> None:
        """Remove the first of a topic's collected groups; the next one is due."""
        groups = self._gathered[topic]
        del groups[0]
        if groups:
            self.due[topic] = None
        else:
            del self._gathered[topic]

    def _write(self, topic: Topic, group: Group, ahead_ns: int) -> Sequence[RecordBatch]:
        if not topic.ephemeral and (reason := self._disk_reserve.begin_append()):
            raise PublishRefused(reason)
        try:
            records = records_for(group.publications, topic.log.written_sequence, self._ids, ahead_ns)
            topic.log.write(records)
        finally:
            if not topic.ephemeral:
                self._disk_reserve.end_append()
        return records

    # ------------------------------------------------------------------ committing

    def _complete_synced(self, job: SyncJob) -> None:
        """Commit, acknowledge and deliver synced writes, or remove them if the sync failed."""
        self._check_leading()
        delivering: list[Topic] = []
        for topic, (_, number) in job.serves.items():
            if job.error is not None:
                self._refuse_written(topic, job.error)
            else:
                self.sync_count += 1
                if self._commit_reached(topic, self._stage.reach(LOCAL, topic, number), job.took_s):
                    delivering.append(topic)
                if not self._is_synced_first:
                    self.error = ""
                    self.syncs.duration.observe(job.took_s)
            self._resume(topic)
        for topic in delivering:
            self._delivery.deliver_published(topic)
        if not self._poller.in_round:
            self.write_gathered()

    def _commit_reached(self, topic: Topic, writes: Sequence[Write], took_s: float) -> bool:
        """Commit the writes that every barrier has; returns whether there are messages to deliver."""
        to_deliver = False
        for write in writes:
            self.append_duration.observe(write.took_s + took_s)
            to_deliver |= self._commit(topic, write)
        return to_deliver

    def _commit(self, topic: Topic, write: Write) -> bool:
        """Commit and acknowledge a write; returns whether its messages are still to be delivered."""
        error: PublishRefused | None = None
        try:
            topic.log.commit(write.records[-1].next_sequence)
            if not topic.ephemeral:
                self.error = self._disk_reserve.failed_with = ""
            topic.accept(write.records, write.ahead_ns)
        except Exception as exc:
            error = self._refusal(topic, exc, write.group.size)
        # If the topic may be full, deliver before acknowledging, because consumers make room for the next publish.
        delivers_first = error is None and topic.may_refuse
        if delivers_first:
            self._delivery.deliver_published(topic)
        write.group.complete(error)
        return error is None and not delivers_first

    def _report_replicated(self, reached: Sequence[Replicated]) -> None:
        self._poller.call_in_round(partial(self._complete_replicated, reached))

    def _complete_replicated(self, reached: Sequence[Replicated]) -> None:
        """Commit, acknowledge and deliver writes that the members have, and wake who waits for them."""
        self._check_leading()
        numbers: dict[Topic, int] = {}
        for each in reached:
            if isinstance(each, trio.Event):
                each.set()
            else:
                topic, numbers[topic] = each
        for topic, number in numbers.items():
            if self._commit_reached(topic, self._stage.reach(MEMBERS, topic, number), 0.0):
                self._delivery.deliver_published(topic)
            self._resume(topic)
        if not self._poller.in_round:
            self.write_gathered()

    async def until_replicated(self) -> None:
        """Return when the other members of the cluster have all that was written so far; at once without a cluster.

        Raises:
            NotLeading: It is unknown whether they have it.
        """
        self.refuse_unless_leading()
        if self._members is not None:
            done = trio.Event()
            if self._members.request(done):
                await done.wait()
                self.refuse_unless_leading()

    # ------------------------------------------------------------------ the end of a leadership

    def _check_leading(self) -> None:
        """Before anything is acknowledged: `abandon` it if this member of a cluster may no longer lead."""
        if self._members is not None:
            self._members.check()

    def refuse_unless_leading(self) -> None:
        """Raise NotLeading if this member of a cluster may no longer lead."""
        self._check_leading()
        if self.is_fenced:
            assert self._members is not None
            raise self._abandoned_as(self._members.fenced_because)

    def refuse_changes(self, *, ephemeral: bool = False) -> None:
        """Raise PublishRefused if a topic or a channel must not be created, changed or deleted now."""
        self.refuse_unless_leading()
        if self._members is not None and self._members.held_because and not ephemeral:
            raise TooFewInSync(self._members.held_because)

    @property
    def is_fenced(self) -> bool:
        """Whether this was a leader of a cluster, and no longer leads."""
        return self._members is not None and bool(self._members.fenced_because)

    def abandon(self, error: NotLeading) -> None:
        """Refuse all publications that are not committed, and all later ones. What is written stays in the logs."""
        self._abandoned_as = type(error)
        self._closed = True
        self._closing.set()
        groups = [write.group for topic in self._stage.topics for write in self._stage.waiting(topic)]
        groups += chain.from_iterable(self._gathered.values())
        self._stage.topics.clear()
        self._gathered.clear()
        self.due.clear()
        for group in groups:
            group.complete(error)
        changes, self._changes = self._changes, {}
        for change in changes.values():
            change.set()

    # ------------------------------------------------------------------ failed syncs

    def _refuse_written(self, topic: Topic, error: Exception) -> None:
        """Remove the writes since the last good sync, and refuse their publications."""
        writes = self._stage.rollback(topic)
        if not writes:
            if isinstance(error, LogError):
                self._record_error(error)
            else:
                logger.error("%s: a sync failed", topic.name, exc_info=error)
            return
        topic.log.rollback()
        self._sync_cut_soon(topic)
        reason = self._refusal(topic, error, sum(write.group.size for write in writes))
        for write in writes:
            write.group.complete(reason)

    def _sync_cut_soon(self, topic: Topic) -> None:
        """Have refused messages removed from a topic's log durably, if they are not yet."""
        if topic.log.has_unsynced_cut and topic not in self._cutting:
            self._cutting.add(topic)
            self._nursery.start_soon(self._sync_cut, topic)

    async def _sync_cut(self, topic: Topic) -> None:
        """Remove refused messages durably; with growing pauses, until that succeeds or the topic is closed."""
        pauses = Delays(self._pacing.cut_retry_s, self._pacing.cut_retry_max_s)
        while not await self._try_sync_cut(topic) and not self._closed:
            with trio.move_on_after(pauses.next_s()):
                await self._closing.wait()
        if topic.log.has_unsynced_cut:
            logger.error("%s: a power cut may bring back refused messages: %s", topic.name, self.error)
        self._cutting.discard(topic)
        self._resume(topic)

    async def _try_sync_cut(self, topic: Topic) -> bool:
        """Remove refused messages, and sync that. Returns False if it must be tried again."""
        if topic not in self._holds:  # otherwise a new file is begun, after the last one is cut and synced
            try:
                topic.log.finish_cut()
            except LogError as exc:
                self._record_error(exc)
                return False
            if topic.log.has_unsynced_cut:
                await self.local.sync(topic, alone=True)
        return not topic.log.has_unsynced_cut

    def _refusal(self, topic: Topic, error: Exception, size: int) -> PublishRefused:
        """Return the answer to producers after storing `size` bytes failed."""
        if isinstance(error, PublishRefused):
            return self._refuse(topic, error)
        if isinstance(error, LogError):
            self._record_error(error, size)
            return self._refuse(topic, PublishRefused(str(error)))
        # A defect in the broker must not stop it, nor later publishes. The producers get the error.
        logger.error("%s: a publish failed", topic.name, exc_info=error)
        return self._refuse(topic, PublishRefused("internal error"))

    def _record_error(self, error: LogError, size: int = 0) -> None:
        """Log and record why a write of `size` bytes, or a sync, failed."""
        text = str(error)
        if text not in (self.error, self._disk_reserve.failed_with):
            logger.error("%s", text)
        if is_disk_full(error):
            self._disk_reserve.record_failure(text, size)
        else:
            self.error = text

    def _resume(self, topic: Topic) -> None:
        """Continue with a topic after a sync or a rotation of its log, or a hold on it, has ended."""
        if topic in self._gathered and topic not in self._holds:
            self.due[topic] = None
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

    async def rotate(self, topic: Topic) -> bool:
        """Begin a new file of a topic's log unless the last one is empty, even on a full disk; False if that failed.

        It also fails if the topic has writes that wait for members of a cluster.
        """
        self.write_gathered()
        try:
            # In a cluster, it may be long before followers have what is written.
            with trio.fail_after(inf if self._members is None else _PATIENCE_S):
                await self._hold(topic)
        except (NotLeading, trio.TooSlowError):
            return False
        files = topic.log.files
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if files and files[-1].next_sequence > files[-1].base_sequence:
                await self._rotate(topic, on_full_disk=True)
        except LogError as exc:
            self._record_error(exc)
            return False
        finally:
            self._release(topic)
        return True

    async def _rotate_for_group(self, topic: Topic) -> None:
        """Begin a file for the publications of a topic whose log is held."""
        error: Exception | None = None
        try:
            with trio.CancelScope(shield=True):  # submitted publications are stored even if cancelled
                await self._rotate(topic, on_full_disk=False)
        except Exception as exc:
            error = exc
        if error is not None:
            for group in self._gathered.pop(topic, ()):
                group.complete(self._refusal(topic, error, group.size))
        self._release(topic)

    async def _rotate(self, topic: Topic, *, on_full_disk: bool) -> None:
        """Sync a held log's last file, so that only the last one can be torn, and begin a new one.

        Raises as `Rotations.begin`.
        """
        log = topic.log
        log.finish_cut()
        needs_sync = log.unsynced_bytes > 0 or log.has_unsynced_cut
        if needs_sync and (error := await self.local.sync(topic, alone=True)) is not None:
            raise error
        while topic in self._rotations.finishing:
            await self._change(topic)
        await self._rotations.begin(topic, on_full_disk=on_full_disk)

    async def _hold(self, topic: Topic) -> None:
        """Take exclusive use of a topic's log: all writes are committed, and none follows before `_release`.

        Raises NotLeading: they are not committed any longer.
        """
        if topic in self._holds:
            await self._holds[topic].acquire()
        else:
            self._holds[topic] = trio.Semaphore(0)
            self.due.pop(topic, None)
        try:
            while topic in self._stage.topics:
                await self._change(topic)
            self.refuse_unless_leading()
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
        """Wait until a sync or a rotation of the topic's log, or the last hold on it, has ended."""
        await self._changes.setdefault(topic, trio.Event()).wait()

    @property
    def _in_use(self) -> tuple[Collection[Topic], ...]:
        """The topics that have collected or written publications, that are held, or whose last file is finished."""
        return self._gathered, self._stage.topics, self._holds, self._rotations.finishing

    async def until_idle(self, topic: Topic) -> None:
        """Wait until no message is being stored or synced. None is until the caller's next trio checkpoint."""
        while True:
            self.write_gathered()
            if topic in self.due:  # `write_gathered` stopped at the end of its turn
                await trio.lowlevel.checkpoint()
            elif any(topic in each for each in self._in_use):
                await self._change(topic)
            elif self.local.is_at(topic):
                await self.local.until_idle(topic)
            else:
                return

    async def until_stored(self) -> None:
        """Wait until the publications submitted so far are stored or refused."""
        for topic in dict.fromkeys([*self._gathered, *self._stage.topics, *self._holds]):
            await self.until_idle(topic)

    async def close(self) -> None:
        """Refuse further publishes, and wait for those in progress and for a last sync.

        After `abandon`, wait only until no thread uses a log.
        """
        self._closed = True
        self._closing.set()
        self.write_gathered()
        self.local.begin()
        while topic := next(chain.from_iterable(self._in_use), None):
            await self.until_idle(topic)
        if not self.is_fenced:
            await self.syncs.sync_all()
        for topic in list(self._cutting):
            while topic in self._cutting:
                await self._change(topic)
        if self._write_ahead is not None:
            await self._write_ahead.close(keeps=self.is_fenced)
        await self.local.until_all_idle()
        self.local.end()
