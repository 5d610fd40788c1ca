"""Retention: how long the broker keeps messages that every channel has passed, and when it checks again.

A log can only delete whole files, and never the one that it appends to. It begins a new file when the last one covers
1/8 of the retention time or size, so it keeps at most 1/8 more than configured.

The broker always keeps messages that a channel still needs. If these are few (deferred for long, or never answered)
among very many finished ones, it carries them forward: it copies them to a separate file (see `CarriedForwardSegment`)
and deletes the original files.

Ages are measured by the machine's clock, like the messages' timestamps. The clock may be set meanwhile.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import trio

from ...log import Log, LogError, LogReadError
from ...log.disk.history import with_archives
from ...log.interface import LogFileFacts
from ...log.record_metadata import is_about_messages
from ...platform.checksum import crc32
from ...text.wording import count_of
from ..state.deadline_heap import DeadlineHeap
from ..state.settings import TopicSettings
from ..state.topic import Topic
from .data_folder import SavedCheckpoint

_T = TypeVar("_T")

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_NS_PER_MS = 1_000_000
_FILES = 8
_THREADS = 4
"""Threads for reads, and for deletions of files, which take long on a slow disk."""
_MIN_FILE_BYTES = 64 * 1024
MIN_FILE_NS = 1_000_000_000
"""Minimum size and time span of a file, even if the retention is shorter."""
_BLOCK_BYTES = 4096
"""Replacing a file of at most this size by a new one frees no space."""
PINNED_BYTES = 64 * 1024 * 1024
CARRIED_MESSAGES_SHARE = 0.01
CARRIED_BYTES_SHARE = 0.1
MAX_CARRIED_MESSAGES = 20_000
MAX_CARRIED_BYTES = 64 * 1024 * 1024
"""Unfinished messages are carried forward if that frees at least PINNED_BYTES of files, and if they are within these
shares of the messages and bytes in those files, and within these maximums: docs/decisions/0011."""
RETRY_NS = 30 * 1_000_000_000
_TTL_CHECKS = 16
_MIN_TTL_CHECK_NS = 1_000_000_000
"""The broker checks waiting messages this many times per TTL, but not more often than the minimum interval."""
ARCHIVE_CHECK_NS = 30 * 1_000_000_000
"""Interval of checks whether a file that has expired is archived, besides those of `check_waiting`."""
_ARCHIVE_LATE_NS = 60 * 1_000_000_000
_DISCARD_S = 0.5
"""Files are deleted for so long at once, and for at most half of the time: no state is saved meanwhile, and a crash
would bring back what was finished since."""
_SPREAD_NS = 300 * 1_000_000_000
"""After a start, the checks of many topics are spread over this time, or over 1/8 of their retention time."""


def kept_from(files: Sequence[LogFileFacts], settings: TopicSettings, now_ns: int) -> int:
    """Return the oldest sequence that retention keeps; the end of the files if it keeps none.

    Args:
        files: The files of a log, at least one.
        now_ns: Unix nanoseconds.

    Raises:
        LogReadError: The operating system failed to read.
    """
    kept, first = files[-1].next_sequence, 0
    time_ms, room = settings.retention_time_ms, settings.retention_bytes
    if not settings.keeps:
        return kept
    if time_ms > 0:
        oldest_ns = now_ns - time_ms * _NS_PER_MS
        first = next((n for n, file in enumerate(files) if file.last_ns() >= oldest_ns), len(files))
    for file in reversed(files[first:]):
        if room > 0:
            room -= file.size
            if room <= 0:
                break
        kept = file.base_sequence
    return kept


def wants_new_file(files: Sequence[LogFileFacts], settings: TopicSettings, now_ns: int) -> bool:
    """Whether it is time to begin a new file. Arguments as `kept_from`; does not read the log."""
    last, time_ms, max_bytes = files[-1], settings.retention_time_ms, settings.retention_bytes
    if not last.first_ns:
        return False
    if time_ms > 0 and _new_file_ns(last, time_ms) <= now_ns:
        return True
    return max_bytes > 0 and last.size > max(max_bytes // _FILES, _MIN_FILE_BYTES)


def _new_file_ns(last: LogFileFacts, time_ms: int) -> int:
    return last.first_ns + max(time_ms * _NS_PER_MS // _FILES, MIN_FILE_NS)


def next_check_ns(files: Sequence[LogFileFacts], settings: TopicSettings, now_ns: int) -> int | None:
    """Return when the next of these files expires, or a new one must begin; None: never.

    Arguments and errors as `kept_from`. Ignores files that have expired: a channel still needs them, and the broker
    deletes them when the channel has passed them.
    """
    if settings.retention_time_ms <= 0:
        return None
    kept_ns = settings.retention_time_ms * _NS_PER_MS
    times = [_new_file_ns(files[-1], settings.retention_time_ms)] if files[-1].first_ns else []
    for file in files[:-1]:
        if file.last_ns() + kept_ns >= now_ns:
            times.append(file.last_ns() + kept_ns)
            break
    return min(times, default=None)


def _is_passed(files: Sequence[LogFileFacts], needed: int) -> bool:
    """Whether the first file can be deleted if messages from `needed` on are kept."""
    return len(files) > 1 and needed >= files[0].next_sequence


def _earliest(times: Iterable[int | None]) -> int | None:
    return min((at_ns for at_ns in times if at_ns is not None), default=None)


class RetentionManager:
    """Deletes messages that have expired. One per broker.

    Args:
        now_ns: Returns the time by the clock of the messages' timestamps, Unix nanoseconds.
        rotate: Begins a new file of a topic's log; returns whether that succeeded, and logs errors.
        is_short: Whether the disk is full, or nearly. Then new files are begun only to delete others.
        archive_retention_ms: How long messages that every channel has passed stay in the archive; 0: for ever.

    Attributes:
        schedule: When to check topics that do not change, by name. They may be deleted by then.
        waits_since_ns: Since when expired files of topics wait for the archive, by name.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        rotate: Callable[[Topic], Awaitable[bool]],
        is_short: Callable[[], bool] = lambda: False,
        archive_retention_ms: int = 0,
    ) -> None:
        self.schedule: DeadlineHeap[str] = DeadlineHeap()
        self.waits_since_ns: dict[str, int] = {}
        self._looks = 0
        self._late: set[str] = set()  # of these, those that were logged
        self._now_ns = now_ns
        self._rotate = rotate
        self._is_short = is_short
        self._archived_ns = archive_retention_ms * _NS_PER_MS
        self._discard_left_s = _DISCARD_S  # for how long files may be deleted, when some were deleted last
        self._discarded_at_s = 0.0
        self._threads = trio.CapacityLimiter(_THREADS)

    def schedule_loaded(self, topic: Topic) -> None:
        """Schedule the first check of a topic that was loaded. Does not read the log."""
        now_ns, files, settings = self._now_ns(), topic.log.files, topic.settings
        if topic.view.ttl_ns and topic.oldest_waiting < topic.log.next_sequence:
            self.schedule.watch(topic.name, _spread_ns(topic, now_ns, topic.view.ttl_ns // _TTL_CHECKS))
        if not files:
            return
        kept_ns = max(settings.retention_time_ms, 0) * _NS_PER_MS
        soon_ns = _spread_ns(topic, now_ns, kept_ns // _FILES)
        if (new_file_ns := next_check_ns(files[-1:], settings, now_ns)) is not None:
            self.schedule.watch(topic.name, max(soon_ns, new_file_ns))
        self.schedule.watch(topic.name, self._archive_expiry_ns(topic.log, topic.oldest_waiting))
        if len(files) == 1 or topic.oldest_waiting < files[0].next_sequence:
            return  # when a channel passes a file, the topic is saved and checked
        if kept_ns:
            self.schedule.watch(topic.name, max(soon_ns, files[0].created_ns + kept_ns))
        elif kept_from(files, settings, now_ns) > files[0].base_sequence:
            self.schedule.watch(topic.name, now_ns)  # the retention was reduced

    async def _in_thread(self, read: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(read, limiter=self._threads)

    async def has_work(self, topic: Topic) -> bool:
        """Check a topic that is due; returns whether saving it deletes files.

        Drops messages older than the TTL. Errors are logged here, or raised by the save.
        """
        expired = bool(topic.view.ttl_ns) and await self._expire(topic)
        looks = self._looks
        at_ns, waits = await self._in_thread(partial(self._next_loss, topic, topic.oldest_waiting))
        if expired or (at_ns is not None and at_ns <= self._now_ns()):
            return True
        self._note_waiting(topic.name, waits=waits)
        self.schedule.watch(topic.name, at_ns)
        if waits:
            self.schedule.watch(topic.name, self._check_again_ns(self._now_ns(), looks))
        return False

    def _next_loss(self, topic: Topic, needed: int) -> tuple[int | None, bool]:
        """Return when a file expires or a new one must begin, possibly in the past; None: never. May read the log.

        Messages from `needed` on are not delivered yet. Returns also whether an expired file is not archived yet.
        """
        now_ns, log, settings = self._now_ns(), topic.log, topic.settings
        files, waits = log.files, False
        try:
            times = [
                self._archive_expiry_ns(log, needed),
                next_check_ns(files, settings, now_ns) if files else None,
            ]
            if _is_passed(files, needed) and kept_from(files, settings, now_ns) > files[0].base_sequence:
                waits = log.discardable_before <= files[0].base_sequence
                times += [] if waits else [now_ns]
        except LogReadError:
            return now_ns, False  # the save reports the error
        return _earliest(times), waits

    def _check_again_ns(self, now_ns: int, looks: int) -> int:
        """Return when to check a topic again that was seen to wait after so many calls of `check_waiting`."""
        return now_ns + (ARCHIVE_CHECK_NS if looks == self._looks else 0)

    def check_waiting(self) -> None:
        """Check the topics whose expired files were not archived: more files are."""
        self._looks += 1
        for name in self.waits_since_ns:
            self.schedule.watch(name, self._now_ns())

    def _note_waiting(self, name: str, *, waits: bool) -> None:
        """Note whether expired files of a topic wait for the archive. Logs once that they do for long."""
        if not waits:
            self.waits_since_ns.pop(name, None)
            if name in self._late:
                self._late.discard(name)
                logger.info("TOPIC(%s): retention does not wait for the archive any longer", name)
            return
        since_ns = self.waits_since_ns.setdefault(name, self._now_ns())
        if name not in self._late and since_ns <= self._now_ns() - _ARCHIVE_LATE_NS:
            self._late.add(name)
            logger.warning("TOPIC(%s): expired files stay on the disk until they are archived", name)

    def forget(self, name: str) -> None:
        """Forget a topic that is deleted."""
        self.waits_since_ns.pop(name, None)
        self._late.discard(name)

    async def discard(self, topic: Topic, checkpoint: SavedCheckpoint, now_ns: int) -> int | None:
        """Delete files of a topic's log that no channel needs and retention does not keep. Only one at a time.

        Args:
            now_ns: Unix nanoseconds.

        Returns:
            When to do so again, as `next_check_ns`; `now_ns` if there was no time for all of them.

        Raises:
            LogError: The operating system failed to read, write or delete.
        """
        log, settings, looks = topic.log, checkpoint.settings, self._looks
        if not log.files:
            return None
        wanted = await self._read_ages(settings, partial(kept_from, log.files, settings, now_ns))
        kept = min(wanted, log.discardable_before)
        needed = min(checkpoint.first_needed, kept)
        if topic.carry_again_ns is not None and now_ns >= topic.carry_again_ns:
            topic.carry_again_ns = None
        if log.has_carried_forward and checkpoint.first_needed >= log.disk_first_sequence:
            await self._carry(topic, [], 0)  # all carried-forward messages are finished
        elif needed < min(checkpoint.all_needed, kept):
            carried = await self._carry_forward(topic, checkpoint, min(checkpoint.all_needed, kept), now_ns)
            needed = max(needed, carried)
        if await self._discard_files(log, needed):
            return now_ns
        waits = _is_passed(log.files, min(wanted, checkpoint.first_needed))
        self._note_waiting(topic.name, waits=waits)
        next_ns = await self._read_ages(settings, partial(next_check_ns, log.files, settings, now_ns))
        await self._forget_archived(log, checkpoint.first_needed, now_ns)
        archived_ns = self._archive_expiry_ns(log, checkpoint.first_needed)
        retry_ns = self._check_again_ns(now_ns, looks) if waits else None
        return _earliest([next_ns, topic.carry_again_ns, archived_ns, retry_ns])

    async def _discard_files(self, log: Log, needed: int) -> bool:
        """Delete files before a sequence, as long as there is time for it; returns whether more are left."""
        now_s = trio.current_time()
        self._discard_left_s = min(_DISCARD_S, self._discard_left_s + now_s - self._discarded_at_s)
        while (discard := log.discard_first(needed)) is not None and self._discard_left_s > 0:
            (await self._in_thread(discard))()
            self._discarded_at_s = trio.current_time()
            self._discard_left_s -= self._discarded_at_s - now_s
            now_s = self._discarded_at_s
        return discard is not None

    def _archive_expiry_ns(self, log: Log, needed: int) -> int | None:
        """Return when the first archived file expires; None: never, or it is needed and checked when that changes."""
        for file in log.archived_files if self._archived_ns else ():
            return file.last_ns + self._archived_ns if file.next_sequence <= needed else None
        return None

    async def _forget_archived(self, log: Log, needed: int, now_ns: int) -> None:
        """Forget archived files that have expired and that no channel needs. The archive removes them later."""
        oldest_ns = now_ns - self._archived_ns
        kept = (
            file.base_sequence
            for file in log.archived_files
            if file.last_ns > oldest_ns or file.next_sequence > needed
        )
        if (
            self._archived_ns
            and (forget := log.forget_archived(next(kept, log.disk_first_sequence))) is not None
        ):
            (await self._in_thread(forget))()

    async def _read_ages(self, settings: TopicSettings, read: Callable[[], _T]) -> _T:
        """Call `kept_from` or `next_check_ns`, in a thread if that may read the log."""
        return await self._in_thread(read) if settings.retention_time_ms > 0 else read()

    async def _carry(self, topic: Topic, sequences: Sequence[int], max_bytes: int) -> bool:
        """Replace the carried-forward segment by one with these messages. Returns False if they are larger."""
        work = topic.log.carry_forward(sequences, max_bytes, is_about_messages)
        if (use := await self._in_thread(work)) is None:
            return False
        use()
        return True

    async def _carry_forward(
        self, topic: Topic, checkpoint: SavedCheckpoint, all_needed: int, now_ns: int
    ) -> int:
        """Carry forward a few messages that prevent the deletion of many bytes.

        Returns:
            The sequence before which the log may be discarded; 0 if nothing was carried forward.
        """
        log = topic.log
        files = [file for file in log.files[:-1] if file.next_sequence <= all_needed]
        pinned_bytes = sum(file.size for file in files)
        if pinned_bytes < PINNED_BYTES or topic.carry_again_ns is not None:
            return 0
        limit = files[-1].next_sequence
        sequences = await self._in_thread(partial(checkpoint.unfinished_before, limit))
        max_bytes = int(pinned_bytes * CARRIED_BYTES_SHARE)
        try:
            carried = (
                len(sequences) <= MAX_CARRIED_MESSAGES
                and len(sequences) <= (limit - log.disk_first_sequence) * CARRIED_MESSAGES_SHARE
                and await self._carry(topic, sequences, min(max_bytes, MAX_CARRIED_BYTES))
            )
        except LogError as exc:
            logger.error("%s", exc)
            carried = False
        if not carried:
            topic.carry_again_ns = now_ns + RETRY_NS
            return 0
        logger.info(
            "TOPIC(%s): %s carried forward, to free %d bytes of log",
            topic.name, count_of(len(sequences), "unfinished message"), pinned_bytes,
        )  # fmt: skip
        return limit

    async def maintain(self, topic: Topic) -> None:
        """Drop messages older than the TTL, and begin a new file if it is time. Logs errors."""
        if topic.view.ttl_ns:
            await self._expire(topic)
        files = topic.log.files
        if (files and wants_new_file(files, topic.settings, self._now_ns())) or self.has_room_to_give(topic):
            await self._rotate(topic)

    def has_room_to_give(self, topic: Topic) -> bool:
        """Whether the disk is short of space, and a topic's last file can be deleted after a new one is begun."""
        if not self._is_short() or topic.settings.keeps or not topic.is_finished:
            return False
        files = topic.log.files
        return bool(files) and files[-1].size > _BLOCK_BYTES

    async def _expire(self, topic: Topic) -> bool:
        """Drop messages older than the TTL, and schedule the next check; returns whether any were dropped."""
        if (oldest := topic.oldest_waiting) >= topic.log.next_sequence:
            return False
        now_ns, expired = self._now_ns(), False
        oldest_ns = topic.store.timestamp_in_memory(oldest)
        try:
            if oldest_ns is None:
                oldest_ns = await self._in_thread(partial(topic.store.published_ns, oldest))
            if oldest_ns < now_ns - topic.view.ttl_ns:
                find = partial(topic.store.first_since, now_ns - topic.view.ttl_ns)
                topic.limits.expire_before(await self._in_thread(partial(with_archives, find)))
                oldest_ns, expired = 0, True
        except LogReadError as exc:
            logger.error("%s: %s", topic.name, exc)
        # A minimum interval, so that the broker does not check once per message.
        again_ns = now_ns + max(topic.view.ttl_ns // _TTL_CHECKS, _MIN_TTL_CHECK_NS)
        self.schedule.watch(topic.name, max(again_ns, (oldest_ns or 0) + topic.view.ttl_ns))
        return expired


def _spread_ns(topic: Topic, now_ns: int, within_ns: int) -> int:
    """Return a time within `within_ns` that depends on the topic's name, so that topics' checks are spread."""
    return now_ns + crc32(topic.name.encode()) * min(within_ns, _SPREAD_NS) // 2**32
