"""A background task for objects that are async context managers."""

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from ..event_loop import runtime

if TYPE_CHECKING:
    from ..event_loop.asyncio_loop import DetachedTasks


class BackgroundTask:
    """Runs one task from `open` to `close`, while the `async with` block of its owner runs.

    It differs from a plain nursery:

    - The task is shielded from outside cancellation, so that the owner can close connections in order. It ends in
      `close`, which the owner always calls.
    - Exceptions of the block are not wrapped in a group.
    - Under asyncio, any task may call `close`: the block may be entered and left by different tasks.

    If the task crashes, which is a defect, `close` raises a group. Under trio, the block is cancelled. Under asyncio,
    `crashed` is called instead, which must wake all that wait for the task.
    """

    def __init__(self, crashed: Callable[[Exception], object] = lambda _: None) -> None:
        self._crashed = crashed
        self._scope: runtime.CancelScope | None = None  # under trio, while it is open
        self._stopped = runtime.Event()
        self._manager: AbstractAsyncContextManager[runtime.Nursery] | None = None
        self._nursery: runtime.Nursery | None = None
        self._detached: DetachedTasks | None = None  # under asyncio

    async def open(self, main: Callable[[], Awaitable[None]]) -> None:
        """Start `main` as a task. Under trio, the same task must call `close`."""
        self._detached = runtime.detached_tasks()
        if self._detached is not None:
            self._detached.open(main, self._crashed)
            return
        self._scope = runtime.cancel_scope(shield=True)
        self._manager = runtime.open_nursery()
        self._nursery = await self._manager.__aenter__()
        self._nursery.start_soon(self._run, main, self._scope)

    async def _run(self, main: Callable[[], Awaitable[None]], scope: runtime.CancelScope) -> None:
        try:
            with scope:
                await main()
        finally:
            self._stopped.set()

    def start_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start another task, which `stop` does not cancel and `close` waits for."""
        tasks = self._detached or self._nursery
        assert tasks is not None
        tasks.start_soon(work)

    async def stop(self) -> None:
        """Cancel the task and wait until it ends; the block continues. Does nothing if the task has ended."""
        if self._detached is not None:
            await self._detached.stop()
            return
        if self._scope is not None:
            self._scope.cancel()
        await self._stopped.wait()

    async def close(self) -> None:
        """Cancel the task, wait until it ends, and close the nursery. Does nothing if it is not open."""
        detached, self._detached = self._detached, None
        if detached is not None:
            await runtime.shielded(detached.close)
        manager, self._manager = self._manager, None
        if manager is not None and self._scope is not None:
            self._scope.cancel()
            await manager.__aexit__(None, None, None)
