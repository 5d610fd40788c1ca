"""Signals in commands that do not run on trio, and before trio runs: they raise an exception in the main thread.

Python drops an exception that is raised in a finalizer, in a callback of a weak reference or in some functions in C.
These run anywhere, mostly while modules are imported. So a dropped one is raised again.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import NoReturn

from .errors import Terminated

_SEND_AGAIN_S = 0.005

_raised: list[KeyboardInterrupt | Terminated] = []
"""What the signals of this command line have raised."""


def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handle SIGINT."""
    _raised.append(KeyboardInterrupt())
    raise _raised[-1]


def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM."""
    _raised.append(Terminated())
    raise _raised[-1]


def raise_dropped() -> None:
    """Raise what a signal has raised before: as work begins only now, it was dropped."""
    if _raised:
        raise _raised[-1]


def _send_after(function: FunctionType, number: int) -> None:
    """Send a signal once the main thread does not run a function, in which its handler could not raise."""
    main = threading.main_thread().ident
    while True:
        time.sleep(_SEND_AGAIN_S)
        frame = sys._current_frames().get(main or 0)
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        if frame is None:
            os.kill(os.getpid(), number)
            return


@contextmanager
def sending_dropped_again() -> Iterator[None]:
    """Send a signal again if Python reports that it dropped its exception; at the end, forget what was raised."""
    before = sys.unraisablehook

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            number = signal.SIGINT
        elif isinstance(dropped.exc_value, Terminated):
            number = signal.SIGTERM
        else:
            before(dropped)
            return
        threading.Thread(target=_send_after, args=(hook, number), daemon=True).start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        _raised.clear()
