"""Scheduled syncs: with `--sync=interval`, decides when each log is synced, and lets callers wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from ...log import RecordBatch
from ..monitoring.histogram import Histogram
from ..options import BrokerOptions
from ..state.topic import Topic
from .group_commit import GroupCommitter, Synced

_SYNC_BYTES: Final = 16 * 1024 * 1024
"""Unsynced bytes after which a sync is requested, even if they are few messages: docs/decisions/0004."""


@dataclass(slots=True)
class _Unsynced:
    """The part of a log that is not on stable storage.

    Attributes:
        messages, size: Messages, and bytes of their records.
        requested_messages, requested_size: The part of these for which a sync was requested.
        last_request: The number of the last request.
    """

    messages: int = 0
    size: int = 0
    requested_messages: int = 0
    requested_size: int = 0
    last_request: int = 0


@dataclass(slots=True)
class _Wait:
    """A caller of `sync` that waits for the sync that serves its request."""

    request: int
    done: trio.Event = field(default_factory=trio.Event)
    is_synced: bool = False


class ScheduledSyncs:
    """Syncs logs after a number of messages or bytes, or after a time. One per broker."""

    def __init__(self, options: BrokerOptions, committer: GroupCommitter) -> None:
        self.duration = Histogram()
        self._options = options
        self._committer = committer
        self._unsynced: dict[Topic, _Unsynced] = {}
        self._waits: dict[Topic, list[_Wait]] = {}
        self._is_due = trio.Event()

    def record_write(self, topic: Topic, records: Sequence[RecordBatch]) -> None:
        """Record a write to a topic's log, so that it is synced in time."""
        unsynced = self._unsynced.get(topic)
        if unsynced is None:
            unsynced = self._unsynced[topic] = _Unsynced()
        unsynced.messages += records[-1].next_sequence - records[0].base_sequence
        unsynced.size += sum([record.record_bytes for record in records])
        if (
            unsynced.messages - unsynced.requested_messages >= self._options.sync_every
            or unsynced.size - unsynced.requested_size >= _SYNC_BYTES
        ):
            self._is_due.set()

    def record_sync(self, result: Synced) -> None:
        """Record the result of a sync, and wake the callers of `sync` that it serves."""
        topic, unsynced = result.topic, self._unsynced.get(result.topic)
        if result.error is None:
            self.duration.observe(result.took_s)
        if unsynced is not None and result.error is None and result.writes == topic.log.writes:
            del self._unsynced[topic]
        elif unsynced is not None and result.request == unsynced.last_request:
            if result.error is None:
                unsynced.messages -= unsynced.requested_messages
                unsynced.size -= unsynced.requested_size
            unsynced.requested_messages = unsynced.requested_size = 0
        waits = self._waits.pop(topic, [])
        for wait in waits:
            if wait.request <= result.request:
                wait.is_synced = result.error is None
                wait.done.set()
        if later := [wait for wait in waits if not wait.done.is_set()]:
            self._waits[topic] = later

    async def sync(self, topic: Topic) -> bool:
        """Return when all earlier writes to a topic's log are on stable storage; False if the sync failed."""
        if (unsynced := self._unsynced.get(topic)) is None:
            return True
        wait = _Wait(self._committer.request(topic))
        unsynced.last_request = wait.request
        unsynced.requested_messages, unsynced.requested_size = unsynced.messages, unsynced.size
        self._waits.setdefault(topic, []).append(wait)
        await wait.done.wait()
        return wait.is_synced

    async def sync_all(self) -> None:
        """Sync all logs with unsynced writes, and return when all syncs have ended or failed."""
        async with trio.open_nursery() as nursery:
            for topic in list(self._unsynced):
                nursery.start_soon(self.sync, topic)

    async def run(self) -> None:
        """Sync on schedule; runs until cancelled."""
        while True:
            with trio.move_on_after(self._options.sync_timeout_ms / 1000):
                await self._is_due.wait()
            self._is_due = trio.Event()
            await self.sync_all()

    def forget(self, topic: Topic) -> None:
        self._unsynced.pop(topic, None)
