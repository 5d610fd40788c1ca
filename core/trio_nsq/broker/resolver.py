"""Host name lookups in dedicated threads: a slow name server blocks a thread for seconds.

So trio's default threads wait only for the disk. Saves, syncs and reads have dedicated threads as well.
"""

import socket
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import trio

_THREADS = 4
"""Maximum number of threads for each host: one slow name delays no other name."""
TIMEOUT_S = 10.0
"""Limit for one lookup. Its thread may run longer: only the operating system can end it."""


class Resolver(trio.abc.HostnameResolver):
    """Resolves the host names of a trio run: those of nsqlookupd, statsd and authorization services."""

    def __init__(self) -> None:
        # By host, while a lookup runs. It may run longer than its caller waits.
        self._threads: WeakValueDictionary[Any, trio.CapacityLimiter] = WeakValueDictionary()

    async def getaddrinfo(self, host: bytes | None, port: Any, *more: int) -> Any:
        """As `socket.getaddrinfo`. Raises OSError, also after `TIMEOUT_S`."""
        return await self._call(host, partial(socket.getaddrinfo, host, port, *more))

    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        """As `socket.getnameinfo`. Raises OSError, also after `TIMEOUT_S`."""
        found: tuple[str, str] = await self._call(sockaddr, partial(socket.getnameinfo, sockaddr, flags))
        return found

    async def _call(self, host: Any, look_up: partial[Any]) -> Any:
        threads = self._threads.setdefault(host, trio.CapacityLimiter(_THREADS))
        with trio.move_on_after(TIMEOUT_S):
            return await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=threads)
        raise socket.gaierror(socket.EAI_AGAIN, f"the name server did not answer within {TIMEOUT_S:g} s")


def use_own_threads() -> None:
    """Install `Resolver` for the rest of this trio run, unless the run has a resolver already."""
    if (before := trio.socket.set_custom_hostname_resolver(Resolver())) is not None:
        trio.socket.set_custom_hostname_resolver(before)
