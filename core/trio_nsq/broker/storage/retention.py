"""How long messages are kept that every channel has passed, and when that has to be looked at again.

A log loses whole files only, and never the one that grows. So that what is kept does not exceed what was asked for by
more than an eighth, a new file is begun whenever the last one reaches back over, or holds, an eighth of it.

What a channel still needs stays in any case. Where that is a few messages, deferred for long or never answered, among
very many that are finished, they are carried forward: copied into a file of their own (see `CarriedForwardSegment`), so
that those around them can go.

Ages are told by the machine's clock, as the messages' timestamps are, though the clock may be set meanwhile.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import trio
from zlib_ng.zlib_ng import crc32

from ...log import LogError, LogReadError
from ...log.interface import LogFileFacts
from ...wording import count_of
from ..state.alarms import Alarms
from ..state.checkpoint import Checkpoint
from ..state.record_metadata import is_about_messages
from ..state.settings import TopicSettings
from ..state.topic import Topic

_T = TypeVar("_T")

logger = logging.getLogger("trio_nsq.broker")

_NS_PER_MS = 1_000_000
_FILES = 8
_THREADS = 4
"""For reads alone: on a slow disk each takes long."""
_LEAST_FILE_BYTES = 64 * 1024
LEAST_FILE_NS = 1_000_000_000
"""No new file is begun for less than this, however little is to be kept."""
_BLOCK_BYTES = 4096
"""A file that is no larger takes up no more than the one that is begun for it."""
PINNED_BYTES = 64 * 1024 * 1024
CARRIED_MESSAGES_SHARE = 0.01
CARRIED_BYTES_SHARE = 0.1
MAX_CARRIED_MESSAGES = 20_000
MAX_CARRIED_BYTES = 64 * 1024 * 1024
"""Unfinished messages are carried forward if at least PINNED_BYTES of files can be deleted then, if they are at most
these shares of the messages and bytes in those files, and if they are at most so many: docs/decisions/0011."""
TRY_AGAIN_NS = 30 * 1_000_000_000
_LOOKS = 16
_LEAST_LOOK_NS = 1_000_000_000
"""Messages that wait are looked at this many times while one becomes too old, but not more often than this."""
_SPREAD_NS = 300 * 1_000_000_000
"""After a start, many topics are looked at one after the other within this time, or an eighth of what they keep."""


def kept_from(files: Sequence[LogFileFacts], settings: TopicSettings, now_ns: int) -> int:
    """The oldest sequence that is kept for its own sake; the end of the files if none is.

    Args:
        files: Those of a log, at least one.
        now_ns: Unix nanoseconds.

    Raises:
        LogReadError: The operating system refused.
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
    """Whether it is time to begin a new file. Arguments as `kept_from`; reads nothing."""
    last, time_ms, max_bytes = files[-1], settings.retention_time_ms, settings.retention_bytes
    if not last.first_ns:
        return False
    if time_ms > 0 and _new_file_ns(last, time_ms) <= now_ns:
        return True
    return max_bytes > 0 and last.size > max(max_bytes // _FILES, _LEAST_FILE_BYTES)


def _new_file_ns(last: LogFileFacts, time_ms: int) -> int:
    return last.first_ns + max(time_ms * _NS_PER_MS // _FILES, LEAST_FILE_NS)


def look_again_ns(files: Sequence[LogFileFacts], settings: TopicSettings, now_ns: int) -> int | None:
    """When one of these files has had its time, or a new one is to be begun, though nothing else happens; None: never.

    Arguments and errors as `kept_from`. What has had its time by now is still needed by a channel, and goes when that
    has moved.
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


class RetentionManager:
    """Lets messages go whose time is over. One for a broker.

    Args:
        now_ns: The time by the clock of the messages' timestamps, Unix nanoseconds.
        roll: Lets a topic's log begin a new file; returns whether it did, an error being noted.
        is_short: Whether the disk is full: then files are begun only to let others go.

    Attributes:
        schedule: When topics have to be looked at though nothing happens to them, by name. They may be deleted by then.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        roll: Callable[[Topic], Awaitable[bool]],
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        self.schedule: Alarms[str] = Alarms()
        self._now_ns = now_ns
        self._roll = roll
        self._is_short = is_short
        self._threads = trio.CapacityLimiter(_THREADS)
        # When it is tried again to carry messages forward, where it did not pay or failed.
        self._in_vain: WeakKeyDictionary[Topic, int] = WeakKeyDictionary()

    def found(self, topic: Topic) -> None:
        """A topic was loaded: see to it that it is looked at in time. Reads nothing."""
        now_ns, files, settings = self._now_ns(), topic.log.files, topic.settings
        if topic.view.ttl_ns and topic.oldest_waiting < topic.log.next_sequence:
            self.schedule.watch(topic.name, _some_time(topic, now_ns, topic.view.ttl_ns // _LOOKS))
        if not files:
            return
        kept_ns = max(settings.retention_time_ms, 0) * _NS_PER_MS
        soon_ns = _some_time(topic, now_ns, kept_ns // _FILES)
        if (new_file_ns := look_again_ns(files[-1:], settings, now_ns)) is not None:
            self.schedule.watch(topic.name, max(soon_ns, new_file_ns))
        if len(files) == 1 or topic.oldest_waiting < files[0].next_sequence:
            return  # when a channel has passed a file the topic is saved, and looked at
        if kept_ns:
            self.schedule.watch(topic.name, max(soon_ns, files[0].created_ns + kept_ns))
        elif kept_from(files, settings, now_ns) > files[0].base_sequence:
            self.schedule.watch(topic.name, now_ns)  # less is to be kept than before

    async def _in_thread(self, read: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(read, limiter=self._threads)

    async def has_work(self, topic: Topic) -> bool:
        """Look at a topic whose time has come; returns whether it has to be saved, so that something goes.

        What has waited for too long is dropped. Errors are logged, or left for who saves it.
        """
        expired = bool(topic.view.ttl_ns) and await self._expire(topic)
        at_ns = await self._in_thread(partial(self._next_loss_ns, topic, topic.oldest_waiting))
        if expired or (at_ns is not None and at_ns <= self._now_ns()):
            return True
        self.schedule.watch(topic.name, at_ns)
        return False

    def _next_loss_ns(self, topic: Topic, needed: int) -> int | None:
        """When a file has had its time, or one is to be begun, which may be long ago; None: never. May read.

        From `needed` on messages are yet to be delivered.
        """
        now_ns, files, settings = self._now_ns(), topic.log.files, topic.settings
        try:
            passed = len(files) > 1 and needed >= files[0].next_sequence
            if passed and kept_from(files, settings, now_ns) > files[0].base_sequence:
                return now_ns
            return look_again_ns(files, settings, now_ns) if files else None
        except LogReadError:
            return now_ns  # who saves it says so

    def discard(self, topic: Topic, checkpoint: Checkpoint, now_ns: int) -> int | None:
        """Let a topic's log lose what neither a channel needs nor retention keeps; to be called in a thread.

        Args:
            checkpoint: It is on disk.
            now_ns: Unix nanoseconds.

        Returns:
            When to do so again, as `look_again_ns`.

        Raises:
            LogError: The operating system refused.
        """
        log, settings = topic.log, checkpoint.settings
        if not log.files:
            return None
        kept = kept_from(log.files, settings, now_ns)
        needed = min(checkpoint.first_needed, kept)
        if now_ns >= self._in_vain.get(topic, now_ns):
            self._in_vain.pop(topic, None)
        if log.has_carried_forward and checkpoint.first_needed >= log.first_sequence:
            log.carry_forward([], 0)  # they are finished
        elif needed < min(checkpoint.all_needed, kept):
            carried = self._carry_forward(topic, checkpoint, min(checkpoint.all_needed, kept), now_ns)
            needed = max(needed, carried)
        log.discard_before(needed)
        times = look_again_ns(log.files, settings, now_ns), self._in_vain.get(topic)
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def _carry_forward(self, topic: Topic, checkpoint: Checkpoint, all_needed: int, now_ns: int) -> int:
        """Copy aside the few messages that keep many bytes from being deleted; returns what may then be discarded."""
        log = topic.log
        files = [file for file in log.files[:-1] if file.next_sequence <= all_needed]
        pinned_bytes = sum(file.size for file in files)
        if pinned_bytes < PINNED_BYTES or topic in self._in_vain:
            return 0
        limit = files[-1].next_sequence
        sequences = checkpoint.unfinished_before(limit)
        max_bytes = int(pinned_bytes * CARRIED_BYTES_SHARE)
        try:
            carried = (
                len(sequences) <= MAX_CARRIED_MESSAGES
                and len(sequences) <= (limit - log.first_sequence) * CARRIED_MESSAGES_SHARE
                and log.carry_forward(sequences, min(max_bytes, MAX_CARRIED_BYTES), is_about_messages)
            )
        except LogError as exc:
            logger.error("%s", exc)
            carried = False
        if not carried:
            self._in_vain[topic] = now_ns + TRY_AGAIN_NS
            return 0
        logger.info(
            "TOPIC(%s): %s carried forward, to free %d bytes of log",
            topic.name, count_of(len(sequences), "unfinished message"), pinned_bytes,
        )  # fmt: skip
        return limit

    async def look(self, topic: Topic) -> None:
        """Drop what has waited for too long, and begin a new file if it is time for one; errors are logged."""
        if topic.view.ttl_ns:
            await self._expire(topic)
        files = topic.log.files
        if (files and wants_new_file(files, topic.settings, self._now_ns())) or self.has_room_to_give(topic):
            await self._roll(topic)

    def has_room_to_give(self, topic: Topic) -> bool:
        """Whether the disk is full, and a topic's last file may go as soon as another is begun."""
        if not self._is_short() or topic.settings.keeps or not topic.is_finished:
            return False
        files = topic.log.files
        return bool(files) and files[-1].size > _BLOCK_BYTES

    async def _expire(self, topic: Topic) -> bool:
        """Drop what has waited for too long, and see to the next look; returns whether anything was."""
        if (oldest := topic.oldest_waiting) >= topic.log.next_sequence:
            return False
        now_ns, expired = self._now_ns(), False
        oldest_ns = topic.store.timestamp_in_memory(oldest)
        try:
            if oldest_ns is None:
                oldest_ns = await self._in_thread(partial(topic.store.published_ns, oldest))
            if oldest_ns < now_ns - topic.view.ttl_ns:
                find = partial(topic.store.first_since, now_ns - topic.view.ttl_ns)
                topic.limits.expire_before(await self._in_thread(find))
                oldest_ns, expired = 0, True
        except LogReadError as exc:
            logger.error("%s: %s", topic.name, exc)
        # Not each time that a single message has had its time.
        again_ns = now_ns + max(topic.view.ttl_ns // _LOOKS, _LEAST_LOOK_NS)
        self.schedule.watch(topic.name, max(again_ns, (oldest_ns or 0) + topic.view.ttl_ns))
        return expired


def _some_time(topic: Topic, now_ns: int, within_ns: int) -> int:
    """A time soon: not that of most other topics, and the same for this one whenever it is asked for."""
    return now_ns + crc32(topic.name.encode()) * min(within_ns, _SPREAD_NS) // 2**32
