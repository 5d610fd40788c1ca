"""SIGINT and SIGTERM in the commands that run on trio."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import trio

from .exit_codes import ExitCode

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


async def watch_signals(
    stop: Callable[[ExitCode], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` at the first signal, so that the command can end in good order; end the process at the second.

    Args:
        stop: Gets the exit code that goes with the signal.
        task_status: Reports that signals are watched for from now on.
    """
    with trio.open_signal_receiver(*_CODES) as signals:
        task_status.started()
        stopped = False
        async for number in signals:
            code = _CODES[signal.Signals(number)]
            if stopped:
                # Whoever asks twice has seen the orderly way take too long; nothing may hold this one up.
                os._exit(code)
            stopped = True
            stop(code)
