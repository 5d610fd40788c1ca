"""Tests for the types of arguments and options."""

from pathlib import Path

import click
import pytest

from qcli.framework.params import (
    Boolean,
    BooleanOrWord,
    Integer,
    PathOrNothing,
    Source,
    Word,
    address,
    channel_source,
    delimiter,
    duration,
    http_address,
    http_service,
    listen_address,
    long_duration,
    or_nothing,
    percentiles,
    positive_duration,
    retention_time,
    source,
    tcp_address,
    tcp_listen_address,
    topic_name,
)
from trio_nsq.durations import duration_text


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
def test_durations_are_parsed_as_in_go(text: str, value_ms: int) -> None:
    assert duration(text) == value_ms


@pytest.mark.parametrize(
    "text", ["", "5", "1.5", "s", "-1s", "1 s", "1sec", "1d", "1us", "999us", "1s ", "1e3s", "."]
)
def test_invalid_durations(text: str) -> None:
    with pytest.raises(click.BadParameter):
        duration(text)


@pytest.mark.parametrize("text", ["2", "1.5"])
def test_duration_without_a_unit_suggests_one(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"write {text}s for seconds"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "value_ms"),
    [("7d", 7 * 86_400_000), ("1d12h30m", 131_400_000), ("90s", 90_000), ("0", 0), ("0d", 0)],
)
def test_durations_with_days(text: str, value_ms: int) -> None:
    assert long_duration(text) == value_ms
    assert long_duration(duration_text(value_ms)) == value_ms


@pytest.mark.parametrize("text", ["7x", "7dx", "7d1", "1h7d", "d", "", "-7d", "99999999999d"])
def test_error_of_a_duration_has_the_whole_value_and_mentions_days(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"^'{text}' is not a duration such as .*, 7d or 1d12h.$"):
        long_duration(text)
    with pytest.raises(click.BadParameter, match=f"^'{text}' is not a .*, 7d or 1d12h, nor forever.$"):
        retention_time(text)


def test_positive_durations() -> None:
    assert positive_duration("1ms") == 1
    with pytest.raises(click.BadParameter):
        positive_duration("0")


@pytest.mark.parametrize("text", ["127.0.0.1:4150", "localhost:1", "[::1]:4150", "a-b.c_d:65535"])
def test_addresses(text: str) -> None:
    assert address(text) == listen_address(text) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "h:65536", "::1:4150", "http://h:1", "h:1/x", "h h:1"]
)
def test_invalid_addresses(text: str) -> None:
    for parse in (address, listen_address):
        with pytest.raises(click.BadParameter):
            parse(text)


def test_port_0_and_no_host_are_for_listening() -> None:
    assert listen_address("127.0.0.1:0") == "127.0.0.1:0"
    assert or_nothing(listen_address)("") == ""
    assert or_nothing(address)("") == ""
    assert or_nothing(tcp_listen_address)("") == ""
    for text in ("127.0.0.1:0", ":4150"):
        with pytest.raises(click.BadParameter):
            address(text)


def test_all_interfaces_are_written_as_in_go() -> None:
    assert listen_address(":4150") == ":4150"
    assert listen_address("[::]:4150") == "[::]:4150"


@pytest.mark.parametrize("text", ["/run/nsq.sock", "./nsq.sock", "run/nsq.sock", "/run/a:1"])
def test_path_to_listen_at_has_a_slash(text: str) -> None:
    assert listen_address(text) == text
    with pytest.raises(click.BadParameter):
        or_nothing(tcp_listen_address)(text)


@pytest.mark.parametrize("text", ["auth", "auth:80", "[::1]:80", "http://a/b?c=d", "https://a:1"])
def test_services(text: str) -> None:
    assert http_service(text) == text


@pytest.mark.parametrize("text", ["", "a b", "ftp://a", "http://", "a:0", "a:65536", "://a", "a:b"])
def test_invalid_services(text: str) -> None:
    with pytest.raises(click.BadParameter):
        http_service(text)


def test_percentiles() -> None:
    assert percentiles("0.99") == (0.99,)
    assert percentiles("1.0, 0.5") == (1.0, 0.5)


