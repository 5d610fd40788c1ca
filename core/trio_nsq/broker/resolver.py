"""Looking up host names: in threads of their own, for a name server that is slow holds each of them for seconds.

What is left to trio's own threads, then, waits for the disk at most; saves, syncs and reads have their own besides.
"""

import socket
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import trio

_THREADS = 4
"""For each host: a name that takes long holds up neither other names nor more threads than these."""
TIMEOUT_S = 10.0
"""For one lookup. Its thread may stay for longer: nothing ends it but the system."""


class Resolver(trio.abc.HostnameResolver):
    """Looks names up for everything in a trio run: for nsqlookupd, statsd and authorization services."""

    def __init__(self) -> None:
        # By host, while it is being looked up, which may be longer than somebody waits for it.
        self._threads: WeakValueDictionary[Any, trio.CapacityLimiter] = WeakValueDictionary()

    async def getaddrinfo(self, host: bytes | None, port: Any, *more: int) -> Any:
        """As `socket.getaddrinfo`. Raises OSError, also if it takes too long."""
        return await self._call(host, partial(socket.getaddrinfo, host, port, *more))

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        """As `socket.getnameinfo`. Raises OSError, also if it takes too long."""
        found: tuple[str, str] = await self._call(sockaddr, partial(socket.getnameinfo, sockaddr, flags))
        return found

    async def _call(self, host: Any, look_up: partial[Any]) -> Any:
        threads = self._threads.setdefault(host, trio.CapacityLimiter(_THREADS))
        with trio.move_on_after(TIMEOUT_S):
            return await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=threads)
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer of the name server within {TIMEOUT_S:g} s")


def use_own_threads() -> None:
    """Look names up this way for the rest of this trio run, unless it has a resolver already."""
    if (before := trio.socket.set_custom_hostname_resolver(Resolver())) is not None:
        trio.socket.set_custom_hostname_resolver(before)
