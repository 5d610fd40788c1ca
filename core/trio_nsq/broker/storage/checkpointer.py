"""Writing what has to survive a restart besides the messages: the topics' states, and the ids in use."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from errno import EIO
from functools import partial
from itertools import takewhile
from operator import attrgetter

import trio

from ...log import LogError
from ..errors import DeletedError, SaveError
from ..state.broker import Broker, MessageIds
from ..state.checkpoint import Checkpoint
from ..state.topic import Topic
from .data_folder import ID_RESERVE, DataFolder
from .retention import RetentionManager

logger = logging.getLogger("trio_nsq.broker")

_THREADS = 16
"""For saves alone, which wait for no other kind of work."""
_WRITERS_AT_THE_END = 8
"""Syncs that run side by side share the disk's work. While clients are served one has to do, to leave them the disk."""
_TOPICS_AT_ONCE = 100
"""So many are looked at before clients have their turn."""


@dataclass(slots=True, eq=False)
class _Change:
    """A change of a topic on its way to disk; arguments as of `Checkpointer.change`.

    Attributes:
        done: It was made or refused.
        error: Why it was refused.
    """

    plan: Callable[[Checkpoint], None]
    apply: Callable[[], None]
    with_others: bool = False
    done: bool = False
    error: Exception | None = None

    def put_into(self, checkpoint: Checkpoint) -> None:
        try:
            self.plan(checkpoint)
        except Exception as exc:
            self.refuse(exc)

    def make(self) -> None:
        if not self.done:
            self.done = True
            try:
                self.apply()
            except Exception as exc:
                self.error = exc

    def refuse(self, error: Exception) -> None:
        if not self.done:
            self.done, self.error = True, error


def _first_of(changes: Sequence[_Change]) -> Sequence[_Change]:
    """The changes that the next write saves: the first, with those behind it that may be saved together."""
    if not changes[0].with_others:
        return changes[:1]
    return list(takewhile(attrgetter("with_others"), changes))


