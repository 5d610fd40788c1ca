"""What `runtime` and its side for asyncio share."""

import sys
from collections.abc import Callable


class BrokenResourceError(Exception):
    """The connection of a stream broke; see `runtime.broken_errors`."""


class ClosedResourceError(Exception):
    """The stream was closed before, or meanwhile."""


def in_trio_task() -> bool:
    """Whether a task of trio calls."""
    check: Callable[[], bool] | None = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)
    return check is not None and check()
