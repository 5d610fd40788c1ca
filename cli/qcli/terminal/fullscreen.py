"""A command that uses the whole terminal, as `top` does: the alternate screen, keys, resizes and Ctrl-Z."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from ..framework.errors import Failure, OutputClosed
from ..framework.output import is_terminal, write

_HOME = "\x1b[H"
_ERASE_LINE = "\x1b[K"
_ERASE_BELOW = "\x1b[J"
_BEGIN_FRAME = "\x1b[?2026h"
_END_FRAME = "\x1b[?2026l"
"""Terminals that know these show a frame at once; others ignore them."""
_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = f"{_END_FRAME}\x1b[H\x1b[J\x1b[?25h\x1b[?1049l"
_ESCAPE_S = 0.05
"""After the byte of the Escape key, the rest of another key arrives within this time."""
_POLL_S = 0.1
"""Look for news, a resize and signals this often. A handler must not write itself: it may interrupt a write."""

_KEY = re.compile(rb"\x1b[\[O][0-?]*[ -/]*[@-~]|.", re.DOTALL)
_UNFINISHED = re.compile(rb"\x1b(?:[\[O][0-?]*[ -/]*)?\Z")
_NAMES = {
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x15": "ctrl-u",
    b"\x1b": "escape",
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[7~": "home",
    b"\x1b[4~": "end",
    b"\x1b[8~": "end",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
}


def keys_in(data: bytes) -> list[str]:
    """Return the keys in what a terminal sent: printable ASCII, or names such as `page-up`. Leaves out unknown ones."""
    keys = []
    for each in _KEY.findall(data):
        text = each.decode("latin-1")
        name = _NAMES.get(each.replace(b"\x1bO", b"\x1b["), "")
        keys.append(name or (text if len(text) == 1 and " " <= text <= "~" else ""))
    return list(filter(None, keys))


@contextmanager
def full_screen() -> Iterator[FullScreen]:
    """Use the alternate screen, which leaves no traces when the window is resized.

    At the end of the block, whatever ends it, the terminal is as before; it shows the lines of `farewell`.
    """
    screen = FullScreen()
    handlers = {each: signal.signal(each, screen.note) for each in (signal.SIGTSTP, signal.SIGCONT)}
    try:
        screen.show()
        yield screen
    finally:
        with suppress(Failure, OutputClosed):  # the terminal is gone
            screen.hide("".join(f"{line}\n" for line in screen.farewell))
        for number, handler in handlers.items():
            signal.signal(number, handler)


class FullScreen:
    def __init__(self) -> None:
        self.farewell: Sequence[str] = ()
        self._input = sys.stdin.fileno() if is_terminal(sys.stdin) else None
        self._before = None if self._input is None else termios.tcgetattr(self._input)
        self._happened: set[int] = set()

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines, which must not be wider than the screen, nor more than its height."""
        # Erase each line before writing it: after a full line, the cursor would still be on its last character.
        text = _HOME + "\n".join(_ERASE_LINE + line for line in lines)
        below = "\n" + _ERASE_BELOW if len(lines) < self.size()[1] else ""
        write(_BEGIN_FRAME + text + below + _END_FRAME)

    @staticmethod
    def size() -> tuple[int, int]:
        """Return width and height."""
        width, height = shutil.get_terminal_size()
        return width, height

    def wait(self, timeout_s: float, is_news: Callable[[], bool]) -> list[str]:
        """Wait for keys, a resize, news or the timeout, and return the keys.

        Ctrl-Z stops the process here, with the terminal as before.
        """
        size, end_s = self.size(), time.monotonic() + timeout_s
        while not self._obey_signals() and self.size() == size and not is_news():
            left_s = end_s - time.monotonic()
            inputs = [] if self._input is None else [self._input]
            if select.select(inputs, [], [], max(0.0, min(_POLL_S, left_s)))[0]:
                return self._read_keys()
            if left_s <= 0:
                break
        return []

    def _read_keys(self) -> list[str]:
        data = b""
        while self._input is not None:
            try:
                more = os.read(self._input, 4096)
            except OSError:
                more = b""
            data += more
            if not more:  # the terminal is gone: writing to it fails, too
                self._input = None
            elif not _UNFINISHED.search(data) or not select.select([self._input], [], [], _ESCAPE_S)[0]:
                break
        return keys_in(data)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal until `wait`."""
        self._happened.add(number)

    def _obey_signals(self) -> bool:
        """Stop at SIGTSTP, and return whether the process was stopped: the screen must be drawn."""
        if signal.SIGTSTP in self._happened:
            self.hide("")
            os.kill(os.getpid(), signal.SIGSTOP)
            self._happened.add(signal.SIGCONT)
        if signal.SIGCONT not in self._happened:
            return False
        self._happened.clear()
        self.show()  # the shell may have changed the terminal's settings meanwhile
        return True

    def show(self) -> None:
        """Switch to the alternate screen; keys are read without Enter."""
        if self._input is not None:
            tty.setcbreak(self._input, termios.TCSADRAIN)
        write(_ENTER)

    def hide(self, farewell: str) -> None:
        """Restore the terminal, and write this text."""
        if self._before is not None and self._input is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        write(_LEAVE + farewell)
