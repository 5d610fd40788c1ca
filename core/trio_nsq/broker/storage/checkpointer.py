"""The checkpointer: writes the topics' states and the reserved ids, which a restart needs in addition to the logs."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EIO
from functools import partial
from itertools import takewhile
from operator import attrgetter
from typing import Any, TypeVar

import trio

from ...log import LogError
from ..errors import DeletedError, NotLeading, PublishRefused, SaveError
from ..state.broker import Broker, MessageIds
from ..state.channel import Channel
from ..state.topic import Topic
from .data_folder import ID_RESERVE, DataFolder, SavedCheckpoint
from .retention import RetentionManager

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_T = TypeVar("_T")

_THREADS = 16
"""Threads for saves only, so that saves do not wait for other work."""
_WRITERS_AT_THE_END = 8
"""Concurrent saves at shutdown, when syncs share disk work. While clients are served, one save leaves them the disk."""
_IDS = ""
"""The reserved ids among the errors, which are by topic; no topic has this name."""
_CLOCK_STEP_NS = 1_000_000_000
"""After a smaller step of the system clock, the states on the disk are left as they are."""
_TOPICS_AT_ONCE = 100
"""Topics examined before the event loop serves other tasks."""


@dataclass(slots=True, eq=False)
class _Change:
    """A pending change of a topic; arguments as for `Checkpointer.change`.

    Attributes:
        only_creates: The change creates `channels`, and does nothing else.
        done: The change was made or refused.
        error: Why it was refused.
        result: What `change` returned for the topic itself.
    """

    change: Callable[[Topic], object]
    channels: Iterable[str]
    check: Callable[[], object]
    then: Callable[[], object]
    with_others: bool
    only_creates: bool = False
    done: bool = False
    error: Exception | None = None
    result: Any = None

    def run_check(self) -> None:
        try:
            self.check()
        except Exception as exc:
            self.refuse(exc)

    def try_on(self, copy: Topic) -> None:
        try:
            self.check()
            self.change(copy)
        except Exception as exc:
            self.refuse(exc)

    def make(self, topic: Topic) -> None:
        if not self.done:
            self.done = True
            try:
                self.result = self.change(topic)
                self.then()
            except Exception as exc:
                self.error = exc

    def refuse(self, error: Exception) -> None:
        if not self.done:
            self.done, self.error = True, error


def _copy_with(topic: Topic, changes: Sequence[_Change]) -> Topic:
    """Return a copy of a topic after these changes; those that cannot be made are refused."""
    copy = topic.copy({name for each in changes for name in each.channels})
    for change in changes:
        if not change.done:
            change.try_on(copy)
    return copy


def _first_of(changes: Sequence[_Change]) -> Sequence[_Change]:
    """Return the changes that the next write saves: the first, and the following ones that may share its write."""
    if not changes[0].with_others:
        return changes[:1]
    return list(takewhile(attrgetter("with_others"), changes))


class Checkpointer:
    """Saves topics: at once if a caller waits for it, the others on a schedule.

    Args:
        ids: The message ids; the checkpointer reserves more before they are used up.
        now_ns: Returns the time by the clock of the messages' timestamps, Unix nanoseconds.
        rotate, archive_retention_ms: See `RetentionManager`.
        ahead_ns: Returns how far that clock is ahead of the one of due times.
        sync: Syncs a topic's log; returns whether that succeeded, and logs errors.
        replicate: Returns when the other members of a cluster have what is on disk. Raises NotLeading.
        refuse: Raises PublishRefused if a topic must not be changed now; `ephemeral`, if an ephemeral one must not.
    """

    def __init__(
        self,
        broker: Broker,
        folder: DataFolder,
        ids: MessageIds,
        now_ns: Callable[[], int],
        rotate: Callable[[Topic], Awaitable[bool]],
        sync: Callable[[Topic], Awaitable[bool]],
        replicate: Callable[[], Awaitable[None]],
        refuse: Callable[..., None],
        archive_retention_ms: int = 0,
        ahead_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._errors: dict[str, str] = {}  # of what was not written since: by topic, or _IDS
        self._sync = sync
        self._replicate = replicate
        self._refuse = refuse
        self._threads = trio.CapacityLimiter(_THREADS)
        self._disk_reserve = folder.disk_reserve
        self.retention: RetentionManager = RetentionManager(
            now_ns, rotate, lambda: self._disk_reserve.is_short, archive_retention_ms
        )
        self._now_ns = now_ns
        self._ahead_ns = ahead_ns
        self._clock_offset_ns = self._measure_clock()
        self._broker = broker
        self._folder = folder
        self._ids = ids
        self._reserving = trio.Lock()
        self._saved: dict[Topic, int] = {}  # the version of the state last saved
        self._extendable: set[Topic] = set()  # what the file has was saved by this broker, and is complete
        # Names of topics to save although they have not changed: a save failed, or files may be deleted.
        self._due: set[str] = set()
        self._locks: dict[Topic, trio.Lock] = {}
        self._changes: dict[Topic, list[_Change]] = {}  # waiting for the lock, in its order

    @property
    def error(self) -> str:
        """An error of something whose last write failed; empty if everything could be written."""
        return next(iter(self._errors.values()), "")

    # ------------------------------------------------------------------ one topic

    async def save_new(self, topic: Topic) -> None:
        """As `save`, unless that was done before. Raises SaveError."""
        if topic in self._broker.never_saved:
            await self._save_version(topic)
        await self._until_replicated(topic)

    async def change(
        self,
        topic: Topic,
        change: Callable[[Topic], _T],
        *,
        channels: Iterable[str] = (),
        check: Callable[[], object] = lambda: None,
        then: Callable[[], object] = lambda: None,
        with_others: bool = False,
        only_creates: bool = False,
        locked: bool = False,
    ) -> _T:
        """Change a topic durably: make the change in a copy and save its state, then make it in the topic.

        Args:
            topic: The topic. If it is ephemeral, nothing is written.
            change: Changes the topic, or a copy of it. May refuse by an exception, before it changes anything.
            channels: The names of the channels that it may change, add or remove; `topic.channels`: all, whichever
                there are when the change is made.
            check: May refuse the change, too; called before it is saved, and not afterwards.
            then: Called after the change of the topic, before any other task runs.
            with_others: One write may save this change together with other such changes.
            only_creates: The change creates the channels, and does nothing else: it may be saved behind the last state.
            locked: The caller has `locked` the topic.

        Returns:
            The result of the change of the topic. No other state of the topic is saved before it.

        Raises:
            SaveError: The state cannot be saved; nothing has changed.
            DeletedError: The topic is deleted; nothing has changed.
        """
        try:
            self._refuse(ephemeral=topic.ephemeral)
        except PublishRefused as exc:
            raise SaveError(str(exc)) from exc
        pending = _Change(change, channels, check, then, with_others, only_creates)
        if topic.ephemeral:
            self._check_exists(topic)
            _copy_with(topic, [pending])  # may refuse the change
            pending.make(topic)
        elif locked:
            await self._save(topic, [pending])
        else:
            await self._make(topic, pending)
        if pending.error is not None:
            raise pending.error
        result: _T = pending.result
        return result

    async def _make(self, topic: Topic, change: _Change) -> None:
        """Make a change after the earlier ones, or refuse it."""
        changes = self._changes.setdefault(topic, [])
        changes.append(change)
        try:
            async with self.locked(topic):
                while not change.done:
                    self._check_exists(topic)
                    with suppress(SaveError):  # each of these changes has the error
                        await self._save(topic, _first_of([each for each in changes if not each.done]))
        finally:
            changes.remove(change)
            if not changes:
                del self._changes[topic]

    def _check_exists(self, topic: Topic) -> None:
        if self._broker.topics.get(topic.name) is not topic:
            raise DeletedError(topic.name)

    async def change_channel(
        self,
        channel: Channel,
        change: Callable[[Channel], _T],
        *,
        check: Callable[[], object] = lambda: None,
        then: Callable[[], object] = lambda: None,
        with_others: bool = False,
        locked: bool = False,
    ) -> _T:
        """Change a channel durably; arguments, result and errors as of `change`."""
        topic = self._broker.existing_topic_of(channel)

        def check_both() -> None:
            self._broker.existing_topic_of(channel)
            check()

        return await self.change(
            topic,
            lambda each: change(each.counterpart(channel)),
            channels=[channel.name],
            check=check_both,
            then=then,
            with_others=with_others,
            locked=locked,
        )

    async def save(self, topic: Topic) -> None:
        """Return when the topic's state, current or newer, is on disk, also of the other members of a cluster.

        Raises:
            SaveError: The state cannot be saved. The error is logged, and the next checkpoint retries. Or this member
                of a cluster no longer leads.
        """
        await self._save_version(topic)
        await self._until_replicated(topic)

    async def _until_replicated(self, topic: Topic) -> None:
        if not topic.ephemeral:
            try:
                await self._replicate()
            except NotLeading as exc:
                raise SaveError(str(exc)) from exc

    async def _save_version(self, topic: Topic) -> None:
        """Return when the topic's state, current or newer, is on this disk. Followers get it before what follows.

        One write serves all callers that wait for the same version. It also deletes files that the log no longer
        needs; if that fails, the error is logged and the next checkpoint retries.

        Raises:
            SaveError: The state cannot be saved. The error is logged, and the next checkpoint retries.
        """
        version = topic.version.number
        if topic.ephemeral:
            return
        async with self.locked(topic):
            is_there = self._broker.topics.get(topic.name) is topic
            if is_there and (self._saved.get(topic, -1) < version or topic.name in self._due):
                await self._save(topic)

    async def _save(self, topic: Topic, changes: Sequence[_Change] = ()) -> None:
        """Save the state of a topic that is `locked`, with these changes, and make the changes."""
        is_extendable = topic in self._extendable and topic.can_save_additions
        is_extendable &= (
            not self._broker.stopping
        )  # a stop leaves whole states, which earlier versions can read
        only_creates = is_extendable and bool(changes) and all(each.only_creates for each in changes)
        self._extendable.discard(topic)
        saved: SavedCheckpoint | None = None
        try:
            if not (only_creates and await self._append(topic, changes)):
                saved = await self._write(topic, changes)
        except BaseException as exc:  # if cancelled, nothing was written
            self._saved.pop(topic, None)
            self._due.add(topic.name)
            if not isinstance(exc, Exception):
                raise
            if not isinstance(exc, OSError):  # a defect in the broker must not stop it, nor the next save
                logger.exception("topic %s: internal error", topic.name)
            reason = exc.strerror if isinstance(exc, OSError) else "internal error"
            text = f"cannot save the state of topic {topic.name}: {reason}"
            self._report_error(topic.name, text)
            for change in changes:
                change.refuse(SaveError(text))
            raise SaveError(text) from exc
        if changes:
            try:
                with trio.CancelScope(shield=True):  # what is saved must become true
                    await self._until_replicated(topic)
            except SaveError as exc:
                for change in changes:
                    change.refuse(exc)
                raise
        self._broker.never_saved.discard(topic)
        for change in changes:
            change.make(topic)
            # Save again: the topic changed after the checkpoint, and the previous state lacks the change.
            self._due.add(topic.name)
        self._extendable.add(topic)
        if saved is not None:
            topic.saved(saved)
            await self._discard(topic, saved)

    async def _write(self, topic: Topic, changes: Sequence[_Change]) -> SavedCheckpoint:
        """Write the state of a topic with these changes."""
        await self.retention.maintain(topic)
        self._saved[topic] = topic.version.number
        self._broker.changed.discard(topic.name)
        self._due.discard(topic.name)
        checkpoint = (_copy_with(topic, changes) if changes else topic).checkpoint(self._ahead_ns())
        for _ in checkpoint.encode():
            await trio.lowlevel.checkpoint()
        # If a batch number survived a power cut without its messages, the batch would count as published.
        if checkpoint.names_batches and not await self._sync(topic):
            raise OSError(EIO, "its log cannot be synced")
        save = partial(self._folder.save, topic.name, checkpoint)
        return await trio.to_thread.run_sync(save, limiter=self._threads)

    async def _append(self, topic: Topic, changes: Sequence[_Change]) -> bool:
        """Write channels that these changes create behind the topic's state: what that takes does not grow with it.

        Returns False if that fails, because the file may end with a part of it: the whole state must be written.
        """
        for change in changes:
            change.run_check()
        addition = topic.addition(name for each in changes if not each.done for name in each.channels)
        if addition.names:
            append = partial(self._folder.append_to_state, topic.name, addition.encode())
            try:
                await trio.to_thread.run_sync(append, limiter=self._threads)
            except OSError:
                return False
        return True

    async def _discard(self, topic: Topic, saved: SavedCheckpoint) -> None:
        """Delete files that a topic's log no longer needs. If that fails, the next checkpoint retries."""
        try:
            next_check_ns = await self.retention.discard(topic, saved, self._now_ns())
        except BaseException as exc:
            self._due.add(topic.name)
            if not isinstance(exc, Exception):
                raise
            if not isinstance(exc, LogError):  # a defect in the broker must not stop it
                logger.exception("topic %s: internal error", topic.name)
            self._report_error(topic.name, str(exc) if isinstance(exc, LogError) else "internal error")
        else:
            self.retention.schedule.watch(topic.name, next_check_ns)
            self._errors.pop(topic.name, None)

    def locked(self, topic: Topic) -> trio.Lock:
        """Return a lock for `async with` that prevents saves of a topic; acquiring it waits for a save in progress."""
        return self._locks.setdefault(topic, trio.Lock())

    def forget(self, topic: Topic) -> None:
        self._saved.pop(topic, None)
        self._extendable.discard(topic)
        self._locks.pop(topic, None)
        self._errors.pop(topic.name, None)
        self.retention.forget(topic.name)

    def _report_error(self, what: str, text: str) -> None:
        if self._errors.get(what) != text:
            logger.error("%s", text)
        self._errors[what] = text

    # ------------------------------------------------------------------ all topics

    async def save_on_schedule(self, interval_s: float) -> None:
        """Save changed topics at this interval, or longer if a save takes longer; runs until cancelled."""
        took_s = 0.0
        while True:
            await trio.sleep(max(interval_s, took_s))
            started_s = trio.current_time()
            for step in (
                self._mark_after_clock_step,
                self._mark_due,
                self._mark_reclaimable,
                partial(self._save_changed, 1),
                self._reclaim_disk_reserve,
            ):
                try:
                    await step()
                except Exception:
                    # A defect in the broker must not stop the other steps; the next checkpoint retries.
                    logger.exception("a checkpoint step failed; the next checkpoint retries")
            took_s = trio.current_time() - started_s

    async def _reclaim_disk_reserve(self) -> None:
        """After the disk was full: check whether it has space again."""
        if not self._disk_reserve.is_well:
            await trio.to_thread.run_sync(self._disk_reserve.reclaim, limiter=self._threads)

    async def _mark_reclaimable(self) -> None:
        """On a disk that is full, or nearly: mark topics for saving if that lets the broker delete their files."""
        await trio.to_thread.run_sync(self._disk_reserve.measure, limiter=self._threads)
        if not self._disk_reserve.is_short:
            return
        for number, topic in enumerate(list(self._broker.topics.values())):
            if not topic.ephemeral and self.retention.has_room_to_give(topic):
                self._due.add(topic.name)
            if number % _TOPICS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    async def _mark_after_clock_step(self) -> None:
        """After the system clock was set: mark all topics for saving.

        Their states have due times by the system clock of that time. Their times of retention are other ones, too.
        """
        offset_ns = self._measure_clock()
        if abs(offset_ns - self._clock_offset_ns) >= _CLOCK_STEP_NS:
            self._clock_offset_ns = offset_ns
            self._due.update(self._broker.topics)

    def _measure_clock(self) -> int:
        """Return the system clock minus the machine's monotonic one: a jump of trio's clock is no step."""
        return self._now_ns() - time.perf_counter_ns()

    async def _mark_due(self) -> None:
        """Mark scheduled topics for saving if files can be deleted. Checks first, because a save takes milliseconds."""
        for name in self.retention.schedule.take_all_due(self._now_ns()):
            topic = self._broker.topics.get(name)
            if topic is None or name in self._broker.changed or name in self._due:
                continue
            async with self.locked(topic):
                is_there = self._broker.topics.get(name) is topic
                try:
                    if is_there and not topic.ephemeral and await self.retention.has_work(topic):
                        self._due.add(name)
                except Exception:
                    # A defect in the broker must not stop the others. The save that follows reports it.
                    logger.exception("topic %s: retention failed", name)
                    self._due.add(name)

    async def save_all(self) -> None:
        self._due.update(self._broker.topics)
        await self._save_changed(_WRITERS_AT_THE_END, with_unused=True)
        await self._reserve_ids(
            self._ids.next
        )  # if this fails, the earlier reservation is above every id in use

    async def _save_changed(self, writers: int, *, with_unused: bool = False) -> None:
        names = iter(self._broker.changed | self._due)

        async def work() -> None:
            for name in names:
                topic = self._broker.topics.get(name)
                if topic is None or topic.ephemeral:
                    self._due.discard(name)
                    self._errors.pop(name, None)
                    continue
                if self._broker.is_unused(topic) and not with_unused:
                    continue  # if its request is refused, it is forgotten, unless it is saved
                try:
                    await self._save_version(topic)
                except SaveError:
                    pass  # logged; the next checkpoint retries

        async with trio.open_nursery() as nursery:
            for _ in range(writers):
                nursery.start_soon(work)
        if self._ids.next + ID_RESERVE // 2 > self._ids.reserved:
            await self._reserve_ids(self._ids.next + ID_RESERVE)

    async def _reserve_ids(self, below: int) -> None:
        async with self._reserving:
            try:
                await trio.to_thread.run_sync(self._folder.reserve_ids, below, limiter=self._threads)
            except OSError as exc:
                # The next checkpoint retries; until then the broker uses the ids reserved before.
                self._report_error(_IDS, f"cannot write to {self._folder.path}: {exc.strerror}")
            else:
                self._ids.reserved = below
                self._errors.pop(_IDS, None)
