"""The line on a terminal that shows how far `pub` or `replay` has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..framework.output import no_color, rate, size

REFRESH_S = 0.2
WINDOW_S = 5.0
SHORTEST_S = 1.0
"""Messages come in batches: over less than this, one more or less makes the rate a wrong one."""


class RecentRate:
    """How fast a count has been growing lately, from when it first was more than 0. It is pure."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def after(self, now_s: float, count: int) -> float | None:
        """Note the count of this moment; the rate per second, or None if it is too early to say."""
        if not count:
            return None
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        since_s, before = self._seen[0]
        return (count - before) / (now_s - since_s) if now_s - since_s >= SHORTEST_S else None


class Published(Protocol):
    """What was published so far."""

    @property
    def acknowledged(self) -> int:
        """Messages that the broker has acknowledged."""
        ...

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes of their bodies."""
        ...


async def show_progress(outcome: Published, share: Callable[[], float] | None = None) -> None:
    """Keep a line on standard error up to date until cancelled; then remove it.

    Args:
        outcome: Changes meanwhile.
        share: Returns how much of all is done, 0 to 1; None: that is not known.
    """
    console = Console(stderr=True, highlight=False)
    begun_s = trio.current_time()
    bold = "" if no_color() else "bold"
    recent = RecentRate()
    # rich's own refreshing would be a thread beside the event loop.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await trio.sleep(REFRESH_S)
            now_s = trio.current_time()
            per_second = recent.after(now_s, outcome.acknowledged)
            live.update(
                Text.assemble(
                    "" if share is None else f"{share():.0%}, ",
                    (f"{outcome.acknowledged:,}", bold),
                    f" messages, {size(outcome.acknowledged_bytes)}, ",
                    ("" if per_second is None else rate(per_second), bold),
                    "" if per_second is None else " messages/s, ",
                    f"{now_s - begun_s:.0f} s",
                ),
                refresh=True,
            )
