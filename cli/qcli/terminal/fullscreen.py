"""A command that uses the whole terminal, as `top` does: the alternate screen, keys, resizes and Ctrl-Z."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from ..framework.errors import Failure, OutputClosed
from ..framework.output import is_terminal, write
from .keys import KeyDecoder

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
_SIGNALS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)


class FullScreen:
    """The alternate screen leaves no traces when the window is resized.

    At the end of the block, whatever ends it, the terminal is as before; it shows the lines of `farewell`.

    Attributes:
        farewell: The lines that stay on the terminal.
    """

    def __init__(self) -> None:
        self.farewell: Sequence[str] = ()
        self._keys = KeyDecoder()
        self._escape_at_s = 0.0
        self._input = sys.stdin.fileno() if is_terminal(sys.stdin) else None
        self._before: list[Any] | None = None
        self._happened: set[int] = set()
        self._handlers: dict[int, Any] = {}
        self._wake_read, self._wake_write = os.pipe()
        self._waking = threading.Lock()
        self._is_open = True
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def __enter__(self) -> FullScreen:
        try:
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._note)
            self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            self._show()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Failure, OutputClosed):  # the terminal is gone
            self._hide("".join(f"{line}\n" for line in self.farewell))
        signal.set_wakeup_fd(getattr(self, "_old_wakeup", -1))
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        with self._waking:
            self._is_open = False
            os.close(self._wake_read)
            os.close(self._wake_write)

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

    def wake(self) -> None:
        """Let `wait` return. May be called in a thread."""
        with self._waking, suppress(BlockingIOError):  # then there is enough to read
            if self._is_open:  # else the descriptor may belong to something else
                os.write(self._wake_write, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for keys, a resize, `wake` or the timeout, and return the keys.

        Ctrl-Z stops the process here, with the terminal as before.
        """
        if self._keys.unfinished:
            timeout_s = min(timeout_s, self._escape_at_s - time.monotonic())
        wanted = [self._wake_read, *([] if self._input is None else [self._input])]
        ready, _, _ = select.select(wanted, [], [], max(0.0, timeout_s))
        keys: list[str] = []
        if self._input in ready:
            keys = self._read_keys()
        elif self._keys.unfinished and time.monotonic() >= self._escape_at_s:
            keys = self._keys.finish()
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        self._obey_signals()
        return keys

    def _read_keys(self) -> list[str]:
        assert self._input is not None
        try:
            data = os.read(self._input, 4096)
        except OSError:
            data = b""
        if not data:  # the terminal is gone: writing to it fails, too
            self._input = None
        self._escape_at_s = time.monotonic() + _ESCAPE_S
        return self._keys.feed(data)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._happened.add(number)

    def _obey_signals(self) -> None:
        happened, self._happened = self._happened, set()
        if signal.SIGTSTP in happened:
            self._hide("")
            os.kill(os.getpid(), signal.SIGSTOP)
            happened.add(signal.SIGCONT)
        if signal.SIGCONT in happened:  # the shell may have changed the terminal's settings meanwhile
            self._happened.discard(signal.SIGCONT)
            self._show()

    def _show(self) -> None:
        if self._input is not None:
            if self._before is None:
                self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input, termios.TCSADRAIN)
        write(_ENTER)

    def _hide(self, farewell: str) -> None:
        if self._before is not None and self._input is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        write(_LEAVE + farewell)
