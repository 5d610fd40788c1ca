"""Reading from disk what channels have to deliver, in threads: the event loop never waits for a disk."""

import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from ..log import LogReadError
from .state.channel import Channel
from .state.topic import Topic
from .state.wanted import Wanted

logger = logging.getLogger("trio_nsq.broker")

_THREADS = 8
"""A disk that fails keeps a thread for seconds. Neither publishes nor reads from outside share these."""

_T = TypeVar("_T")


class ColdReads:
    """The reads that are under way. One for a broker.

    Args:
        nursery: Runs them.
        serves: Whether a channel is still there.
        deliver: Called with a channel that has what it wanted.
        unreadable: Called with a channel of whose messages some could not be read, and why.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        serves: Callable[[Channel], bool],
        deliver: Callable[[Channel], None],
        unreadable: Callable[[Channel, LogReadError], None],
    ) -> None:
        self._nursery = nursery
        self._serves = serves
        self._deliver = deliver
        self._unreadable = unreadable
        self._threads = trio.CapacityLimiter(_THREADS)
        self._reading: dict[
            tuple[Topic, Wanted], list[Channel]
        ] = {}  # channels at the same place share a read
        self._waiting: set[Channel] = set()

    async def call(self, work: Callable[[], _T]) -> _T:
        """Read in a thread."""
        return await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)

    def begin(self, channel: Channel) -> None:
        """Read what a channel wants, unless that is under way."""
        if channel in self._waiting:
            return
        self._waiting.add(channel)
        key = channel.topic, channel.wanted()
        if (channels := self._reading.get(key)) is not None:
            channels.append(channel)
            return
        self._reading[key] = [channel]
        self._nursery.start_soon(self._read, *key)

    async def _read(self, topic: Topic, wanted: Wanted) -> None:
        try:
            found = await self.call(lambda: topic.read(wanted))
        except Exception:
            # A mistake of ours: it must not reach other channels.
            logger.exception("%s: messages could not be read", topic.name)
            return
        finally:
            channels = self._reading.pop((topic, wanted))
            self._waiting.difference_update(channels)
        served = [channel for channel in channels if self._serves(channel)]
        if served:
            topic.remember_read(found.ahead or ())
            topic.remember_read(
                {id(each): each for each in found.again.values() if each is not None}.values()
            )
        for channel in served:
            channel.take_read(found)
            if found.error is not None:
                self._unreadable(channel, found.error)
            if found.error is None or found.ahead or found.again:
                self._deliver(channel)
