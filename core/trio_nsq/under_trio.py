"""A clear error for callers that do not run under trio, such as asyncio programs."""

import trio


def require_trio(name: str, instead: str = "") -> None:
    """Check that the caller runs in a trio task.

    Args:
        name: The called class or function, for the error.
        instead: The alternative that works without trio, for the error; empty: none.

    Raises:
        RuntimeError: The caller does not run in a trio task.
    """
    if trio.lowlevel.in_trio_task():
        return
    otherwise = f", or use {instead}, which works without trio" if instead else ""
    raise RuntimeError(
        f"{name} must run in a trio task (asyncio cannot run it): start the program with "
        f"trio.run{otherwise}; for asyncio programs see 'asyncio' in docs/how-to/python-client.md"
    )
