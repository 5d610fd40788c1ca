"""A clear error for callers that are not run by trio, such as those under asyncio."""

import trio


def require_trio(name: str, instead: str = "") -> None:
    """Make sure that the caller runs in a trio task.

    Args:
        name: What was called, for the error.
        instead: What works without trio, for the error; empty: nothing does.

    Raises:
        RuntimeError: The caller does not run in a trio task.
    """
    if trio.lowlevel.in_trio_task():
        return
    otherwise = f", or use {instead}, which needs no trio" if instead else ""
    raise RuntimeError(
        f"{name} runs under trio only, and this is no trio task (asyncio cannot run it): start the program with "
        f"trio.run{otherwise}; docs/how-to/python-client.md, 'asyncio', shows how it works there"
    )
