"""Tasks behind an object that is used with `async with`."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import trio


class BackgroundTask:
    """A nursery whose body is the `async with` block of another object.

    Three things differ from a plain nursery:

    - the tasks are shielded from cancellation from outside, so that their owner can still use them to say
      goodbye; they end in `close`, which the owner always calls;
    - `stop` ends the tasks and leaves the body running;
    - an exception of the body is not wrapped in a group. Only a crash of a task, which is a defect, comes out
      of `close` as one, and cancels the body.
    """

    def __init__(self) -> None:
        self._scope = trio.CancelScope(shield=True)
        self._stopped = trio.Event()
        self._manager: AbstractAsyncContextManager[trio.Nursery] | None = None

    async def open(self, main: Callable[[], Awaitable[None]]) -> None:
        """Start `main` as a task. Must be called in the task that will call `close`."""
        self._manager = trio.open_nursery()
        nursery = await self._manager.__aenter__()
        nursery.start_soon(self._run, main)

    async def _run(self, main: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await main()
        finally:
            self._stopped.set()

    async def stop(self) -> None:
        """Cancel the task and wait for its end; the body goes on. Harmless if it has ended before."""
        self._scope.cancel()
        await self._stopped.wait()

    async def close(self) -> None:
        """Cancel the task and wait for its end, whatever the body ended with: that goes on by itself."""
        assert self._manager is not None
        self._scope.cancel()
        await self._manager.__aexit__(None, None, None)
