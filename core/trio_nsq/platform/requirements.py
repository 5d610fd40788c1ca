"""Clear errors for programs in which trio cannot run: asyncio, and gevent's replaced modules."""

import select
import sys

import trio


def require_trio(name: str) -> None:
    """Check that the caller runs in a trio task.

    Args:
        name: The called function, for the error.

    Raises:
        RuntimeError: The caller does not run in a trio task.
    """
    if trio.lowlevel.in_trio_task():
        return
    raise RuntimeError(
        f"{name} must run in a trio task: start the program with trio.run. asyncio cannot run it: in an asyncio "
        f"program, call trio.run in a thread (asyncio.to_thread)"
    )


def has_gil() -> bool:
    """Whether Python's threads share a global lock; a free-threaded Python has none."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def require_epoll() -> None:
    """Check that gevent has not removed what trio waits with.

    Raises:
        RuntimeError: It has, or the system is not Linux.
    """
    if not hasattr(select, "epoll"):
        raise RuntimeError(
            "trio cannot run: the module select has no epoll. gevent's monkey.patch_all() removes it. Clients work "
            "under gevent with trio_nsq.sync"
        )
