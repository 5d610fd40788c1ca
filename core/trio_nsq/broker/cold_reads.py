"""Reads messages that are not in memory, in threads, so that the event loop never waits for a disk."""

import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from ..log import LogReadError
from .state.channel import Channel
from .state.message_store import MessageStore
from .state.wanted import Found, Wanted

logger = logging.getLogger("trio_nsq.broker")

_THREADS = 8
"""A failing disk blocks a thread for seconds, so publishes and readers of topics use other threads."""

_AGAIN_S = 1.0
"""Pause after a failed read. Without it, a channel with other messages to deliver would retry all the time."""

_T = TypeVar("_T")


class ColdReads:
    """Runs the disk reads of all channels of a broker.

    Args:
        nursery: Runs the reads.
        serves: Whether a channel still exists.
        deliver: Called with a channel after its messages were read.
        note_read: Called with a channel after a read, and with the error if some messages could not be read, else None.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        serves: Callable[[Channel], bool],
        deliver: Callable[[Channel], None],
        note_read: Callable[[Channel, LogReadError | None], None],
    ) -> None:
        self._nursery = nursery
        self._serves = serves
        self._deliver = deliver
        self._note_read = note_read
        self._threads = trio.CapacityLimiter(_THREADS)
        self._reading: dict[
            tuple[MessageStore, Wanted], list[Channel]
        ] = {}  # channels at the same place share a read
        self._waiting: set[Channel] = set()

    async def call(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one of the threads, and return its result."""
        return await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)

    def begin(self, channel: Channel) -> None:
        """Start to read what a channel wants, unless a read for it runs already."""
        if channel in self._waiting:
            return
        self._waiting.add(channel)
        key = channel.store, channel.read_ahead.wanted()
        if (channels := self._reading.get(key)) is not None:
            channels.append(channel)
            return
        self._reading[key] = [channel]
        self._nursery.start_soon(self._read, *key)

    async def _read(self, store: MessageStore, wanted: Wanted) -> None:
        found: Found | None = None
        try:
            found = await self.call(lambda: store.read(wanted))
            if any(map(self._serves, self._reading[store, wanted])):
                store.remember_read(found.ahead or ())
                store.remember_read(
                    {id(each): each for each in found.again.values() if each is not None}.values()
                )
        except Exception:
            # A defect of the broker: it must not affect other channels.
            logger.exception("%s: messages could not be read", store.name)
        channels = self._reading.pop((store, wanted))
        self._waiting.difference_update(channels)
        failed = [channel for channel in channels if found is None or not self._give(channel, found)]
        if failed:
            self._waiting.update(failed)
            await trio.sleep(_AGAIN_S)
            self._waiting.difference_update(failed)
            for channel in failed:
                self._try_to_deliver(channel)

    def _give(self, channel: Channel, found: Found) -> bool:
        """Hand a channel what was read; False if it must pause before its next read."""
        if not self._serves(channel):
            return True
        try:
            channel.read_ahead.take(found)
            self._note_read(channel, found.error)
        except Exception:
            # A defect of the broker: it must not affect other channels.
            logger.exception(
                "%s/%s: could not take the messages that were read", channel.topic.name, channel.name
            )
            return False
        if found.error is not None and not found.ahead and not found.again:
            return False
        return self._try_to_deliver(channel)

    def _try_to_deliver(self, channel: Channel) -> bool:
        if self._serves(channel):
            try:
                self._deliver(channel)
            except Exception:
                # A defect of the broker: it must not affect other channels.
                logger.exception("%s/%s: nothing could be delivered", channel.topic.name, channel.name)
                return False
        return True
