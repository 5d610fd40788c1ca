"""Limits how many tokens the clients of one address have checked at the same time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ...access.attempts import network_of
from .incoming import Refused

MAX_OF_CLIENT = 4
MAX_RUNNING = 64
MAX_WAITING = 256
WAIT_S = 5.0


class Attempts:
    """Each check asks all brokers, so a flood of tokens must not become a flood of requests to them."""

    def __init__(self) -> None:
        self._all = trio.CapacityLimiter(MAX_RUNNING)
        self._clients: dict[str, trio.CapacityLimiter] = {}
        self._waiting = 0

    @asynccontextmanager
    async def one(self, host: str) -> AsyncIterator[None]:
        """Wait for the turn of a client's check, which runs in the block. Raises Refused."""
        if self._waiting >= MAX_WAITING:
            raise _TOO_MANY
        network = network_of(host)
        limiter = self._clients.setdefault(network, trio.CapacityLimiter(MAX_OF_CLIENT))
        me = object()
        self._waiting += 1
        try:
            with trio.move_on_after(WAIT_S) as waiting:
                await limiter.acquire_on_behalf_of(me)
                try:
                    await self._all.acquire_on_behalf_of(me)
                except trio.Cancelled:
                    limiter.release_on_behalf_of(me)
                    raise
        finally:
            self._waiting -= 1
            self._forget(network)
        if waiting.cancelled_caught:
            raise _TOO_MANY
        try:
            yield
        finally:
            self._all.release_on_behalf_of(me)
            limiter.release_on_behalf_of(me)
            self._forget(network)

    def _forget(self, network: str) -> None:
        limiter = self._clients.get(network)
        if limiter is not None and not limiter.borrowed_tokens and not limiter.statistics().tasks_waiting:
            del self._clients[network]


_TOO_MANY = Refused(429, "TOO_MANY_LOGINS", "Too many logins from this address. Try again in a minute.")
