"""The live table of `qcli stat`, on the terminal's alternate screen, as in `top` and `watch`.

The alternate screen leaves no traces when the window is resized, and the terminal restores the old contents at the
end.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ...framework.errors import ExitCode, Failure, OutputClosed
from ...framework.output import plain_table, styled, write
from .rows import NAME_COLUMNS, Row, table, unavailable_lines

if TYPE_CHECKING:
    from .rows import Reports

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[H\x1b[J\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_ERASE_LINE = "\x1b[K"
_ERASE_BELOW = "\x1b[J"
_NUDGES = {signal.SIGWINCH, signal.SIGTSTP}
"""Signals that end the wait between two reports: a resize, and Ctrl-Z."""


def show_live(reports: Reports, interval_ms: int) -> None:
    """Show the table and redraw it every `interval_ms` until interrupted; the last one stays on the terminal.

    If the broker becomes unreachable, the last numbers stay, with a line that says so.

    Raises:
        Failure: The first report fails, or the topic or channel does not exist.
    """
    rows = reports.take()
    waiting = False
    with _Screen() as screen:
        due_s = time.monotonic() + interval_ms / 1000
        while True:
            screen.show(" and ".join(reports.addresses), rows, waiting)
            if not screen.wait_until(due_s):
                continue
            try:
                rows, waiting = reports.take(), False
            except Failure as error:
                if error.exit_code != ExitCode.UNREACHABLE:
                    raise
                waiting = True
            due_s = time.monotonic() + interval_ms / 1000


class _Screen:
    """The alternate screen. At the end of the block, the terminal is restored and shows the last table."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def __enter__(self) -> _Screen:
        # Blocked for sigtimedwait. The system does not drop a blocked signal, even if its default is to ignore it.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUDGES)
        write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            write(_LEAVE + "".join(f"{line}\n" for line in self._shown))
        except (Failure, OutputClosed):
            pass  # the terminal is gone
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def show(self, address: str, rows: list[Row], waiting: bool) -> None:
        """Draw the table for the current size of the screen."""
        width, height = shutil.get_terminal_size()
        self._shown = _lines(address, rows, waiting, width, height)
        # Erase each line before writing it: after a full line, the cursor would still be on its last character.
        write(_HOME + "\n".join(_ERASE_LINE + line for line in self._shown))
        if len(self._shown) < height:
            write("\n" + _ERASE_BELOW)

    def wait_until(self, due_s: float) -> bool:
        """Wait until that time of the monotonic clock; return False if the screen must be redrawn before."""
        happened = signal.sigtimedwait(_NUDGES, max(0.0, due_s - time.monotonic()))
        if happened is None:
            return True
        if happened.si_signo == signal.SIGTSTP:
            write(_LEAVE)
            os.kill(os.getpid(), signal.SIGSTOP)
            write(_ENTER)
        return False


def _lines(address: str, rows: list[Row], waiting: bool, width: int, height: int) -> list[str]:
    head = [styled("bold", f"{address}  {time.strftime('%H:%M:%S')}"[:width])]
    if waiting:
        head.append(styled("red", "no answer; waiting for the broker"[:width]))
    head += [styled("red", line[:width]) for line in unavailable_lines(rows)[: height // 2]]
    room = max(1, height - len(head) - 1)
    if len(rows) > room:
        room = max(1, room - 1)
    # Cut, because a wrapped line would push the first line off the screen.
    heading, *texts = (
        line[:width] for line in plain_table(table(rows[:room], width), NAME_COLUMNS).splitlines()
    )
    lines = [*head, styled("bold", heading)]
    for row, text in zip(rows, texts, strict=False):
        lines.append(styled("yellow" if row.paused else "dim" if row.channel is None else "", text))
    if len(rows) > room:
        lines.append(styled("dim", f"{len(rows) - room} more do not fit on the screen"[:width]))
    elif not rows:
        lines.append(styled("dim", "no topics yet"[:width]))
    return lines[:height]
