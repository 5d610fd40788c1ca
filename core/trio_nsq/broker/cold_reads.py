"""Reads messages that are not in memory, in threads, so that the event loop never waits for a disk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from .state.broker import Broker
from .state.message_store import MessageStore
from .state.wanted import Found, Wanted

_THREADS = 8
"""A failing disk blocks a thread for seconds, so publishes and readers of topics use other threads."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Read:
    """A read that is under way."""

    done: trio.Event = field(default_factory=trio.Event)
    found: Found | None = None


class ColdReads:
    """Runs the disk reads of all channels of a broker.

    Args:
        broker: Says whether a topic is still served.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._threads = trio.CapacityLimiter(_THREADS)
        # Channels at the same place share a read.
        self._under_way: dict[tuple[MessageStore, Wanted], _Read] = {}

    async def call(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one of the threads, and return its result."""
        return await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)

    async def read(self, store: MessageStore, wanted: Wanted) -> Found:
        """Read what channels want of a topic's log. Errors of the disk are in what is returned."""
        key = store, wanted
        if (read := self._under_way.get(key)) is not None:
            await read.done.wait()
            if read.found is not None:
                return read.found
        read = self._under_way[key] = _Read()
        try:
            found = read.found = await self.call(lambda: store.read(wanted))
            if self._broker.serves_store(store):
                store.remember_read(found.ahead or ())
                again = {id(batch): batch for batch in found.again.values() if batch is not None}
                store.remember_read(again.values())
        finally:
            if self._under_way.get(key) is read:
                del self._under_way[key]
            read.done.set()
        return found
