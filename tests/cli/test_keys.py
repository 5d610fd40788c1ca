"""Tests for the keys of a terminal."""

import os
import pty
import threading
from collections.abc import Iterator

import pytest

from qcli.terminal.fullscreen import FullScreen, keys_in

KEYS = [
    (b"q", "q"),
    (b" ", " "),
    (b"\r", "enter"),
    (b"\n", "enter"),
    (b"\x7f", "backspace"),
    (b"\x15", "ctrl-u"),
    (b"\x1b[A", "up"),
    (b"\x1bOB", "down"),
    (b"\x1b[H", "home"),
    (b"\x1b[4~", "end"),
    (b"\x1b[5~", "page-up"),
    (b"\x1b[6~", "page-down"),
]


@pytest.mark.parametrize(("data", "key"), KEYS)
def test_keys_alone_and_followed(data: bytes, key: str) -> None:
    assert keys_in(data) == [key]
    assert keys_in(data + b"x" + data) == [key, "x", key]


def test_many_keys_at_once() -> None:
    assert keys_in(b"".join(data for data, _ in KEYS)) == [key for _, key in KEYS]


@pytest.mark.parametrize("data", [b"\x1b[15~", b"\x1b[1;5C", b"\x1b[<0;1;1M", "ä".encode(), b"\x01"])
def test_unknown_keys_are_left_out(data: bytes) -> None:
    assert keys_in(data + b"q") == ["q"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of a terminal that is standard input."""
    ours, theirs = pty.openpty()
    with open(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield ours
    os.close(ours)


def keys_after(screen: FullScreen) -> list[str]:
    return screen.wait(30, lambda: False)


def test_escape_is_known_when_nothing_follows(terminal: int) -> None:
    screen = FullScreen()
    screen.show()
    os.write(terminal, b"\x1b")
    assert keys_after(screen) == ["escape"]
    os.write(terminal, b"\x1bq")
    assert keys_after(screen) == ["escape", "q"]


@pytest.mark.parametrize(("data", "key"), [each for each in KEYS if each[0].startswith(b"\x1b")])
def test_key_in_two_parts(terminal: int, data: bytes, key: str) -> None:
    screen = FullScreen()
    screen.show()
    os.write(terminal, data[:1])
    threading.Timer(0.01, os.write, (terminal, data[1:])).start()
    assert keys_after(screen) == [key]
