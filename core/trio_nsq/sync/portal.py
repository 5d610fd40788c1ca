"""Run an async object in a trio thread, for callers without trio."""

import os
import re
import threading
from _thread import start_new_thread
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, Protocol, TypeVar

import trio

from ..platform.requirements import require_epoll

_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., object])


class Closable(Protocol):
    """An object that a portal can run."""

    async def aclose(self) -> None:
        """End all work and release everything."""


class PortalClosed(Exception):
    """The thread has ended or is about to end."""


class Result(Generic[_Result]):
    """The result of a call, set once, for threads that wait for it.

    A KeyboardInterrupt may arrive between any two instructions of a thread that waits. In a `concurrent.futures.Future`
    or a `threading.Event`, it can leave a lock acquired, so that the result is never set, or raise RuntimeError in its
    place. Here, each wait has its own lock, which only the setter releases.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._value: _Result | None = None
        self._error: BaseException | None = None
        self._waits: list[threading.Lock] = []

    def set(self, value: _Result) -> None:
        """Set the value, and wake the threads that wait."""
        self._value = value
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Have `get` raise an error, and wake the threads that wait."""
        self._error = error
        self._wake()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the result is set, or until the timeout. None: without limit."""
        lock = threading.Lock()
        lock.acquire()
        self._waits.append(lock)
        if not self.is_set:  # otherwise the setter may not have seen the lock
            lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def get(self) -> _Result:
        """Wait for the value; raises the error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # it is set

    def _wake(self) -> None:
        self.is_set = True
        for lock in self._waits:
            lock.release()


