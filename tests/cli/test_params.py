"""Values of arguments and options."""

import click
import pytest

from qcli.params import (
    Source,
    address,
    channel_source,
    delimiter,
    duration,
    listen_address,
    optional_listen_address,
    positive_duration,
    source,
    topic_name,
)


@pytest.mark.parametrize(
    ("text", "value_ms"),
    [
        ("0", 0),
        ("0s", 0),
        ("500ms", 500),
        ("1m30s", 90_000),
        ("1.5s", 1_500),
        (".5s", 500),
        ("1.s", 1_000),
        ("2h", 7_200_000),
        ("1h2m3s4ms", 3_723_004),
        ("1000us", 1),
        ("1500µs", 2),
        ("1000000ns", 1),
        ("1s1s", 2_000),
    ],
)
def test_durations_are_go_s(text: str, value_ms: int) -> None:
    assert duration(text) == value_ms


@pytest.mark.parametrize(
    "text", ["", "5", "1.5", "s", "-1s", "1 s", "1sec", "1d", "1us", "999us", "1s ", "1e3s", "."]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter):
        duration(text)


@pytest.mark.parametrize("text", ["2", "1.5"])
def test_a_duration_without_a_unit_is_told_how_to_get_one(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"write {text}s for seconds"):
        duration(text)


def test_some_durations_may_not_be_zero() -> None:
    assert positive_duration("1ms") == 1
    with pytest.raises(click.BadParameter):
        positive_duration("0")


@pytest.mark.parametrize("text", ["127.0.0.1:4150", "localhost:1", "[::1]:4150", "a-b.c_d:65535"])
def test_addresses(text: str) -> None:
    assert address(text) == listen_address(text) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "h:65536", "::1:4150", "http://h:1", "h:1/x", "h h:1"]
)
def test_what_is_no_address(text: str) -> None:
    for parse in (address, listen_address):
        with pytest.raises(click.BadParameter):
            parse(text)


def test_port_0_and_nothing_are_for_listening() -> None:
    assert listen_address("127.0.0.1:0") == "127.0.0.1:0"
    assert optional_listen_address("") == ""
    for text in ("127.0.0.1:0", ":4150"):
        with pytest.raises(click.BadParameter):
            address(text)
    with pytest.raises(click.BadParameter, match=r"0\.0\.0\.0:4150"):
        listen_address(":4150")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\n", b"\n"),
        (r"\t", b"\t"),
        (r"\0", b"\0"),
        (r"\x1e", b"\x1e"),
        (r"\\", b"\\"),
        (", ", b", "),
        ("ä", "ä".encode()),
    ],
)
def test_delimiters(text: str, value: bytes) -> None:
    assert delimiter(text) == value


def test_a_delimiter_keeps_bytes_that_are_no_text() -> None:
    assert delimiter(b"\xff".decode("utf-8", "surrogateescape")) == b"\xff"


@pytest.mark.parametrize("text", ["", r"\x1", "\\"])
def test_what_is_no_delimiter(text: str) -> None:
    with pytest.raises(click.BadParameter):
        delimiter(text)


def test_names() -> None:
    assert topic_name("clicks.v-1_A#ephemeral") == "clicks.v-1_A#ephemeral"
    assert source("a") == Source("a", None)
    assert source("a/b#ephemeral") == channel_source("a/b#ephemeral") == Source("a", "b#ephemeral")
    assert str(source("a/b")) == "a/b"


@pytest.mark.parametrize("text", ["", "a b", "a/b", "ä", "a\n", "x" * 65, "#ephemeral"])
def test_what_is_no_topic(text: str) -> None:
    with pytest.raises(click.BadParameter):
        topic_name(text)


@pytest.mark.parametrize("text", ["", "/", "a/", "/b", "a/b/c", "a/b c"])
def test_what_is_no_source(text: str) -> None:
    for parse in (source, channel_source):
        with pytest.raises(click.BadParameter):
            parse(text)


def test_a_channel_may_be_required() -> None:
    with pytest.raises(click.BadParameter, match="write a/CHANNEL"):
        channel_source("a")
