"""The synchronous client under gevent; loaded only if gevent has replaced the modules of this process.

trio cannot run then: it needs `select.epoll`, which gevent removes, and Python's own locks. asyncio takes any selector,
so the client runs on asyncio, in a thread that is none of gevent's. Greenlets that wait for it let others run.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import gevent
from gevent.event import Event
from gevent.monkey import get_original
from sniffio import current_async_library_cvar

start_thread: Callable[..., object] = get_original("_thread", "start_new_thread")
_getaddrinfo = get_original("socket", "getaddrinfo")
_HOUR_S = 3600


class GreenletLock:
    """A `Lock` for greenlets."""

    def __init__(self) -> None:
        self._released = Event()
        self._hub_loop = gevent.get_hub().loop

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if timeout >= 0 or not blocking:
            return bool(self._released.wait(max(0, timeout)))
        while not self._released.wait(_HOUR_S):  # without a timer, gevent ends a program that only waits
            pass
        return True

    def release(self) -> None:
        try:
            self._hub_loop.run_callback_threadsafe(self._released.set)
        except ValueError:
            pass  # the waiting thread has ended


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(get_original("selectors", "EpollSelector")())

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Resolve a name in a thread; asyncio's own threads would be greenlets, which do not run here."""
        found = self.create_future()

        def resolve() -> None:
            try:
                finish, outcome = found.set_result, _getaddrinfo(host, port, **options)
            except Exception as error:
                finish, outcome = found.set_exception, error
            self.call_soon_threadsafe(lambda: found.done() or finish(outcome))

        start_thread(resolve, ())
        return await found


def tell_loop() -> None:
    """Tell anyio which loop runs, in a callback that starts a task: otherwise anyio knows it by the current task."""
    current_async_library_cvar.set("asyncio")


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run an async function, in a thread that `start_thread` has started."""
    try:
        anyio.run(main, backend_options={"loop_factory": _Loop})
    finally:
        gevent.get_hub().destroy(destroy_loop=True)  # sockets of gevent have created one
