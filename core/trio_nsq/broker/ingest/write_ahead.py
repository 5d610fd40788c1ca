"""The write-ahead log of the node: one sync for the writes of many topics, whose own files are synced later.

If several topics wait for a sync, the event loop writes the same records once more into the write-ahead file. One sync
of it serves all. The segments of the topics have the records too, unsynced, so readers need no other place. A file
that is large or old enough is followed by the next one; it is deleted when all topics with writes in it were synced.
After a crash, `Replay` brings the segments up to date.

After an error of a write-ahead file, its topics are synced alone, as without it, and that file is not used again.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import trio

from ...log import LogWriteError
from ...log.records import UnsyncedPart
from ...log.write_ahead import WriteAheadFile
from ...pacing import Pacing
from ..state.topic import Topic

logger = logging.getLogger("trio_nsq.broker")

_MOST_FILES = 3
"""Without a new file, the topics are synced alone: disks that refuse syncs must not fill with write-ahead files."""


@dataclass(frozen=True, slots=True)
class Logged:
    """Writes of topics in a write-ahead file, which is to be synced.

    Attributes:
        writes: The number of each topic's last write, as `Log.writes` counts.
    """

    file: WriteAheadFile
    writes: dict[Topic, int]


@dataclass(slots=True)
class _Need:
    """Why a write-ahead file is needed: a topic's segments may lack writes that it has.

    Attributes:
        last: The last such write, as `Log.writes` counts.
        failed_syncs: `Log.failed_syncs` before the first one. If more fail, the kernel may have dropped these writes.
    """

    last: int
    failed_syncs: int


class WriteAhead:
    """The write-ahead files of a broker. All methods but `sync` are for the event loop.

    Args:
        create: Creates the next file; called in a thread. Returns None if the disk has too little room for it. Raises
            LogWriteError.
        all_removed: Called in a thread by `close` if no file is left. Raises OSError.
        most_topics: How many topics may need a file: their segments are open, because they are not synced.
        nursery: Hosts the threads.
        clock_s: Returns seconds by a clock that never steps.

    Attributes:
        sync_alone: Requests the sync of a topic's own file; `record_sync` gets the result.
    """

    def __init__(
        self,
        create: Callable[[], WriteAheadFile | None],
        all_removed: Callable[[], None],
        most_topics: int,
        nursery: trio.Nursery,
        pacing: Pacing,
        clock_s: Callable[[], float] = perf_counter,
    ) -> None:
        self.sync_alone: Callable[[Topic], object] = lambda topic: None
        self._create = create
        self._all_removed = all_removed
        self._most_topics = most_topics
        self._nursery = nursery
        self._pacing = pacing
        self._clock_s = clock_s
        self._current: WriteAheadFile | None = None
        self._begun_s = 0.0  # when the current file was begun
        self._retry_s = 0.0  # no file is begun before
        self._needed: dict[WriteAheadFile, dict[Topic, _Need]] = {}  # of each file, in order
        self._unrepaired: set[Topic] = set()
        self._kept: set[WriteAheadFile] = set()  # only for topics that are unrepaired
        self._waits: dict[Topic, trio.Event] = {}
        self._tasks = 0
        self._task_ended = trio.Event()
        self._closed = False

    # ------------------------------------------------------------------ the current file

    def append(self, topics: Iterable[Topic]) -> Logged | None:
        """Write the unsynced writes of these topics.

        Returns:
            What a `sync` will make stable, None if there is nothing. The other topics must be synced alone.
        """
        file = self._file()
        if file is None:
            return None
        parts: list[tuple[bytes, UnsyncedPart]] = []
        logged: dict[Topic, int] = {}
        for topic in topics:
            part = topic.log.unlogged()
            if part is not None and 0 < part.size <= self._pacing.ahead_bytes:
                parts.append((topic.name.encode(), part))
                logged[topic] = topic.log.writes
        if not parts:
            return None
        try:
            file.append(parts)
        except LogWriteError as exc:
            self._give_up(file, exc)
            return None
        needed = self._needed[file]
        for topic, last in logged.items():
            topic.log.mark_logged()
            if topic in needed:
                needed[topic].last = last
            else:
                needed[topic] = _Need(last, topic.log.failed_syncs)
        return Logged(file, logged)

    def _file(self) -> WriteAheadFile | None:
        """Return the file to append to; None if there is none now."""
        file = self._current
        if file is not None and file.error is not None:
            self._give_up(file, file.error)
            return None
        if (
            file is None
            or self._is_full(file, 1)
            or self._clock_s() > self._begun_s + self._pacing.ahead_file_s
        ):
            self._begin_file()
        return file if file is not None and not self._is_full(file, 2) else None

    def _is_full(self, file: WriteAheadFile, times: int) -> bool:
        """Whether a file has this many times what a file should have."""
        return (
            file.size >= times * self._pacing.ahead_file_bytes
            or len(self._needed[file]) >= times * self._most_topics
        )

    def _begin_file(self) -> None:
        if self._closed or self._tasks or len(self._needed) >= _MOST_FILES or self._clock_s() < self._retry_s:
            return
        self._start(self._replace_file)

    async def _replace_file(self) -> None:
        """Begin a file, and then sync all topics that need the one before."""
        try:
            file = await trio.to_thread.run_sync(self._create)
        except LogWriteError as exc:
            logger.warning("%s; each topic is synced alone", exc)
            file = None
        if file is None:
            self._retry_s = self._clock_s() + self._pacing.ahead_retry_s
            return
        before, self._current = self._current, file
        self._begun_s = self._clock_s()
        self._needed[file] = {}
        self._nursery.start_soon(self._end_when_old, file)
        if before is not None:
            await self._retire(before)

    async def _end_when_old(self, file: WriteAheadFile) -> None:
        """Begin the next file, even if no topic is written to any more."""
        await trio.sleep(self._pacing.ahead_file_s)
        if file is self._current and self._needed[file]:
            self._begin_file()

    def _give_up(self, file: WriteAheadFile, error: LogWriteError) -> None:
        """Use a file no longer after an error."""
        logger.error("%s; each topic is synced alone", error)
        self._current = None
        self._retry_s = self._clock_s() + self._pacing.ahead_retry_s
        self._start(self._retire, file)

    @staticmethod
    def sync(file: WriteAheadFile) -> None:
        """Return when all earlier appends are on stable storage. In a thread.

        Raises:
            LogWriteError: They may not be. The topics must be synced alone.
        """
        try:
            file.sync()
        except LogWriteError:
            _discard_unsynced(file)
            raise

    # ------------------------------------------------------------------ earlier files

    def record_sync(self, topic: Topic, writes: int, error: Exception | None) -> None:
        """Record the result of a sync of a topic's own file, which served this number of writes."""
        for needed in self._needed.values():
            if (need := needed.get(topic)) is None:
                continue
            if error is not None or topic.log.failed_syncs > need.failed_syncs:
                # The kernel may have dropped bytes that were acknowledged. Replay at the next start writes them again.
                self._unrepaired.add(topic)
            elif need.last <= writes and topic not in self._unrepaired:
                del needed[topic]
        self._wake(topic)

    def forget(self, topic: Topic) -> None:
        """Forget a topic that was deleted."""
        self._unrepaired.discard(topic)
        for needed in self._needed.values():
            needed.pop(topic, None)
        self._wake(topic)
        for file in [file for file in self._kept if not self._needed[file]]:
            self._kept.remove(file)
            self._start(self._retire, file)

    def _wake(self, topic: Topic) -> None:
        if (wait := self._waits.pop(topic, None)) is not None:
            wait.set()

    async def _retire(self, file: WriteAheadFile) -> None:
        """Sync all topics that need a file, and delete it."""
        if file.error is not None:
            await trio.to_thread.run_sync(_discard_unsynced, file)
        needed = self._needed[file]
        for topic in list(needed):
            while topic in needed and topic not in self._unrepaired:
                wait = self._waits.setdefault(topic, trio.Event())  # two files may wait for it
                self.sync_alone(topic)
                await wait.wait()
        if needed:
            names = ", ".join(sorted(topic.name for topic in needed))
            logger.error(
                "%s: kept until the next start, because syncs of these topics failed: %s", file.path, names
            )
            self._kept.add(file)
            return
        try:
            await trio.to_thread.run_sync(file.remove)
        except LogWriteError as exc:
            logger.error("%s", exc)
            return
        del self._needed[file]

    def _start(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        self._tasks += 1
        self._nursery.start_soon(self._run, work, args)

    async def _run(self, work: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        try:
            with trio.CancelScope(shield=True):  # it waits only for the disk
                await work(*args)
        finally:
            self._tasks -= 1
            self._task_ended.set()
            self._task_ended = trio.Event()

    async def close(self) -> None:
        """Sync all topics, and delete all files. All writes must be committed. What fails is logged."""
        self._closed = True
        while self._tasks:
            await self._task_ended.wait()
        self._current = None
        for file in list(self._needed):
            await self._retire(file)
        for file in self._needed:
            file.close()
        if not self._needed:
            try:
                await trio.to_thread.run_sync(self._all_removed)
            except OSError as exc:
                logger.warning("cannot save that there is no write-ahead log: %s", exc.strerror)


def _discard_unsynced(file: WriteAheadFile) -> None:
    try:
        file.discard_unsynced()
    except LogWriteError as exc:
        logger.error("%s: a crash may bring back what was refused", exc)
