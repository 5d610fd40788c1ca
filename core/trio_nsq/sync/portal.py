"""A thread that runs trio, for callers that do not."""

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
    """What can be run in a portal."""

    async def aclose(self) -> None:
        """End all work and release everything."""


class PortalClosed(Exception):
    """The thread is not there any more, or is about to end."""


class Portal:
    """Runs an async context manager in a thread of its own, and calls into it from any other thread.

    Calls from several threads run concurrently. A KeyboardInterrupt of a thread that waits for a call cancels the call
    and waits for its end. The thread ends with `close`, or with the program. It does not survive a fork.

    Args:
        manager: Entered in the thread; left there, too, after `aclose` of what it returned.
        name: Of the thread.
    """

    def __init__(self, manager: AbstractAsyncContextManager[Closable], name: str) -> None:
        self._manager = manager
        self._name = name
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None  # of the calls; None: no more are accepted
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
        """Start the thread; returns when the manager is entered. Raises what that raises."""
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
        """Leave the manager and end the thread; raises what that raises. Does nothing if called again, or after a fork.

        A KeyboardInterrupt cancels leaving the manager.
        """
        if self._thread is None or self._pid != os.getpid():
            return
        if self._thread.ident is None:
            return  # `open` was interrupted before it could start
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
        """Begin to close, and do not wait for it: for a thread that the portal itself waits for."""
        self._soon(self._stop.set)

    def call(self, function: Callable[..., Awaitable[_Result]], *args: object) -> _Result:
        """Run an async function in the thread and wait for its result.

        Raises:
            PortalClosed: The portal is not open, or not any more.
            RuntimeError: The process has forked since the portal was opened.
        """
        future: Future[_Result] = Future()
        started = False
        # What ends it otherwise is `aclose`, which knows what to tell those that wait.
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
            if not started:  # the interrupt came even before that
                future.set_exception(PortalClosed())

        try:
            if not self._soon(start):
                future.set_exception(PortalClosed())
            return future.result()
        except BaseException:
            if not future.done() and self._soon(cancel):  # so it is this thread that was interrupted
                wait_for([future])
            raise

    def run_sync(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Run a function in the thread, or here if there is no thread, and wait for its result. Raises as `call`."""
        future: Future[_Result] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        return future.result() if self._soon(work) else function(*args)

    def _soon(self, function: Callable[[], object]) -> bool:
        """Run a function in the thread, soon; false if there is no thread."""
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
                finally:  # if that was cancelled, this does not take long
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
        future.set_exception(PortalClosed())  # cancelled by the one who waits


def mirrors(original: object) -> Callable[[_Method], _Method]:
    """Give a method the docstring of the one that it stands for."""

    def decorate(method: _Method) -> _Method:
        method.__doc__ = original.__doc__
        return method

    return decorate
