"""Progress bars on standard error, for commands that know how much there is to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..framework.output import no_color, rate, size, stderr_is_live_terminal

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from trio_nsq.spark.runtime.engine import Advance

REFRESH_S = 0.2
WORTH_SHOWING_BYTES = 64 * 1024 * 1024
"""Less than this is read before anybody wonders."""


@contextmanager
def byte_progress(total_bytes: int, what: str) -> Iterator[Callable[[int], None] | None]:
    """Show a bar while the block runs, if standard error is a terminal and there is much to do.

    Args:
        total_bytes: How much there is to do.
        what: What is being done, in a word.

    Yields:
        A function that adds bytes to those that are done; None if no bar is shown.
    """
    if total_bytes < WORTH_SHOWING_BYTES or not stderr_is_live_terminal():
        yield None
        return
    # Imported here because most runs show none.
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with _bar(*columns) as progress:
        task = progress.add_task(what, total=total_bytes)
        shown_s = 0.0

        def advance(more_bytes: int) -> None:
            nonlocal shown_s
            progress.advance(task, more_bytes)
            if time.monotonic() - shown_s >= REFRESH_S:
                progress.refresh()
                shown_s = time.monotonic()

        yield advance


@contextmanager
def message_progress(total: int | None, quiet: bool) -> Iterator[Advance]:
    """Show a bar while the block runs, if standard error is a terminal.

    Args:
        total: How many messages there are; None: that is not known.
        quiet: Show none.

    Yields:
        A function that adds messages and bytes to those that are done.
    """
    if quiet or not stderr_is_live_terminal():
        yield lambda _messages, _size: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("messages, {task.fields[read]}, {task.fields[speed]} messages/s"),
        TimeRemainingColumn(),
    )
    with _bar(*columns) as progress:
        task = progress.add_task("", total=total, read="0 B", speed="0")
        begun_s = shown_s = time.monotonic()
        messages = read = 0

        def advance(more: int, more_bytes: int) -> None:
            nonlocal messages, read, shown_s
            messages += more
            read += more_bytes
            now_s = time.monotonic()
            if now_s - shown_s >= REFRESH_S:
                shown_s = now_s
                speed = rate(messages / (now_s - begun_s))
                progress.update(task, completed=messages, read=size(read), speed=speed, refresh=True)

        yield advance


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    # Refreshed by its user only: rich would do it in a thread that competes with the work.
    console = Console(stderr=True, no_color=no_color())
    return Progress(*columns, console=console, transient=True, auto_refresh=False)
