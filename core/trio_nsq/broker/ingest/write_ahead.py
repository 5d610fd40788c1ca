"""The write-ahead log of the node: one sync for the writes of many topics, whose own files are synced later.

If several topics wait for a sync, the event loop writes the same records once more into the write-ahead file. One sync
of it serves all. The segments of the topics have the records too, unsynced, so readers need no other place. A file
that is large or old enough is followed by the next one; it is deleted when all topics with writes in it were synced.
After a crash, `Replay` brings the segments up to date.

After an error of a write-ahead file, its topics are synced alone, as without it, and that file is not used again.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import trio

from ...event_loop.pacing import Pacing
from ...event_loop.retries import Delays
from ...log import LogWriteError
from ...log.records import UnsyncedPart
from ...log.write_ahead.file import WriteAheadFile
from ..state.topic import Topic

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_MOST_FILES = 3
"""Without a new file, the topics are synced alone: disks that refuse syncs must not fill with write-ahead files."""
_MOST_SIZES = 2
"""A file gets at most this many times the size at which the next one is begun."""
MOST_BYTES_IN_FILES = _MOST_FILES * _MOST_SIZES
"""All files have at most this many times that size. With less free space on the disk, none is begun."""


class Syncs(Protocol):
    """What `LocalSync` does for the write-ahead log."""

    async def sync(self, topic: Topic, *, alone: bool = False) -> Exception | None: ...

    async def until_idle(self, of: object) -> None: ...


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
    """The write-ahead files of a broker.

    Args:
        create: Creates the next file; called in a thread. Returns None if the disk has too little room for it. Raises
            LogWriteError.
        all_removed: Called in a thread when no file is left. Raises OSError.
        most_topics: How many topics may need a file: their segments are open, because they are not synced.
        nursery: Hosts the threads.
        clock_s: Returns seconds by a clock that never steps.

    Attributes:
        current: The file to append to; None if there is none now.
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
        self.current: WriteAheadFile | None = None
        self._syncs: Syncs
        self._create = create
        self._all_removed = all_removed
        self._most_topics = most_topics
        self._nursery = nursery
        self._pacing = pacing
        self._clock_s = clock_s
        self._begun_s = 0.0  # when the current file was begun
        self._retry_s = 0.0  # no file is begun before
        self._needed: dict[WriteAheadFile, dict[Topic, _Need]] = {}  # of each file, in order
        self._unrepaired: set[Topic] = set()
        self._kept: set[WriteAheadFile] = set()  # only for topics that are unrepaired
        self._tasks = 0
        self._task_ended = trio.Event()
        self._closed = self._keeps = False
        self._closing = trio.Event()

    def use(self, syncs: Syncs) -> None:
        """Have topics synced by themselves here. `record_sync` gets the results."""
        self._syncs = syncs

    # ------------------------------------------------------------------ the current file

    def append(self, topics: Iterable[Topic]) -> tuple[WriteAheadFile | None, Mapping[Topic, int]]:
        """Write the unsynced writes of these topics.

        Returns:
            The file to sync, and for each topic in it the number of its last write, as `Log.writes` counts. The other
            topics must be synced alone.
        """
        file = self._file()
        if file is None:
            return None, {}
        parts: list[tuple[bytes, UnsyncedPart]] = []
        logged: dict[Topic, int] = {}
        for topic in topics:
            part = topic.log.pending_wal()
            if part is not None and 0 < part.size <= self._pacing.small_sync_bytes:
                parts.append((topic.name.encode(), part))
                logged[topic] = topic.log.writes
        if not parts:
            return None, {}
        try:
            file.append(parts)
        except LogWriteError as exc:
            self._stop_using(file, exc)
            return None, {}
        needed = self._needed[file]
        for topic, last in logged.items():
            topic.log.mark_in_wal()
            if topic in needed:
                needed[topic].last = last
            else:
                needed[topic] = _Need(last, topic.log.failed_syncs)
        return file, logged

    def _file(self) -> WriteAheadFile | None:
        """Return the file to append to; None if there is none now."""
        file = self.current
        if file is not None and file.error is not None:
            self._stop_using(file, file.error)
            return None
        if (
            file is None
            or self._is_full(file, 1)
            or self._clock_s() > self._begun_s + self._pacing.wal_file_s
        ):
            self._rotate()
        return file if file is not None and not self._is_full(file, _MOST_SIZES) else None

    def _is_full(self, file: WriteAheadFile, times: int) -> bool:
        """Whether a file has this many times what a file should have."""
        return (
            file.size >= times * self._pacing.wal_file_bytes
            or len(self._needed[file]) >= times * self._most_topics
        )

    def _rotate(self) -> None:
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
            self._retry_s = self._clock_s() + self._pacing.wal_retry_s
            await self._record_end()
            return
        before, self.current = self.current, file
        self._begun_s = self._clock_s()
        self._needed[file] = {}
        self._nursery.start_soon(self._end_when_old, file)
        if before is not None:
            await self._retire(before)

    async def _end_when_old(self, file: WriteAheadFile) -> None:
        """Begin the next file, even if no topic is written to any more."""
        await trio.sleep(self._pacing.wal_file_s)
        if file is self.current and self._needed[file]:
            self._rotate()

    async def give_up(self, file: WriteAheadFile, error: Exception) -> None:
        """After a failed sync: use the file no longer, and cut off durably what is not synced. Logs errors."""
        self._stop_using(file, error)
        await trio.to_thread.run_sync(_discard_unsynced, file)

    def _stop_using(self, file: WriteAheadFile, error: Exception) -> None:
        if file is self.current:
            logger.error("%s; each topic is synced alone", error)
            self.current = None
            self._retry_s = self._clock_s() + self._pacing.wal_retry_s
            self._start(self._retire, file)

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

    def forget(self, topic: Topic) -> None:
        """Forget a topic that was deleted."""
        self._unrepaired.discard(topic)
        for needed in self._needed.values():
            needed.pop(topic, None)
        for file in [file for file in self._kept if not self._needed[file]]:
            self._kept.remove(file)
            self._start(self._retire, file)

    async def _retire(self, file: WriteAheadFile) -> None:
        """Sync all topics that need a file, and delete it.

        If it stays, what its topics refused must not: that is discarded, with growing pauses until it succeeds.
        """
        await self._syncs.until_idle(file)  # what a sync is about to report must not be discarded
        is_clean = file.error is None or await trio.to_thread.run_sync(_discard_unsynced, file)
        if not await self._remove(file):
            pauses = Delays(self._pacing.cut_retry_s, self._pacing.cut_retry_max_s)
            while not (is_clean or self._closed) and file in self._needed:
                with trio.move_on_after(pauses.next_s()):
                    await self._closing.wait()
                is_clean = await trio.to_thread.run_sync(_discard_unsynced, file)

    async def _remove(self, file: WriteAheadFile) -> bool:
        """Sync all topics that need a file, and delete it; False if it stays."""
        needed = self._needed[file]
        for topic in list(needed):
            while topic in needed and topic not in self._unrepaired and not self._keeps:
                await self._syncs.sync(topic, alone=True)
        if self._keeps:
            return False
        if needed:
            names = ", ".join(sorted(topic.name for topic in needed))
            logger.error(
                "%s: kept until the next start, because syncs of these topics failed: %s", file.path, names
            )
            self._kept.add(file)
            return False
        try:
            await trio.to_thread.run_sync(file.remove)
        except LogWriteError as exc:
            logger.error("%s", exc)
            return False
        file.close()
        del self._needed[file]
        await self._record_end()
        return True

    async def _record_end(self) -> None:
        """Record that there is no file, if there is none. No file is begun meanwhile."""
        if not self._needed:
            try:
                await trio.to_thread.run_sync(self._all_removed)
            except OSError as exc:
                logger.warning("cannot save that there is no write-ahead log: %s", exc.strerror)

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

    async def close(self, *, keeps: bool = False) -> None:
        """Sync all topics, and delete all files. All writes must be committed. What fails is logged.

        Args:
            keeps: Keep the files for the next start instead, as after a kill.
        """
        self._closed, self._keeps = True, keeps
        self._closing.set()
        while self._tasks:
            await self._task_ended.wait()
        self.current = None
        for file in list(self._needed) if not keeps else ():
            await self._retire(file)
        for file in self._needed:
            file.close()
        await self._record_end()


def _discard_unsynced(file: WriteAheadFile) -> bool:
    try:
        file.discard_unsynced()
    except LogWriteError as exc:
        logger.error("%s: a crash may bring back what was refused", exc)
        return False
    return True
