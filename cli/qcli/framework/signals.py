"""Signals in the commands that run on trio."""

import os
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from .errors import ExitCode, Terminated
from .output import print_diagnostic

_T = TypeVar("_T")

PATIENCE_S = 1.0
"""After this time, a note says that the command is ending."""

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


async def watch_signals(
    stop: Callable[[ExitCode], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` with the exit code of the first signal, for an orderly end; end the process at the second signal."""
    with trio.open_signal_receiver(*_CODES) as signals:
        task_status.started()
        stop(_CODES[signal.Signals(await anext(signals))])
        again = None
        with trio.move_on_after(PATIENCE_S):
            again = await anext(signals)
        if again is None:
            print_diagnostic("Stopping; interrupt again to stop at once.")
            again = await anext(signals)
        # The user does not want to wait for the orderly end.
        os._exit(_CODES[signal.Signals(again)])


async def watch_signal(
    which: signal.Signals,
    act: Callable[[], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `act` at each of these signals, never concurrently."""
    with trio.open_signal_receiver(which) as signals:
        task_status.started()
        async for _ in signals:
            await act()


def run_until_signal(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run work that may be cancelled at any time, as `trio.run`; the first signal cancels it.

    Raises KeyboardInterrupt or Terminated if it was cancelled.
    """
    code: ExitCode | None = None
    outcome: _T | Exception

    async def watched() -> None:
        nonlocal outcome
        # Of its own: the watcher must see the second signal while the work ends.
        working = trio.CancelScope()

        def stop(which: ExitCode) -> None:
            nonlocal code
            code = which
            working.cancel()

        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, stop)
            with working:
                try:
                    outcome = await work()
                except Exception as error:  # raised below: the nursery would wrap it
                    outcome = error
            nursery.cancel_scope.cancel()

    trio.run(watched)
    if code is not None:
        raise KeyboardInterrupt if code is ExitCode.INTERRUPTED else Terminated
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
