"""Scheduled syncs: with `--sync=interval`, decides when each log is synced, and lets callers wait for it."""

from collections.abc import Sequence

import trio

from ...log import RecordBatch
from ..monitoring.histogram import Histogram
from ..options import BrokerOptions
from ..state.topic import Topic
from .local_sync import LocalSync


class ScheduledSyncs:
    """Syncs logs after a number of messages or bytes, or after a time. One per broker."""

    def __init__(self, options: BrokerOptions, local: LocalSync) -> None:
        self.duration: Histogram = Histogram()
        self._options = options
        self._local = local
        # Topics with writes that are not on stable storage; the sequence before which a sync was requested last.
        self._unsynced: dict[Topic, int] = {}
        self._is_due = trio.Event()

    def record_write(self, topic: Topic, records: Sequence[RecordBatch]) -> None:
        """Record a write to a topic's log, so that it is synced in time."""
        requested = self._unsynced.get(topic)
        if requested is None:
            requested = self._unsynced[topic] = records[0].base_sequence
        log = topic.log
        if log.written_sequence - requested >= self._options.sync_every:
            self._is_due.set()
        elif log.wants_sync and not self._local.is_at(topic):
            self._unsynced[topic] = log.written_sequence
            self._local.request(topic, begins=False)

    async def sync(self, topic: Topic) -> bool:
        """Return when all earlier writes to a topic's log are on stable storage; False if the sync failed."""
        if topic not in self._unsynced:
            return True
        self._unsynced[topic] = upto = topic.log.written_sequence
        if await self._local.sync(topic) is not None:
            return False
        if topic.log.written_sequence == upto:
            self._unsynced.pop(topic, None)
        return True

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
