"""The line on a terminal that shows how far `pub` has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from .output import plain_terminal, rate, size

if TYPE_CHECKING:
    from .publishing import Outcome

REFRESH_S = 0.2


async def show_progress(outcome: Outcome) -> None:
    """Keep a line on standard error up to date until cancelled; then remove it."""
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
                    (f"{outcome.acknowledged:,}", bold),
                    f" messages, {size(outcome.acknowledged_bytes)}, ",
                    (rate(per_second), bold),
                    f" messages/s, {now_s - begun_s:.0f} s",
                ),
                refresh=True,
            )