class Checkpointer:
    """Saves topics: at once where somebody waits for it, the others on a schedule.

    Args:
        ids: The ids of messages; more are reserved before they are used up.
        now_ns: The time by the clock of the messages' timestamps, Unix nanoseconds.
        roll: See `RetentionManager`.
        sync: Brings what a topic has accepted to stable storage; returns whether it did, an error being noted.

    Attributes:
        error: Empty, or what the last write failed with.
    """

    def __init__(
        self,
        broker: Broker,
        folder: DataFolder,
        ids: MessageIds,
        now_ns: Callable[[], int],
        roll: Callable[[Topic], Awaitable[bool]],
        sync: Callable[[Topic], Awaitable[bool]],
    ) -> None:
        self.error = ""
        self._sync = sync
        self._threads = trio.CapacityLimiter(_THREADS)
        self._spare_room = folder.spare_room
        self.retention = RetentionManager(now_ns, roll, lambda: self._spare_room.is_short)
        self._now_ns = now_ns
        self._broker = broker
        self._folder = folder
        self._ids = ids
        self._reserving = trio.Lock()
        self._saved: dict[Topic, int] = {}  # the version of the state last saved
        # Names of topics that are to be saved though they have not changed: something failed, or messages may go.
        self._due: set[str] = set()
        self._locks: dict[Topic, trio.Lock] = {}
        self._changes: dict[Topic, list[_Change]] = {}  # that wait for the lock, in its order

    # ------------------------------------------------------------------ one topic

    async def save_new(self, topic: Topic) -> None:
        """Return when a topic's state has been saved at least once. Raises SaveError."""
        if topic in self._broker.never_saved:
            await self.save(topic)

    async def change(
        self,
        topic: Topic,
        plan: Callable[[Checkpoint], None],
        apply: Callable[[], None],
        *,
        with_others: bool = False,
    ) -> None:
        """Change a topic durably: save the state with the change first, and make the change only then.

        Args:
            topic: Which topic. If it is ephemeral, nothing is written.
            plan: Puts the change into the checkpoint that is saved. What it raises is raised here, and nothing changes.
            apply: Makes the change. No other state of the topic is saved between the two.
            with_others: One write may save this change together with others of its kind.

        Raises:
            SaveError: The state cannot be saved; nothing has changed.
            DeletedError: The topic is deleted; likewise.
        """
        if topic.ephemeral:
            self._change_ephemeral(topic, plan, apply)
            return
        change = _Change(plan, apply, with_others)
        changes = self._changes.setdefault(topic, [])
        changes.append(change)
        try:
            async with self.locked(topic):
                while not change.done:
                    if self._broker.topics.get(topic.name) is not topic:
                        raise DeletedError(topic.name)
                    try:
                        await self._save(topic, _first_of([each for each in changes if not each.done]))
                    except SaveError:
                        pass  # each of these changes knows
        finally:
            changes.remove(change)
            if not changes:
                del self._changes[topic]
        if change.error is not None:
            raise change.error

    async def change_locked(
        self, topic: Topic, plan: Callable[[Checkpoint], None], apply: Callable[[], None]
    ) -> None:
        """As `change`, for a topic that the caller has `locked`."""
        if topic.ephemeral:
            self._change_ephemeral(topic, plan, apply)
            return
        change = _Change(plan, apply)
        await self._save(topic, [change])
        if change.error is not None:
            raise change.error

    def _change_ephemeral(
        self, topic: Topic, plan: Callable[[Checkpoint], None], apply: Callable[[], None]
    ) -> None:
        """As `change`; the checkpoint is thrown away, but what refuses the change is found in `plan`."""
        if self._broker.topics.get(topic.name) is not topic:
            raise DeletedError(topic.name)
        plan(topic.checkpoint())
        apply()

    async def save(self, topic: Topic) -> None:
        """Return when the topic's state, as it is now or later, is on disk.

        Callers that wait for the same version are served by one write. What the log need not keep any more is deleted
        from it. If that fails, it is logged, and tried again at the next checkpoint.

        Raises:
            SaveError: It is not; likewise.
        """
        version = topic.version.number
        if topic.ephemeral:
            return
        async with self.locked(topic):
            is_there = self._broker.topics.get(topic.name) is topic
            if is_there and (self._saved.get(topic, -1) < version or topic.name in self._due):
                await self._save(topic)

    async def _save(self, topic: Topic, changes: Sequence[_Change] = ()) -> None:
        """Save the state of a topic that is `locked`, with changes, and make these."""
        try:
            await self.retention.look(topic)
            self._saved[topic] = topic.version.number
            self._broker.changed.discard(topic.name)
            self._due.discard(topic.name)
            checkpoint = topic.checkpoint()
            for change in changes:
                change.put_into(checkpoint)
            for _ in checkpoint.encode():
                await trio.lowlevel.checkpoint()
            # A number that outlasts its messages in a power cut would have them taken for published.
            if checkpoint.names_batches and not await self._sync(topic):
                raise OSError(EIO, "its log cannot be synced")
            look_at_ns, error = await trio.to_thread.run_sync(
                self._write, topic, checkpoint, limiter=self._threads
            )
        except BaseException as exc:  # cancelled, too: then nothing was written
            self._saved.pop(topic, None)
            self._due.add(topic.name)
            if not isinstance(exc, Exception):
                raise
            if not isinstance(exc, OSError):  # a defect of ours: it ends neither the broker nor the next save
                logger.exception("topic %s: internal error", topic.name)
            reason = exc.strerror if isinstance(exc, OSError) else "internal error"
            self._report_error(f"cannot save the state of topic {topic.name}: {reason}")
            for change in changes:
                change.refuse(SaveError(self.error))
            raise SaveError(self.error) from exc
        self._broker.never_saved.discard(topic)
        for change in changes:
            change.make()
            # It has changed by what happened since the checkpoint; and the second copy of the state lacks the change.
            self._due.add(topic.name)
        topic.saved(checkpoint)
        self.retention.schedule.watch(topic.name, look_at_ns)
        if error is None:
            self.error = ""
        else:
            self._report_error(str(error))
            self._due.add(topic.name)  # it is tried again at the next checkpoint

    def _write(self, topic: Topic, checkpoint: Checkpoint) -> tuple[int | None, LogError | None]:
        """Save a topic's state, and let its log lose what nobody needs any more.

        Returns:
            As `RetentionManager.discard`, and what went wrong there: the state is saved all the same, and that is what
            callers wait for.
        """
        self._folder.write_state(topic.name, checkpoint.content)
        try:
            return self.retention.discard(topic, checkpoint, self._now_ns()), None
        except LogError as exc:
            return None, exc

    def locked(self, topic: Topic) -> trio.Lock:
        """For `async with`: keep a topic from being saved meanwhile; waits for a save under way."""
        return self._locks.setdefault(topic, trio.Lock())

    def forget(self, topic: Topic) -> None:
        self._saved.pop(topic, None)
        self._locks.pop(topic, None)

    def _report_error(self, text: str) -> None:
        if self.error != text:
            logger.error("%s", text)
        self.error = text

    # ------------------------------------------------------------------ all topics

    async def save_on_schedule(self, interval_s: float) -> None:
        """Save what changed every so often, and less often if it takes longer than that; runs until cancelled."""
        took_s = 0.0
        while True:
            await trio.sleep(max(interval_s, took_s))
            started_s = trio.current_time()
            for step in (
                self._look_at_due,
                self._find_room,
                partial(self._save_changed, 1),
                self._look_for_room,
            ):
                try:
                    await step()
                except Exception:
                    # A defect of ours: the other steps go on, and the next checkpoint tries again.
                    logger.exception("a part of the checkpoint failed")
            took_s = trio.current_time() - started_s

    async def _look_for_room(self) -> None:
        """If there was no room lately: find out whether there is some again."""
        if not self._spare_room.is_well:
            await trio.to_thread.run_sync(self._spare_room.look_again, limiter=self._threads)

    async def _find_room(self) -> None:
        """On a full disk: have those topics saved that have something to lose then."""
        if not self._spare_room.is_short:
            return
        for number, topic in enumerate(list(self._broker.topics.values())):
            if not topic.ephemeral and self.retention.has_room_to_give(topic):
                self._due.add(topic.name)
            if number % _TOPICS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    async def _look_at_due(self) -> None:
        """Have those topics saved whose time has come and that have something to lose: a save costs milliseconds."""
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
                    # A defect of ours: the save that follows says what is wrong, and the others are looked at.
                    logger.exception("topic %s: retention failed", name)
                    self._due.add(name)

    async def save_all(self) -> None:
        self._due.update(self._broker.topics)
        await self._save_changed(_WRITERS_AT_THE_END)
        await self._reserve_ids(self._ids.next)  # if it fails: what is reserved is above every id in use

    async def _save_changed(self, writers: int) -> None:
        names = iter(self._broker.changed | self._due)

        async def work() -> None:
            for name in names:
                topic = self._broker.topics.get(name)
                if topic is None or topic.ephemeral:
                    self._due.discard(name)
                    continue
                try:
                    await self.save(topic)
                except SaveError:
                    pass  # it is noted, and next time is soon

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
                # Tried again at the next checkpoint; until then there is what was reserved before.
                self._report_error(f"cannot write to {self._folder.path}: {exc.strerror}")
            else:
                self._ids.reserved = below
                self.error = ""
