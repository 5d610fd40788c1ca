"""The line on a terminal that shows how far a command that reads files has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..framework.output import plain_terminal, talks_to_live_terminal

REFRESH_S = 0.2
WORTH_SHOWING_BYTES = 64 * 1024 * 1024
"""Less than this is read before anybody wonders."""


@contextmanager
def progress_bar(total_bytes: int, what: str) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on standard error while the block runs, if that is a terminal and there is much to do.

    Args:
        total_bytes: How much there is to do.
        what: What is being done, in a word.

    Yields:
        What is to be told that so many more bytes are done; None if nobody looks.
    """
    if total_bytes < WORTH_SHOWING_BYTES or not talks_to_live_terminal():
        yield None
        return
    # Imported here because most runs show none.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, no_color=plain_terminal())
    # rich's own refreshing would be a thread that competes with the work.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(what, total=total_bytes)
        shown_s = 0.0

        def advance(more_bytes: int) -> None:
            nonlocal shown_s
            progress.advance(task, more_bytes)
            if time.monotonic() - shown_s >= REFRESH_S:
                progress.refresh()
                shown_s = time.monotonic()

        yield advance
