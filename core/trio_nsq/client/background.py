"""A background task for objects that are async context managers."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import trio


class BackgroundTask:
    """Runs one task while the `async with` block of its owner runs.

    It differs from a plain nursery:

    - The task is shielded from outside cancellation, so that the owner can close connections in order. It ends in
      `close`, which the owner always calls.
    - Exceptions of the block are not wrapped in a group. If the task crashes, which is a defect, the block is cancelled
      and `close` raises a group.
    """

    def __init__(self) -> None:
        self._scope = trio.CancelScope(shield=True)
        self._stopped = trio.Event()
        self._manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None

    async def open(self, main: Callable[[], Awaitable[None]]) -> None:
        """Start `main` as a task. Must be called in the task that will call `close`."""
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        self._nursery.start_soon(self._run, main)

    async def _run(self, main: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await main()
        finally:
            self._stopped.set()

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start another task, which `stop` does not cancel and `close` waits for."""
        assert self._nursery is not None
        self._nursery.start_soon(work)

    async def stop(self) -> None:
        """Cancel the task and wait until it ends; the block continues. Does nothing if the task has ended."""
        self._scope.cancel()
        await self._stopped.wait()

    async def close(self) -> None:
        """Cancel the task, wait until it ends, and close the nursery. Does nothing if it is not open."""
        manager, self._manager = self._manager, None
        if manager is not None:
            self._scope.cancel()
            await manager.__aexit__(None, None, None)
