"""Reads the screen of a command that uses the whole terminal, as a person sees it."""

import time
from collections.abc import Callable

import pyte

from cli.support import DEADLINE_S, Terminal

END_OF_FRAME = b"\x1b[?2026l"


class ScreenReader:
    """The screen of a command on a `Terminal` of this size. It changes by whole frames."""

    def __init__(self, terminal: Terminal, rows: int = 24, columns: int = 80) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._terminal = terminal
        self._stream = pyte.ByteStream(self.screen)
        self._rest = b""
        self._feed(terminal.shown)

    @property
    def lines(self) -> list[str]:
        """The lines, without blanks at their ends."""
        return [line.rstrip() for line in self.screen.display]

    def wait(self, condition: Callable[[list[str]], object]) -> list[str]:
        """Wait until the lines meet the condition, and return them."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.lines):
            if not (data := self._terminal.read(deadline)):
                raise EOFError("the command has ended: " + "\n".join(self.lines))
            self._feed(data)
        return self.lines

    def _feed(self, data: bytes) -> None:
        frames, end, rest = (self._rest + data).rpartition(END_OF_FRAME)
        self._stream.feed(frames + end)
        self._rest = rest

    def wait_for(self, text: str) -> list[str]:
        """Wait until a line has this text, and return the lines."""
        return self.wait(lambda lines: any(text in line for line in lines))

    def wait_without(self, text: str) -> list[str]:
        """Wait until no line has this text, and return the lines."""
        return self.wait(lambda lines: not any(text in line for line in lines))

    def press(self, keys: str, text: str) -> list[str]:
        """Press keys, and wait until a line has this text; return the lines."""
        self._terminal.type(keys.encode())
        return self.wait_for(text)

    def reversed_line(self) -> str:
        """Return the line in reverse video; empty if there is none."""
        for number, line in enumerate(self.lines):
            if self.screen.buffer[number][0].reverse:
                return line
        return ""

    def resize(self, rows: int, columns: int) -> None:
        """Resize the window."""
        self.screen.resize(rows, columns)
        self._terminal.resize(rows, columns)
