"""What the client needs of an event loop. Each function uses the loop that runs the calling task: trio or asyncio.

Names and meaning are trio's, also under asyncio: a cancelled scope cancels every later wait, too, and a timeout raises
`TooSlowError`. Under trio the objects are trio's own, but not the errors.

Programs on trio import neither asyncio nor anyio: `AsyncioLoop` is loaded when a task of asyncio enters a client.
Programs on asyncio do not import trio, which takes longer than all of the client, unless they ask discovery services:
httpcore imports it.
"""

import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from .sides import BrokenResourceError, in_trio_task

if TYPE_CHECKING:
    from asyncio import Future

    import trio

    from .asyncio_loop import AsyncioLoop, DetachedTasks
else:

    class _Trio:
        """The module, loaded when it is first used."""

        def __getattr__(self, name: str) -> object:
            import trio

            Event.set = trio.lowlevel.enable_ki_protection(Event.set)
            self.__dict__.update(vars(trio))
            return getattr(trio, name)

    trio = _Trio()


class TooSlowError(Exception):
    """A timeout of `fail_after` has passed."""


class Stream(Protocol):
    """A connection, such as a `trio.abc.HalfCloseableStream`."""

    async def receive_some(self, max_bytes: int | None = None, /) -> bytes | bytearray: ...

    async def send_all(self, data: bytes | bytearray | memoryview, /) -> None: ...

    async def wait_send_all_might_not_block(self) -> None: ...

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


def broken_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of a stream whose connection broke, as trio's streams have their own, and more errors."""
    if "trio" not in sys.modules:
        return BrokenResourceError, *more
    return BrokenResourceError, trio.BrokenResourceError, *more


_asyncio: "AsyncioLoop | None" = None


class CancelScope(Protocol):
    """A block that can be cancelled."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool: ...

    @property
    def cancelled_caught(self) -> bool: ...

    def cancel(self) -> None: ...


class Nursery(Protocol):
    """Runs tasks; its block ends when all have ended."""

    @property
    def cancel_scope(self) -> CancelScope: ...

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, object]], /, *args: Any) -> object: ...


def require_task(name: str, instead: str = "") -> None:
    """Check that the caller runs in a task of trio or asyncio. Entering a client calls it, before all else here.

    Args:
        name: The called class or function, for the error.
        instead: The blocking alternative that works without an event loop, for the error; empty: none.

    Raises:
        RuntimeError: The caller does not run in a task.
    """
    global _asyncio
    if in_trio_task():
        return
    if "asyncio" in sys.modules:
        from .asyncio_loop import AsyncioLoop

        if AsyncioLoop.current() is not None and AsyncioLoop.in_task():
            _asyncio = _asyncio or AsyncioLoop()
            return
    or_else = f", or use {instead}" if instead else ""
    raise RuntimeError(
        f"{name} must run in a task of trio or asyncio: start the program with trio.run or asyncio.run{or_else}"
    )


class OwnLoop:
    """The event loop of an object, which is the one that enters it. In another loop, its waits would never end.

    Callers that check per message may compare `running()` with `own` first, and call `check` if they differ.

    Args:
        name: The class of the object, for errors.
        instead: The blocking class, which any thread may use, for errors.

    Attributes:
        running: Returns what identifies the loop that runs.
        own: The same of the object's loop; None: the object was not entered.
    """

    __slots__ = ("_instead", "_name", "_thread", "own", "running")

    def __init__(self, name: str, instead: str) -> None:
        self.own: object = None
        self.running: Callable[[], object] = _no_loop
        self._name = name
        self._instead = instead
        self._thread = 0

    def enter(self) -> None:
        """Make the calling task's loop the one of the object. Raises RuntimeError if the caller is not a task."""
        require_task(self._name, self._instead)
        # One run of trio after the other has a thread, and objects of an earlier one are closed.
        self.running = get_ident if (other := _other()) is None else other.running
        self.own = self.running()
        self._thread = get_ident()

    def check_task(self) -> None:
        """Check that a task of this loop calls; of any loop, if the object was not entered. Raises RuntimeError."""
        require_task(self._name, self._instead)
        self.check()

    def check(self) -> None:
        """Check that the loop calls, or its thread while no loop runs, unless the object was not entered.

        Raises RuntimeError.
        """
        running = self.running()
        if running != self.own and (running is not None or get_ident() != self._thread):
            raise RuntimeError(
                f"this {self._name} belongs to another event loop, in which it was entered: enter one in each loop, or "
                f"use {self._instead}, which any thread may use"
            )


def _no_loop() -> None:
    return None


def _other() -> "AsyncioLoop | None":
    """Return the side of asyncio if a task or callback of asyncio calls; None: a task of trio."""
    return _asyncio if _asyncio is not None and _asyncio.current() is not None else None


