"""Writing what has to survive a restart besides the messages: the topics' states, and the ids in use."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from errno import EIO
from itertools import count

import trio

from ...log import LogError
from ..errors import SaveError
from ..state.broker import Broker, MessageIds
from ..state.topic import Checkpoint, Topic
from .data_folder import ID_RESERVE, DataFolder
from .retention import Keeper

logger = logging.getLogger("trio_nsq.broker")

_WRITERS_AT_THE_END = 8
"""Syncs that run side by side share the disk's work. While clients are served one has to do, to leave them the disk."""


class Saver:
    """Saves topics: at once where somebody waits for it, the others on a schedule.

    Args:
        broker: Whose topics these are.
        folder: Where to.
        ids: The ids of messages; those reserved so far end at `reserved_ids`.
        reserved_ids: See there.
        now_ns: The time by the clock of the messages' timestamps, Unix nanoseconds.
        roll: See `Keeper`.
        sync: Brings what a topic has accepted to stable storage; returns whether it did, an error being noted.

    Attributes:
        error: Empty, or what the last write failed with.
        keeper: See there.
    """

    def __init__(
        self,
        broker: Broker,
        folder: DataFolder,
        ids: MessageIds,
        reserved_ids: int,
        now_ns: Callable[[], int],
        roll: Callable[[Topic], Awaitable[bool]],
        sync: Callable[[Topic], Awaitable[bool]],
    ) -> None:
        self.error = ""
        self._sync = sync
        self.keeper = Keeper(now_ns, roll)
        self._now_ns = now_ns
        self._broker = broker
        self._folder = folder
        self._ids = ids
        self._reserved_ids = reserved_ids
        self._reserving = trio.Lock()
        self._tickets = count()
        self._saved: dict[Topic, int] = {}  # the ticket at which the state last saved was taken
        self._locks: dict[Topic, trio.Lock] = {}

    # ------------------------------------------------------------------ one topic

    async def save_new(self, topic: Topic) -> None:
        """Save a topic's state if it, or a channel of its, was never saved. Raises SaveError."""
        if topic.name in self._broker.unsaved:
            await self.save(topic)

    async def save(self, topic: Topic) -> None:
        """Return when the topic's state, as it is now or later, is on disk.

        Waiting callers are served by one write. What the log need not keep any more is deleted from it; if that
        fails, it is logged and noted, and tried again at the next checkpoint.

        Raises:
            SaveError: It is not; likewise.
        """
        if topic.ephemeral or self._broker.topics.get(topic.name) is not topic:
            self._mark_saved(topic.name)
            return
        ticket = next(self._tickets)
        async with self.locked(topic):
            if self._saved.get(topic, -1) > ticket or self._broker.topics.get(topic.name) is not topic:
                return
            await self.keeper.look(topic)
            self._saved[topic] = next(self._tickets)
            self._mark_saved(topic.name)
            checkpoint = topic.checkpoint()
            new = {channel for channel in self._broker.never_saved if channel.topic is topic}
            try:
                for _ in checkpoint.encode():
                    await trio.lowlevel.checkpoint()
                # A number that outlasts its messages in a power cut would have them taken for published.
                if checkpoint.names_batches and not await self._sync(topic):
                    raise OSError(EIO, "its log cannot be synced")
                look_at_ns, error = await trio.to_thread.run_sync(self._write, topic, checkpoint)
            except BaseException as exc:  # cancelled, too: then nothing was written
                self._saved.pop(topic, None)
                self._broker.unsaved.add(topic.name)
                if not isinstance(exc, OSError):
                    raise
                self._note_error(f"cannot save the state of topic {topic.name}: {exc.strerror}")
                raise SaveError(self.error) from exc
            self._broker.never_saved -= new
            if new:
                self._broker.changed.add(
                    topic.name
                )  # saved again soon: the second copy of the state lacks them
            self._broker.changed.update(other.name for other in topic.saved(checkpoint))
            self.keeper.schedule.look_at(topic.name, look_at_ns)
            if error is None:
                self.error = ""
            else:
                self._note_error(str(error))
                self._broker.changed.add(topic.name)  # it is tried again at the next checkpoint

    def _write(self, topic: Topic, checkpoint: Checkpoint) -> tuple[int | None, LogError | None]:
        """Save a topic's state, and let its log lose what nobody needs any more.

        Returns:
            As `Keeper.discard`, and what went wrong there: the state is saved all the same, and that is what callers
            wait for.
        """
        self._folder.write_state(topic.name, checkpoint.content)
        try:
            return self.keeper.discard(topic, checkpoint, self._now_ns()), None
        except LogError as exc:
            return None, exc

    @asynccontextmanager
    async def locked(self, topic: Topic) -> AsyncIterator[None]:
        """Keep a topic from being saved meanwhile; waits for a save under way."""
        async with self._locks.setdefault(topic, trio.Lock()):
            yield

    def forget(self, topic: Topic) -> None:
        """Let go of a topic that was deleted."""
        self._saved.pop(topic, None)
        self._locks.pop(topic, None)

    def _mark_saved(self, topic_name: str) -> None:
        self._broker.changed.discard(topic_name)
        self._broker.unsaved.discard(topic_name)

    def _note_error(self, text: str) -> None:
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
            await self._look_at_due()
            await self._save_changed(1)
            took_s = trio.current_time() - started_s

    async def _look_at_due(self) -> None:
        """Have those topics saved whose time has come and that have something to lose: a save costs milliseconds."""
        for name in self.keeper.schedule.take_due(self._now_ns()):
            topic = self._broker.topics.get(name)
            if topic is None or name in self._broker.changed:
                continue
            async with self.locked(topic):
                is_there = self._broker.topics.get(name) is topic
                if is_there and not topic.ephemeral and await self.keeper.has_work(topic):
                    self._broker.changed.add(name)

    async def save_all(self) -> None:
        """Save everything, for the last time."""
        self._broker.changed.update(self._broker.topics)
        await self._save_changed(_WRITERS_AT_THE_END)
        await self._reserve_ids(self._ids.next)  # if it fails: what is reserved is above every id in use

    async def _save_changed(self, writers: int) -> None:
        names = iter(self._broker.changed | self._broker.unsaved)

        async def work() -> None:
            for name in names:
                topic = self._broker.topics.get(name)
                if topic is None:
                    self._mark_saved(name)
                    continue
                try:
                    await self.save(topic)
                except SaveError:
                    pass  # it is noted, and next time is soon

        async with trio.open_nursery() as nursery:
            for _ in range(writers):
                nursery.start_soon(work)
        if self._ids.next + ID_RESERVE // 2 > self._reserved_ids:
            await self._reserve_ids(self._ids.next + ID_RESERVE)

    async def _reserve_ids(self, below: int) -> None:
        async with self._reserving:
            try:
                await trio.to_thread.run_sync(self._folder.reserve_ids, below)
            except OSError as exc:
                # Tried again at the next checkpoint; until then there is half of what was reserved before.
                self._note_error(f"cannot write to {self._folder.path}: {exc.strerror}")
            else:
                self._reserved_ids = below
