"""Rotations: begins new files of logs, in threads, because that blocks on the disk."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from ...log.interface import Rotation
from ..errors import PublishRefused
from ..state.topic import Topic
from ..storage.disk_reserve import DiskReserve

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_THREADS: Final = 16
"""Threads for creating files only, which publishes wait for."""
_FINISHING_THREADS: Final = 2
"""For the rest of rotations, which no publish waits for."""


class Rotations:
    """Begins new files of topics' logs. One per broker.

    Args:
        nursery: Runs the rest of a rotation, while the new file is written to. It ends also if it is cancelled.
        on_finished: Called with the topic after that.

    Attributes:
        finishing: The topics for which a thread saves what belongs to the file before the last one.
    """

    def __init__(
        self, nursery: trio.Nursery, disk_reserve: DiskReserve, on_finished: Callable[[Topic], None]
    ) -> None:
        self.finishing: set[Topic] = set()
        self._nursery = nursery
        self._disk_reserve = disk_reserve
        self._on_finished = on_finished
        self._threads = trio.CapacityLimiter(_THREADS)
        self._finishing_threads = trio.CapacityLimiter(_FINISHING_THREADS)

    async def begin(self, topic: Topic, *, on_full_disk: bool) -> None:
        """Begin a new file of a topic's log: see `Log.rotation`. The last one must be finished.

        Args:
            on_full_disk: Use the disk reserve if the disk is full.

        Raises:
            LogError: There is no new file.
            PublishRefused: The disk is full, and `on_full_disk` is False.
        """
        rotation = topic.log.rotation()
        work = self._disk_reserve.use if on_full_disk else self._disk_reserve.append
        await trio.to_thread.run_sync(work, rotation.create, limiter=self._threads)
        rotation.use()
        self.finishing.add(topic)
        self._nursery.start_soon(self._finish, topic, rotation)

    async def _finish(self, topic: Topic, rotation: Rotation) -> None:
        try:
            with trio.CancelScope(shield=True):  # it waits only for the disk
                await trio.to_thread.run_sync(self._finish_now, rotation, limiter=self._finishing_threads)
        except Exception:  # a defect in the broker must not stop it: the messages are stored
            logger.exception("%s: the rest of a rotation failed", topic.name)
        self.finishing.discard(topic)
        self._on_finished(topic)

    def _finish_now(self, rotation: Rotation) -> None:
        with suppress(PublishRefused):  # on a full disk, appends need the room more
            self._disk_reserve.append(rotation.finish)
