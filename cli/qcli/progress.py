"""The line on a terminal that shows how far `pub` or `replay` has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from .output import plain_terminal, rate, size

REFRESH_S = 0.2


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
        share: Tells how much of all is done, 0 to 1; None: nobody knows.
    """
    console = Console(stderr=True, highlight=False)
    begun_s = trio.current_time()
    bold = "" if plain_terminal() else "bold"
    shown = 0
    shown_s = begun_s
    # rich's own refreshing would be a thread beside the event loop.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await trio.sleep(REFRESH_S)
            now_s = trio.current_time()
            per_second = (outcome.acknowledged - shown) / (now_s - shown_s)
            shown, shown_s = outcome.acknowledged, now_s
            live.update(
                Text.assemble(
                    "" if share is None else f"{share():.0%}, ",
                    (f"{outcome.acknowledged:,}", bold),
                    f" messages, {size(outcome.acknowledged_bytes)}, ",
                    (rate(per_second), bold),
                    f" messages/s, {now_s - begun_s:.0f} s",
                ),
                refresh=True,
            )
