"""The live table of `qcli stat`. Apart from the command because it needs rich, and the other forms do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .errors import Failure
from .exit_codes import ExitCode
from .stats import HEADINGS, NAME_COLUMNS, NARROW_HEADINGS, Row

if TYPE_CHECKING:
    from .stat import Reports

LINES_AROUND = 4
"""Title, headings, what is left out, and the line the cursor is on."""


UNBOUNDED = 10_000
"""A width that no table needs."""


def show_live(reports: Reports, interval_ms: int) -> None:
    """Redraw the table every `interval_ms` until interrupted.

    A broker that goes away is waited for: the last numbers stay, with a line that says so.

    Raises:
        Failure: The first look fails, or what is wanted is not there.
    """
    console = Console(highlight=False)
    rows = reports.take()
    trouble = ""
    # auto_refresh would be a thread that redraws the same numbers four times a second.
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_screen(console, reports.address, rows, trouble), refresh=True)
            time.sleep(interval_ms / 1000)
            try:
                rows, trouble = reports.take(), ""
            except Failure as error:
                if error.exit_code != ExitCode.UNREACHABLE:
                    raise
                trouble = f"{reports.address} does not answer; waiting for it"


def _screen(console: Console, address: str, rows: list[Row], trouble: str) -> RenderableType:
    title = Text.assemble(
        (address, "bold"), time.strftime("  %H:%M:%S"), (f"  {trouble}" if trouble else "", "red")
    )
    fitting = max(1, console.height - LINES_AROUND)
    table = _table(HEADINGS, rows[:fitting], Row.cells)
    if console.measure(table, options=console.options.update(width=UNBOUNDED)).maximum > console.width:
        table = _table(NARROW_HEADINGS, rows[:fitting], Row.narrow_cells)
    parts: list[RenderableType] = [title, table]
    if len(rows) > fitting:
        parts.append(Text(f"{len(rows) - fitting} more do not fit on the screen", "dim"))
    elif not rows:
        parts.append(Text("no topics yet", "dim"))
    return Group(*parts)


def _table(headings: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        if index < NAME_COLUMNS:
            table.add_column(heading, overflow="ellipsis", min_width=8)
        else:
            table.add_column(
                heading, justify="right", no_wrap=True
            )  # a number cut short would be another number
    for row in rows:
        style = "yellow" if row.paused else ("dim" if row.channel is None else "")
        table.add_row(*cells(row), style=style)
    return table
