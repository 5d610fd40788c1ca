"""A clear error for callers that do not run under trio, such as asyncio programs."""

import trio


def require_trio(name: str, instead: str = "") -> None:
    """Check that the caller runs in a trio task.

    Args:
        name: The called class or function, for the error.
        instead: The blocking alternative that works without trio, for the error; empty: none.

    Raises:
        RuntimeError: The caller does not run in a trio task.
    """
    if trio.lowlevel.in_trio_task():
        return
    in_asyncio = f"use {instead}, which blocks," if instead else "call trio.run"
    raise RuntimeError(
        f"{name} must run in a trio task: start the program with trio.run. asyncio cannot run it: in an asyncio "
        f"program, {in_asyncio} in a thread (asyncio.to_thread)"
    )
