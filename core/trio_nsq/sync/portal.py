"""Run an async object in a trio thread, for callers without trio."""

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import trio

_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., object])


class Closable(Protocol):
    """An object that a portal can run."""

    async def aclose(self) -> None:
        """End all work and release everything."""


class PortalClosed(Exception):
    """The thread has ended or is about to end."""


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
        self._opened: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._error: BaseException | None = None

    @property
    def was_opened(self) -> bool:
        """Whether `open` was called."""
        return self._thread is not None

    def open(self) -> None:
        """Start the thread; returns when the manager is entered. Raises the errors of entering it."""
        if self._thread is not None:
            raise RuntimeError("it can be entered only once")
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
            self._opened.result()
        except BaseException:
            self._cancel()
            if self._thread.ident is not None:
                self._thread.join()
            raise

    def close(self) -> None:
        """Leave the manager and end the thread. Raises the errors of leaving the manager.

        Does nothing if called again, or after a fork. A KeyboardInterrupt cancels leaving the manager.
        """
        if self._thread is None or self._pid != os.getpid():
            return
        if self._thread.ident is None:
            return  # `open` was interrupted before the thread started
        try:
            self._soon(self._stop.set)
            self._ended.result()
        except BaseException:
            self._cancel()
            raise
        finally:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Start to close without waiting, for threads that the portal itself waits for."""
        self._soon(self._stop.set)

    def call(self, function: Callable[..., Awaitable[_Result]], *args: object) -> _Result:
        """Run an async function in the thread and wait for its result.

        Raises:
            PortalClosed: The portal is not open.
            RuntimeError: The process has forked since the portal was opened.
        """
        future: Future[_Result] = Future()
        started = False
        # Shielded: on closing, `aclose` ends the call with the right result, not a cancellation.
        scope = trio.CancelScope(shield=True)

        def start() -> None:
            nonlocal started
            started = True
            if self._nursery is None:
                future.set_exception(PortalClosed())
            else:
                self._nursery.start_soon(_fulfil, future, scope, function, args)

        def cancel() -> None:
            scope.cancel()
            if not started:  # the interrupt came before `start` ran
                future.set_exception(PortalClosed())

        try:
            if not self._soon(start):
                future.set_exception(PortalClosed())
            return future.result()
        except BaseException:
            if not future.done() and self._soon(cancel):  # this thread was interrupted
                wait_for([future])
            raise

    def run_sync(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Run a function in the thread and wait for its result; without a thread, run it here.

        Raises the errors of the function, and RuntimeError after a fork.
        """
        future: Future[_Result] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        return future.result() if self._soon(work) else function(*args)

    def _soon(self, function: Callable[[], object]) -> bool:
        """Schedule a function in the thread; return False if there is no thread."""
        if self._pid not in (0, os.getpid()):
            raise RuntimeError("it was opened before the process forked: open another one in each process")
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _cancel(self) -> None:
        self._cancelled = True
        self._soon(self._scope.cancel)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            if self._opened.done():
                self._error = error
            else:
                self._opened.set_exception(error)
        self._ended.set_result(None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            if self._cancelled:
                self._scope.cancel()
            async with self._manager as opened, trio.open_nursery() as nursery:
                self._nursery = nursery
                self._opened.set_result(None)
                try:
                    await self._stop.wait()
                finally:  # after a cancellation, this does not take long
                    try:
                        await opened.aclose()
                    finally:
                        self._nursery = None


async def _fulfil(
    future: Future[_Result],
    scope: trio.CancelScope,
    function: Callable[..., Awaitable[_Result]],
    args: tuple[object, ...],
) -> None:
    try:
        with scope:
            future.set_result(await function(*args))
    except BaseException as error:
        future.set_exception(error)
    if not future.done():
        future.set_exception(PortalClosed())  # cancelled by the waiting thread


def mirrors(original: object) -> Callable[[_Method], _Method]:
    """Give a method the docstring of the original that it wraps."""

    def decorate(method: _Method) -> _Method:
        method.__doc__ = original.__doc__
        return method

    return decorate
