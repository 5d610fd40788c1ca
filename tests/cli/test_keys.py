"""Tests for the decoder of keys."""

import pytest

from qcli.terminal.keys import KeyDecoder

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
def test_keys_whole_and_byte_by_byte_and_followed(data: bytes, key: str) -> None:
    assert KeyDecoder().feed(data) == [key]
    decoder = KeyDecoder()
    assert [each for byte in data for each in decoder.feed(bytes([byte]))] == [key]
    assert KeyDecoder().feed(data + b"x" + data) == [key, "x", key]


def test_many_keys_at_once() -> None:
    assert KeyDecoder().feed(b"".join(data for data, _ in KEYS)) == [key for _, key in KEYS]


def test_escape_is_known_when_nothing_follows() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.unfinished
    assert decoder.finish() == ["escape"]
    assert not decoder.unfinished
    assert decoder.finish() == []
    assert decoder.feed(b"\x1bq") == ["escape", "q"]


@pytest.mark.parametrize("data", [b"\x1b[15~", b"\x1b[1;5C", b"\x1b[<0;1;1M", "ä".encode(), b"\x01"])
def test_unknown_keys_are_left_out(data: bytes) -> None:
    assert KeyDecoder().feed(data + b"q") == ["q"]
