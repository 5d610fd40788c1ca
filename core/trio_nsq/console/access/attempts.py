"""Limits how many tokens the clients of one address have checked at the same time."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

import trio

from ...protocol.address import network_of
from .request_head import Refused

MAX_OF_CLIENT = 16
MAX_RUNNING = 256
WAIT_S = 5.0


class Attempts:
    """Each check asks all brokers, so a flood of tokens must not become a flood of requests to them.

    Those that wait are limited by their connections.
    """

    def __init__(self) -> None:
        self._all = trio.CapacityLimiter(MAX_RUNNING)
        self._clients: WeakValueDictionary[str, trio.CapacityLimiter] = WeakValueDictionary()  # those in use

    @asynccontextmanager
    async def one(self, host: str) -> AsyncIterator[None]:
        """Wait for the turn of a client's check, which runs in the block. Raises Refused."""
        of_client = self._clients.setdefault(network_of(host), trio.CapacityLimiter(MAX_OF_CLIENT))
        async with AsyncExitStack() as turn:
            with trio.move_on_after(WAIT_S) as waiting:
                await turn.enter_async_context(of_client)
                await turn.enter_async_context(self._all)
            if waiting.cancelled_caught:
                raise _TOO_MANY
            yield


_TOO_MANY = Refused(429, "TOO_MANY_LOGINS", "Too many logins from this address. Try again in a minute.")