class Portal:
    """Runs an async context manager in its own thread; other threads call into it.

    Calls from several threads run concurrently. A KeyboardInterrupt in a thread that waits for a call cancels the call
    and waits until it ends. The thread ends with `close`, or with the program. It does not survive a fork.

    Args:
        manager: Entered and left in the thread; before leaving, `aclose` of its result is called.
        name: The name of the thread.
    """

    def __init__(self, manager: AbstractAsyncContextManager[Closable], name: str) -> None:
        self._manager = manager
        self._name = name
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None  # runs the calls; None: no calls are accepted
        self._stop = trio.Event()
        self._scope = trio.CancelScope()
        self._cancelled = False
        self._opened: Result[None] = Result()
        self._ended: Result[None] = Result()
        self._begin = threading.Lock()  # acquired once: by the thread, or by what keeps it from running
        self._began = False
        self._error: BaseException | None = None

    @property
    def was_opened(self) -> bool:
        """Whether `open` was called."""
        return self._thread is not None

    @property
    def is_forked(self) -> bool:
        """Whether the process has forked since `open`, and has no thread of it."""
        return self._pid not in (0, os.getpid())

    def open(self) -> None:
        """Start the thread; returns when the manager is entered. Raises the errors of entering it."""
        if self._thread is not None:
            raise RuntimeError("it can be entered only once; create another one")
        require_epoll()
        self._pid = os.getpid()
        self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            # `Thread.start` waits for the thread with an Event; see `Result`.
            start_new_thread(self._start, (thread,))
            self._opened.get()
        except BaseException:
            self._cancel()
            if self._begin.acquire(blocking=False):
                self._ended.set(None)  # the thread will not run
            self._wait_ended()
            raise

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the manager and end the thread. Raises the errors of leaving the manager.

        Does nothing if called again, or after a fork. A KeyboardInterrupt cancels leaving the manager.

        Args:
            timeout_s: Return after this time although the thread has not ended; it then ends by itself. None: wait.
        """
        if self._thread is None or self._pid != os.getpid():
            return
        try:
            self._soon(self._stop.set)
            self._wait_ended(timeout_s)
        except BaseException:
            self._cancel()
            self._wait_ended()
            raise
        if not self._ended.is_set:
            return
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Start to close without waiting, for threads that the portal itself waits for. Does nothing after a fork."""
        if self._pid == os.getpid():
            self._soon(self._stop.set)

    def call(self, function: Callable[..., Awaitable[_Result]], *args: object) -> _Result:
        """Run an async function in the thread and wait for its result.

        Raises:
            PortalClosed: The portal is not open.
            RuntimeError: The process has forked since the portal was opened.
        """
        result: Result[_Result] = Result()
        started = False
        # Shielded: on closing, `aclose` ends the call with the right result, not a cancellation.
        scope = trio.CancelScope(shield=True)

        def start() -> None:
            nonlocal started
            started = True
            if self._nursery is None:
                result.fail(PortalClosed())
            else:
                self._nursery.start_soon(_fulfil, result, scope, function, args)

        def cancel() -> None:
            scope.cancel()
            if not started:  # the interrupt came before `start` ran
                result.fail(PortalClosed())

        try:
            if not self._soon(start):
                raise PortalClosed
            return result.get()
        except BaseException:
            if not result.is_set and self._soon(cancel):  # this thread was interrupted
                result.wait()
            raise

    def run_sync(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Run a function in the thread and wait for its result; without a thread, run it here.

        Raises the errors of the function, and RuntimeError after a fork.
        """
        result: Result[_Result] = Result()

        def work() -> None:
            try:
                result.set(function(*args))
            except BaseException as error:
                result.fail(error)

        return result.get() if self._soon(work) else function(*args)

    def _soon(self, function: Callable[[], object]) -> bool:
        """Schedule a function in the thread; return False if there is no thread."""
        if self.is_forked:
            raise RuntimeError("it was opened before the process forked: open another one in each process")
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _wait_ended(self, timeout_s: float | None = None) -> None:
        self._ended.wait(timeout_s)
        if self._ended.is_set and self._began:
            assert self._thread is not None
            self._thread.join()

    def _cancel(self) -> None:
        self._cancelled = True
        self._soon(self._scope.cancel)

    # ------------------------------------------------------------------ in the thread

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except BaseException as error:
            if self._begin.acquire(blocking=False):
                self._end(error)

    def _run(self) -> None:
        if not self._begin.acquire(blocking=False):
            return  # `open` was interrupted
        self._began = True
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as caught:
            error = caught
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is not None and not self._opened.is_set:
            self._opened.fail(error)
        else:
            self._error = error
        self._ended.set(None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            if self._cancelled:
                self._scope.cancel()
            async with self._manager as opened, trio.open_nursery() as nursery:
                self._nursery = nursery
                self._opened.set(None)
                try:
                    await self._stop.wait()
                finally:  # after a cancellation, this does not take long
                    try:
                        await opened.aclose()
                    finally:
                        self._nursery = None


async def _fulfil(
    result: Result[_Result],
    scope: trio.CancelScope,
    function: Callable[..., Awaitable[_Result]],
    args: tuple[object, ...],
) -> None:
    try:
        with scope:
            result.set(await function(*args))
    except BaseException as error:
        result.fail(error)
    if not result.is_set:
        result.fail(PortalClosed())  # cancelled by the waiting thread


_WORDS = (
    (r"The caller is not a\s+task of trio or asyncio, or the", "The"),
    (r"if the\s+task is cancelled", "after a KeyboardInterrupt"),
    (r"If this is\s+cancelled", "After a KeyboardInterrupt"),
    (r"If\s+cancelled", "After a KeyboardInterrupt"),
    (r"from another\s+task", "from another thread"),
    (r"a\s+task that", "a thread that"),
    (r"\baclose\b", "close"),
)
"""What docstrings of the async classes say, and what is true of the others."""


def mirrors(original: object) -> Callable[[_Method], _Method]:
    """Give a method the docstring of the original that it wraps, in the words of threads."""

    def decorate(method: _Method) -> _Method:
        text = original.__doc__ or ""
        for of_tasks, of_threads in _WORDS:
            text = re.sub(of_tasks, of_threads, text)
        method.__doc__ = text
        return method

    return decorate