@pytest.mark.parametrize("text", ["", "x", "0.9,", "0", "1.1", "-1", "nan", "inf", "0.5,99"])
def test_invalid_percentiles(text: str) -> None:
    with pytest.raises(click.BadParameter):
        percentiles(text)


def value(kind: Integer | click.Choice[str] | click.Path, text: str) -> object:
    """Convert a text to a value of this kind."""
    return kind.convert(text, None, None)


@pytest.mark.parametrize(("text", "number"), [("10", 10), ("0x10", 16), ("1_000", 1000), ("0b11", 3)])
def test_integers_are_parsed_as_in_go(text: str, number: int) -> None:
    assert value(Integer(), text) == number


@pytest.mark.parametrize("text", ["", "x", "1.0", "010", "5", "1e3"])
def test_invalid_integers(text: str) -> None:
    with pytest.raises(click.BadParameter):
        value(Integer(min=6), text)


def test_booleans_are_parsed_as_in_go() -> None:
    for word in ("1", "t", "T", "TRUE", "true", "True"):
        assert value(Boolean(), word) is True
        assert value(BooleanOrWord([]), word) == "true"
    for word in ("0", "f", "F", "FALSE", "false", "False"):
        assert value(Boolean(), word) is False
        assert value(BooleanOrWord([]), word) == "false"
    for word in ("", "yes", "2"):
        for kind in (Boolean(), BooleanOrWord(["a"])):
            with pytest.raises(click.BadParameter):
                value(kind, word)


def test_words() -> None:
    assert value(Word(["a", "b"]), "B") == "b"
    assert value(Word(["a", "b"], empty="a"), "") == "a"
    assert value(BooleanOrWord(["a"]), "A") == "a"
    for word in ("", "c"):
        with pytest.raises(click.BadParameter, match="is not one of 'a', 'b'"):
            value(Word(["a", "b"]), word)


def test_empty_path_is_none() -> None:
    assert value(PathOrNothing(), "") is None
    assert value(PathOrNothing(), "a/b") == Path("a/b")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\n", b"\n"),
        (r"\t", b"\t"),
        (r"\0", b"\0"),
        (r"\x1e", b"\x1e"),
        (r"\36\'", b"\x1e'"),
        (r"\\", b"\\"),
        (", ", b", "),
        ("ä", "ä".encode()),
    ],
)
def test_delimiters(text: str, value: bytes) -> None:
    assert delimiter(text) == value


def test_delimiter_keeps_bytes_that_are_not_utf_8() -> None:
    assert delimiter(b"\xff".decode("utf-8", "surrogateescape")) == b"\xff"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (r"\x1", r"\\x is not an escape"),
        ("\\", r"\\ is not an escape"),
        (r"\q", r"\\q is not an escape"),
        (r"\n\e", r"\\e is not an escape"),
        (r"\\\d", r"\\d is not an escape"),
        (r"\400", r"\\4 is not an escape"),
    ],
)
def test_invalid_delimiters(text: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        delimiter(text)


def test_names() -> None:
    assert topic_name("clicks.v-1_A#ephemeral") == "clicks.v-1_A#ephemeral"
    assert source("a") == Source("a", None)
    assert source("a/b#ephemeral") == channel_source("a/b#ephemeral") == Source("a", "b#ephemeral")
    assert str(source("a/b")) == "a/b"


@pytest.mark.parametrize("text", ["", "a b", "a/b", "ä", "a\n", "x" * 65, "#ephemeral"])
def test_invalid_topics(text: str) -> None:
    with pytest.raises(click.BadParameter):
        topic_name(text)


@pytest.mark.parametrize("text", ["", "/", "a/", "/b", "a/b/c", "a/b c"])
def test_invalid_sources(text: str) -> None:
    for parse in (source, channel_source):
        with pytest.raises(click.BadParameter):
            parse(text)


def test_channel_may_be_required() -> None:
    with pytest.raises(click.BadParameter, match="write a/CHANNEL"):
        channel_source("a")


def test_example_in_an_error_has_the_port_of_the_option() -> None:
    for convert, port in ((tcp_address, 4150), (http_address, 4151)):
        with pytest.raises(click.BadParameter, match=rf"such as 127\.0\.0\.1:{port}\."):
            convert("host")
