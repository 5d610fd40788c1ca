"""Locks with which threads, or greenlets of gevent, wait for the event loop's thread."""

import sys
from _thread import allocate_lock
from typing import Protocol


class Lock(Protocol):
    """Is acquired when it is made; any thread releases it, once."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


def is_gevent() -> bool:
    """Whether gevent has replaced what threads and trio wait with."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and any(map(monkey.is_module_patched, ("threading", "select")))


def new_lock() -> Lock:
    """Return a lock, which the calling thread or greenlet waits for by acquiring it."""
    if is_gevent():
        from .gevent_thread import GreenletLock

        return GreenletLock()
    lock = allocate_lock()
    lock.acquire()
    return lock
