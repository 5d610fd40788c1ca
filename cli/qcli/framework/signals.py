"""Signals in the commands that run on trio.

The handlers only wake a task. An exception of a handler would be raised in the middle of any code: in trio's own it is
an internal error, and in a `finally` block it leaves half of the work undone.
"""

import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import TypeVar

import trio

from .errors import ExitCode, Terminated
from .output import print_diagnostic
from .raised_signals import raise_dropped

_T = TypeVar("_T")

PATIENCE_S = 1.0
"""After this time, a note says that the command is ending."""

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


def run_trio(work: Callable[..., Awaitable[_T]], *args: object, clock: trio.abc.Clock | None = None) -> _T:
    """Run work as `trio.run` does, in the main thread, with an orderly end at SIGINT and SIGTERM.

    The first signal calls the function that the work gave to `at_first_signal`. If it gave none yet, the work is
    cancelled. A second signal ends the process at once.

    Raises KeyboardInterrupt or Terminated: a signal cancelled the work, or arrived before its begin or after its end.
    """
    run = _Run()
    outcome: _T | Exception

    async def main() -> None:
        nonlocal outcome
        _current.set(run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.watch)
            try:
                with run.working:
                    outcome = await work(*args)
            except Exception as error:  # raised below: the nursery would wrap it
                outcome = error
            nursery.cancel_scope.cancel()
        # trio closes this descriptor a moment before it stops using it, and Python would report a failed write.
        signal.set_wakeup_fd(-1)

    with run.handlers:
        raise_dropped()
        trio.run(main, clock=clock)
    if run.cancelled_by is not None:
        raise _error_of(run.cancelled_by)
    if isinstance(outcome, Exception):
        raise outcome
    if not run.is_stopped and run.arrivals:
        raise _error_of(_CODES[run.arrivals.popleft()])
    return outcome


def at_first_signal(stop: Callable[[ExitCode], None]) -> None:
    """Let the first SIGINT or SIGTERM of this `run_trio` call `stop` with its exit code, and cancel nothing.

    It may be called until the end of the run, also if there is nothing left to stop.
    """
    _current.get().stop = stop


async def watch_signal(
    which: signal.Signals,
    act: Callable[[], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `act` at each of these signals, never concurrently. After a cancellation, `run_trio` ignores them."""
    arrivals = _current.get().receive(which)
    task_status.started()
    while True:
        await arrivals.receive()
        await act()


def _error_of(code: ExitCode) -> KeyboardInterrupt | Terminated:
    return KeyboardInterrupt() if code is ExitCode.INTERRUPTED else Terminated()


class _Arrivals(deque[signal.Signals]):
    """The signals that have arrived, and no task has received."""

    def __init__(self) -> None:
        super().__init__()
        self._token: trio.lowlevel.TrioToken | None = None
        self._more = trio.Event()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.append(signal.Signals(number))
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        self._more.set()

    async def receive(self) -> signal.Signals:
        self._token = trio.lowlevel.current_trio_token()
        while not self:
            self._more = trio.Event()
            await self._more.wait()
        return self.popleft()


class _Run:
    """A run of trio, and what its signals do.

    Attributes:
        stop: Called with the exit code of the first signal.
        is_stopped: It was called.
        cancelled_by: The exit code of the signal that cancelled the work; None: none did.
        working: Cancels the work, and not what watches for a second signal.
        handlers: Has the handlers as long as it is open.
        arrivals: The signals that end the process.
    """

    def __init__(self) -> None:
        self.stop: Callable[[ExitCode], None] = self._cancel
        self.is_stopped = False
        self.cancelled_by: ExitCode | None = None
        self.working = trio.CancelScope()
        self.handlers = ExitStack()
        self.arrivals = self.receive(*_CODES)

    def receive(self, *numbers: signal.Signals) -> _Arrivals:
        """Receive these signals until the run ends."""
        arrivals = _Arrivals()
        for number in numbers:
            before = signal.signal(number, arrivals.handle)
            self.handlers.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        return arrivals

    async def watch(self) -> None:
        """Stop the work at the first signal, and end the process at the second."""
        code = _CODES[await self.arrivals.receive()]
        self.is_stopped = True
        self.stop(code)
        with trio.move_on_after(PATIENCE_S):
            os._exit(_CODES[await self.arrivals.receive()])
        print_diagnostic("Stopping; interrupt again to stop at once.")
        os._exit(_CODES[await self.arrivals.receive()])

    def _cancel(self, code: ExitCode) -> None:
        self.cancelled_by = code
        self.working.cancel()


_current: trio.lowlevel.RunVar[_Run] = trio.lowlevel.RunVar("qcli_run")