class Event:
    """An event that tasks wait for. It belongs to no loop until the first task waits."""

    __slots__ = ("_futures", "_is_set", "_tasks")

    def __init__(self) -> None:
        self._is_set = False
        self._tasks: set[trio.lowlevel.Task] = set()  # that wait, under trio
        self._futures: list[Future[None]] | None = None  # that tasks await, under asyncio

    def is_set(self) -> bool:
        return self._is_set

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits."""
        return bool(self._tasks or self._futures)

    def set(self) -> None:  # under trio, protected from KeyboardInterrupt
        """Wake the tasks that wait, and let later ones pass."""
        if self._is_set:
            return
        self._is_set = True
        for task in self._tasks:
            trio.lowlevel.reschedule(task)
        self._tasks.clear()
        for future in self._futures or ():
            if not future.done():  # otherwise its task was cancelled and has not run since
                future.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set. Always lets other tasks run."""
        if self._is_set:
            await checkpoint()
        elif _asyncio is None or (loop := _asyncio.current()) is None:
            task = trio.lowlevel.current_task()
            self._tasks.add(task)

            def abort(_: object) -> trio.lowlevel.Abort:
                self._tasks.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        else:
            future = loop.create_future()
            if self._futures is None:
                self._futures = []
            self._futures.append(future)
            try:
                await future
            except BaseException:
                self._futures.remove(future)
                raise


# ------------------------------------------------------------------ time


def current_time() -> float:
    """Return the time of the loop's clock, in seconds."""
    return trio.current_time() if (other := _other()) is None else other.current_time()


def clock() -> Callable[[], float]:
    """Return the loop's clock, for callers that need the time per message: twice as fast as `current_time`."""
    return trio.lowlevel.current_clock().current_time if (other := _other()) is None else other.clock()


def scheduler() -> Callable[[Callable[[], object]], object]:
    """Return a function that has the loop call another one soon; threads and signal handlers may call it, too.

    It raises RuntimeError when the loop has ended.
    """
    if (other := _other()) is not None:
        return other.scheduler()
    return trio.lowlevel.current_trio_token().run_sync_soon


def sleep(seconds: float) -> Awaitable[None]:
    return trio.sleep(seconds) if (other := _other()) is None else other.sleep(seconds)


def sleep_until(deadline: float) -> Awaitable[None]:
    return trio.sleep_until(deadline) if (other := _other()) is None else other.sleep_until(deadline)


def checkpoint() -> Awaitable[None]:
    """Let other tasks run."""
    return trio.lowlevel.checkpoint() if (other := _other()) is None else other.checkpoint()


def checkpoint_if_cancelled() -> Awaitable[None]:
    """Raise the cancellation of this task, if it is cancelled; otherwise, let no other task run."""
    if (other := _other()) is None:
        return trio.lowlevel.checkpoint_if_cancelled()
    return other.checkpoint_if_cancelled()


# ------------------------------------------------------------------ cancellation


def cancel_scope(*, shield: bool = False) -> CancelScope:
    """Return a scope; with `shield`, cancellations from outside do not pass it."""
    if (other := _other()) is None:
        return trio.CancelScope(shield=shield)
    return other.cancel_scope(shield=shield)


def move_on_after(seconds: float) -> CancelScope:
    return trio.move_on_after(seconds) if (other := _other()) is None else other.move_on_after(seconds)


def move_on_at(deadline: float) -> CancelScope:
    return trio.move_on_at(deadline) if (other := _other()) is None else other.move_on_at(deadline)


@contextmanager
def fail_after(seconds: float) -> Iterator[None]:
    """Limit the time of a block. Raises TooSlowError."""
    with move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise TooSlowError


async def shielded(work: Callable[[], Awaitable[None]]) -> None:
    """Run a function to its end, also if the calling task is cancelled."""
    if (other := _other()) is not None:
        await other.shielded(work)
        return
    with trio.CancelScope(shield=True):
        await work()


def is_cancellation(error: BaseException) -> bool:
    """Whether an error is the loop's for a cancellation."""
    return isinstance(error, trio.Cancelled) if (other := _other()) is None else other.is_cancellation(error)


def is_stray_cancellation(error: BaseException) -> bool:
    """Whether a cancellation is not one of the calling task: asyncio raises it, too, for awaiting a cancelled task."""
    return (other := _other()) is not None and other.is_stray_cancellation(error)


# ------------------------------------------------------------------ tasks and connections


def open_nursery() -> AbstractAsyncContextManager[Nursery]:
    return trio.open_nursery() if (other := _other()) is None else other.open_nursery()


def detached_tasks() -> "DetachedTasks | None":
    """Return tasks that belong to no other task; None under trio, which has none."""
    return None if (other := _other()) is None else other.detached_tasks()


async def open_tcp_stream(host: str, port: int) -> Stream:
    """Connect to a host, to whichever of its addresses answers first. Raises OSError, UnicodeError."""
    if (other := _other()) is not None:
        return await other.open_tcp_stream(host, port)
    return await trio.open_tcp_stream(host, port)


async def aclose_forcefully(stream: Stream) -> None:
    """Close a stream at once."""
    if _other() is None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.aclose()
    else:
        await stream.aclose()  # a stream of asyncio does not wait
