"""Tests for names, and for quoting invalid ones in errors."""

import pytest

from trio_nsq.protocol import CommandError, NSQError, is_ephemeral, is_valid_name
from trio_nsq.protocol.errors import NON_FATAL_CODES, FrameError, quote


@pytest.mark.parametrize(
    "name",
    ["a", "A", "0", ".", "..", "_", "-", "a.b-c_D9", "a" * 64, "x#ephemeral", "a" * 54 + "#ephemeral"],
)
def test_valid_names(name: str) -> None:
    assert is_valid_name(name)
    assert is_ephemeral(name) == name.endswith("#ephemeral")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 65,
        "a" * 55 + "#ephemeral",
        "#ephemeral",
        "a#ephemeralx",
        "a#ephemera",
        "a##ephemeral",
        "a#ephemeral#ephemeral",
        "a#Ephemeral",
        "a\n",
        "a#ephemeral\n",
        "\na",
        "a b",
        "a/b",
        "a\\b",
        "a\0",
        "a*",
        "ä",
        "٣",  # a digit, but not ASCII
        "\uff41",  # a full-width letter
        "a\u0301",
        "\udcff",
    ],
)
def test_invalid_names(name: str) -> None:
    assert not is_valid_name(name)


def test_too_long_names_are_not_cached() -> None:
    assert not is_valid_name("a" * 1_000_000)
    assert not hasattr(is_valid_name, "cache_info")


# Answers of nsqd 1.3.0 to a PUB to a topic with these bytes.
QUOTED = [
    (b"", '""'),
    (b"plain", '"plain"'),
    (b'a"b\\c', '"a\\"b\\\\c"'),
    (b"\a\b\f\n\r\t\v", '"\\a\\b\\f\\n\\r\\t\\v"'),
    (b"\x00\x01\x1f\x7f", '"\\x00\\x01\\x1f\\x7f"'),
    (b"\xff\xfe", '"\\xff\\xfe"'),
    ("é".encode(), '"é"'),
    ("日本 ".encode(), '"日本 "'),
    ("😀".encode(), '"😀"'),
    (b"\xc2\x85", '"\\u0085"'),  # valid UTF-8, not printable
    (b"\xc2\xad", '"\\u00ad"'),
    (b"\xe3\x80\x80", '"\\u3000"'),
    (b"\xf3\xa0\x80\x81", '"\\U000e0001"'),
    (b"\xef\xbf\xbd", '"\ufffd"'),  # the replacement character itself
    (b"\xe2\x82a", '"\\xe2\\x82a"'),  # truncated
    (b"\xed\xa0\x80", '"\\xed\\xa0\\x80"'),  # a surrogate is not UTF-8
    (b"\xc0\xaf", '"\\xc0\\xaf"'),  # overlong
    (b"'`", '"\'`"'),
]


@pytest.mark.parametrize(("name", "quoted"), QUOTED)
def test_quoting(name: bytes, quoted: str) -> None:
    assert quote(name.decode("utf-8", "surrogateescape")) == quoted


def test_command_errors() -> None:
    error = CommandError("E_INVALID", "cannot SUB in current state")
    assert (error.code, error.text, error.fatal) == ("E_INVALID", "cannot SUB in current state", True)
    assert str(error) == "E_INVALID cannot SUB in current state"
    assert error.wire == b"E_INVALID cannot SUB in current state"
    assert CommandError("E_BAD_PROTOCOL").wire == b"E_BAD_PROTOCOL"
    assert CommandError("E_INVALID", "é \udcff").wire == b"E_INVALID \xc3\xa9 \xff"
    assert isinstance(error, NSQError)
    assert issubclass(FrameError, NSQError)


def test_only_the_failed_errors_are_not_fatal() -> None:
    assert {"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"} == NON_FATAL_CODES
    for code in NON_FATAL_CODES:
        assert not CommandError(code, "x").fatal
    for code in (
        "E_INVALID",
        "E_BAD_TOPIC",
        "E_PUB_FAILED",
        "E_MPUB_FAILED",
        "E_SUB_FAILED",
        "E_BAD_PROTOCOL",
    ):
        assert CommandError(code, "x").fatal
