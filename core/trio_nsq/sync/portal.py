"""Run an async object in a thread with an event loop, for callers without one: trio, or asyncio under gevent."""

import os
import re
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import trio

from ..event_loop import runtime
from .waiting import Lock, is_gevent, new_lock

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
        self.is_set: bool = False
        self._value: _Result | None = None
        self._error: BaseException | None = None
        self._waits: list[Lock] = []

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
        if self.is_set:
            return
        lock = new_lock()
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

    All that other threads want goes through one queue, in order. Posting wakes the thread only if it has not been woken
    since it last emptied the queue: a thread that waits for nothing pays for an append.

    Calls from several threads run concurrently. A KeyboardInterrupt in a thread that waits for a call cancels the call
    and waits until it ends. The thread ends with `close`, or with the program. It does not survive a fork.

    Args:
        manager: Entered and left in the thread; before leaving, `aclose` of its result is called.
        name: The name of the thread.
        ended: Called once the thread runs nothing any more, also if it crashed: wakes the threads that wait for it.
    """

    def __init__(
        self, manager: AbstractAsyncContextManager[Closable], name: str, ended: Callable[[], object]
    ) -> None:
        self._manager = manager
        self._name = name
        self._notify_ended = ended
        self._is_gevent = False  # when the thread was started
        self._thread: threading.Thread | None = None  # None: not started, or under gevent
        self.was_opened: bool = False
        self._forks = 0  # of this process, when the thread was started
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False  # the thread will look at `_posted`
        self._is_over = False  # the thread will not look at `_posted` any more
        self._schedule: Callable[[Callable[[], object]], object] | None = None  # not before the loop starts
        self._nursery: runtime.Nursery | None = None  # runs the calls; None: no calls are accepted
        self._stop = runtime.Event()
        self._scope: runtime.CancelScope | None = None
        self._cancelled = False
        self._opened: Result[None] = Result()
        self._ended: Result[None] = Result()
        self._begin = threading.Lock()  # acquired once: by the thread, or by what keeps it from running
        self._began = False
        self._error: BaseException | None = None

    @property
    def is_forked(self) -> bool:
        """Whether the process has forked since `open`, and has no thread of it."""
        return self.was_opened and self._forks != _forks

    def open(self) -> None:
        """Start the thread; returns when the manager is entered. Raises the errors of entering it."""
        if self.was_opened:
            raise RuntimeError("it can be entered only once; create another one")
        self._is_gevent = is_gevent()
        self._forks = _forks
        if self._is_gevent:
            from .gevent_thread import start_thread

            start = partial(start_thread, self._run, ())
        else:
            self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            # `Thread.start` waits for the thread with an Event; see `Result`.
            start = partial(start_new_thread, self._start, (thread,))
        self.was_opened = True
        try:
            start()
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
        if not self.was_opened or self.is_forked:
            return
        try:
            self.post(self._request_stop)
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
        if not self.is_forked:
            self.post(self._request_stop)

    def call(self, function: Callable[..., Awaitable[_Result]], *args: object) -> _Result:
        """Run an async function in the thread and wait for its result.

        Raises:
            PortalClosed: The portal is not open.
            RuntimeError: The process has forked since the portal was opened.
        """
        result: Result[_Result] = Result()
        context = copy_context()  # hooks see the variables of the caller
        scopes: list[runtime.CancelScope] = []  # one, once the call has begun

        def start() -> None:
            if self._nursery is None:
                result.fail(PortalClosed())
            else:
                if self._is_gevent:
                    from .gevent_thread import tell_loop

                    context.run(tell_loop)
                context.run(self._nursery.start_soon, _fulfil, result, scopes, function, args)

        def cancel() -> None:
            if scopes:
                scopes[0].cancel()
            elif not result.is_set:  # the interrupt came before the call began: it does not begin
                result.fail(PortalClosed())

        try:
            if not self.post(start):
                raise PortalClosed
            return result.get()
        except BaseException:
            if not result.is_set and self.post(cancel):  # this thread was interrupted
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

        return result.get() if self.post(work) else function(*args)

    def post(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the thread call a function that raises nothing; return False if the thread has not started.

        Functions are called in the order of the posts. After the thread has ended, they are called here.

        Raises:
            RuntimeError: The process has forked since the portal was opened.
        """
        if (schedule := self._schedule) is None:
            return False
        self.check_process()
        self._posted.append((function, args))
        if self._is_over:
            self.call_posted()
        elif not self._is_woken:
            try:
                self._is_woken = True
                schedule(self.call_posted)
            except RuntimeError:
                pass  # the loop has ended: the thread is about to look for the last time
            except BaseException:
                self._is_woken = False  # interrupted, perhaps before the call: the next post wakes the thread
                raise
        return True

    def check_process(self) -> None:
        """Raise RuntimeError if the process has forked since the portal was opened."""
        if self.is_forked:
            raise RuntimeError("it was opened before the process forked: open another one in each process")

    def call_posted(self) -> None:
        """Call what has been posted, in the thread: for a task that must see what another thread has posted."""
        self._is_woken = False  # before looking, so that a later post wakes the thread again
        posted = self._posted
        for _ in range(len(posted)):
            try:
                function, args = posted.popleft()
            except IndexError:  # another thread takes them, too, once this one is over
                return
            function(*args)

    def _wait_ended(self, timeout_s: float | None = None) -> None:
        self._ended.wait(timeout_s)
        if self._ended.is_set and self._began and self._thread is not None:
            self._thread.join()

    def _cancel(self) -> None:
        self._cancelled = True
        self.post(self._request_cancel)

    # ------------------------------------------------------------------ in the thread

    def _request_stop(self) -> None:
        if not self._is_over:
            self._stop.set()

    def _request_cancel(self) -> None:
        if not self._is_over and self._scope is not None:
            self._scope.cancel()

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
            if self._is_gevent:
                from .gevent_thread import run

                run(self._main)
            else:
                trio.run(self._main)
        except BaseException as caught:
            error = caught
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._nursery = None
        self._is_over = True
        self.call_posted()
        self._notify_ended()
        if error is not None and not self._opened.is_set:
            self._opened.fail(error)
        else:
            self._error = error
        self._ended.set(None)

    async def _main(self) -> None:
        runtime.require_task("a portal")
        self._scope = runtime.cancel_scope()
        self._schedule = runtime.scheduler()
        with self._scope:
            if self._cancelled:
                self._scope.cancel()
            async with self._manager as opened, runtime.open_nursery() as nursery:
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
    scopes: list[runtime.CancelScope],
    function: Callable[..., Awaitable[_Result]],
    args: tuple[object, ...],
) -> None:
    if result.is_set:
        return
    try:
        # Shielded: on closing, `aclose` ends the call with the right result, not a cancellation.
        with runtime.cancel_scope(shield=True) as scope:
            scopes.append(scope)
            result.set(await function(*args))
    except BaseException as error:
        result.fail(error)
    if not result.is_set:
        result.fail(PortalClosed())  # cancelled by the waiting thread


_forks = 0  # how often this process is the child of a fork


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

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
