"""Progress on standard error: bars, and the status line of `pub` and `replay`.

Functions import rich when they need it, because most runs show no progress.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..framework.output import is_live_terminal, no_color, rate, size

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.text import Text

    from trio_nsq.spark.runtime.engine import Advance

REFRESH_S = 0.2
WORTH_SHOWING_BYTES = 64 * 1024 * 1024
"""Below this size, reading is fast enough without a bar."""


@contextmanager
def byte_progress(total_bytes: int, what: str) -> Iterator[Callable[[int], None] | None]:
    """Show a bar while the block runs, if standard error is a terminal and the total is large.

    Yields:
        A function that advances the bar; None if there is no bar.
    """
    if total_bytes < WORTH_SHOWING_BYTES or not is_live_terminal(sys.stderr):
        yield None
        return
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
    """Show a bar while the block runs, if standard error is a terminal and not `quiet`. `total` None: unknown.

    Yields:
        A function that advances the bar by messages and bytes.
    """
    if quiet or not is_live_terminal(sys.stderr):
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

    # Without auto_refresh: its thread would compete with the work.
    console = Console(stderr=True, no_color=no_color())
    return Progress(*columns, console=console, transient=True, auto_refresh=False)


WINDOW_S = 5.0
SHORTEST_S = 1.0
"""Messages arrive in batches: over a shorter time, one batch would distort the rate."""


class RecentRate:
    """The recent growth rate of a count, from its first value above 0. Does no IO; time is a parameter."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def after(self, now_s: float, count: float) -> float | None:
        """Record the current count and return the rate per second; None: too early."""
        if not count:
            return None
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (count - before) / (now_s - since_s) if now_s - since_s >= SHORTEST_S else None


class TimeLeft:
    """Estimates the time left from the recent growth of the completed share. Does no IO; time is a parameter."""

    def __init__(self) -> None:
        self._recent = RecentRate()

    def after(self, now_s: float, share: float | None) -> str:
        """Record the share, 0 to 1, and return text such as `12 s left`; empty: unknown, or nothing is left."""
        if share is None:
            return ""
        per_second = self._recent.after(now_s, share)
        if not per_second or share >= 1:
            return ""
        left_s = (1 - share) / per_second
        for unit, unit_s in (("s", 1), ("min", 60), ("h", 3600)):
            if left_s < 100 * unit_s:
                return f"{math.ceil(left_s / unit_s)} {unit} left"
        return "days left"


async def show_live_text(text_at: Callable[[float], Text]) -> None:
    """Show text on standard error, which `text_at` returns for a time, until cancelled; then remove it."""
    import trio
    from rich.console import Console
    from rich.live import Live

    # Without auto_refresh: it would be a thread beside the event loop.
    console = Console(stderr=True, highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await trio.sleep(REFRESH_S)
            live.update(text_at(trio.current_time()), refresh=True)


async def show_progress(progress: Callable[[], tuple[int, int, float | None]], done: str = "") -> None:
    """Show a status line on standard error until cancelled; then remove it.

    Args:
        progress: Returns the acknowledged messages, the bytes of their bodies, and the completed share, 0 to 1; None:
            unknown.
        done: What happened to the messages that count, such as `synced`; empty: the command says it.
    """
    import trio
    from rich.text import Text

    begun_s = trio.current_time()
    bold = "" if no_color() else "bold"
    recent, left = RecentRate(), TimeLeft()

    def text_at(now_s: float) -> Text:
        messages, body_bytes, share = progress()
        per_second, rest = recent.after(now_s, messages), left.after(now_s, share)
        return Text.assemble(
            "" if share is None else f"{share:.0%}, ",
            (f"{messages:,}", bold),
            f" message{'' if messages == 1 else 's'}{done and f' {done}'}, {size(body_bytes)}, ",
            ("" if per_second is None else rate(per_second), bold),
            "" if per_second is None else " messages/s, ",
            f"{now_s - begun_s:.0f} s",
            rest and f", {rest}",
        )

    await show_live_text(text_at)
