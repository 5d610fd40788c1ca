"""Tests for the types of arguments and options."""

import re
from pathlib import Path

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cli.support import CliHere, Run, all_contexts
from qcli.framework import params
from qcli.framework.params import (
    Boolean,
    BooleanOrWord,
    Integer,
    Number,
    PathOrNothing,
    Source,
    Word,
    address,
    byte_size,
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
from trio_nsq.protocol.address import is_unix_path
from trio_nsq.server.listening import port_of
from trio_nsq.text.durations import duration_text
from trio_nsq.text.sizes import parse_size


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


@pytest.mark.parametrize("text", ["7x", "7dx", "7d1", "1h7d", "d", "", "-7d"])
def test_error_of_a_duration_has_the_whole_value_and_mentions_days(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"^'{text}' is not a duration such as .*, 7d or 1d12h.$"):
        long_duration(text)
    with pytest.raises(click.BadParameter, match=f"^'{text}' is not a .*, 7d or 1d12h, nor forever.$"):
        retention_time(text)


@pytest.mark.parametrize("text", ["99999999999d", "36525d1ms", "876601h", "1d876600h"])
def test_durations_beyond_the_limit_name_it(text: str) -> None:
    for parse in (long_duration, retention_time):
        with pytest.raises(click.BadParameter, match=r"is longer than 100 years, the limit\.$"):
            parse(text)
    assert long_duration("36525d") == long_duration("876600h") == 36_525 * 86_400_000


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


@pytest.mark.parametrize(("text", "number"), [("10", 10), ("0x10", 16), ("1_000", 1000), ("-0X_1f", -31)])
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


@pytest.mark.parametrize(
    "text",
    [
        "nsq-1",
        "a.b.example.com",
        "example.com.",
        "under_score.x",
        "10.0.0.1",
        "::1",
        "fe80::1%eth0",
        "a" * 63,
    ],
)
def test_hosts_to_announce(text: str) -> None:
    assert params.host(text) == params.host_pattern(text) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[::1]", "without brackets"),
        ("host:4150", "has a port: write the host alone, host"),
        ("cafe:4150", "has a port"),
        ("a b", "is not a host name"),
        ("a\n", "is not a host name"),
        (" a", "is not a host name"),
        ("http://a", "is not a host name"),
        ("a/b", "is not a host name"),
        ("a..b", "is not a host name"),
        (".a", "is not a host name"),
        ("-a", "is not a host name"),
        ("m\xfcller.example", "xn--"),
        ("a" * 64, "is not a host name"),
        ("a." * 127 + "a", "is not a host name"),
    ],
)
def test_texts_that_are_no_hosts(text: str, reason: str) -> None:
    for convert in (params.host, params.host_pattern):
        with pytest.raises(click.BadParameter, match=re.escape(reason)):
            convert(text)


def test_hosts_with_asterisks() -> None:
    for text in ("*", "*.nsq", "nsq-*.example.com", "*.a.*"):
        assert params.host_pattern(text) == text
        with pytest.raises(click.BadParameter):
            params.host(text)


def test_prefixes_of_statsd() -> None:
    for text in ("", "nsq.%s", "a-b_c.d/e"):
        assert params.metric_prefix(text) == text
    for character in " |:@#\n\t\x00\x7f\x85\u2028\xe9":
        with pytest.raises(click.BadParameter, match="use printable ASCII"):
            params.metric_prefix(f"nsq{character}x")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("serve", "--broadcast-address=[::1]"),
        ("serve", "--broadcast-address=host:4150"),
        ("lookupd", "--broadcast-address=a b"),
        ("serve", "--statsd-prefix=a|b"),
        ("admin", "--statsd-prefix=a b"),
        ("serve", "--http-allowed-host=a:80"),
        ("lookupd", "--http-allowed-host=a b"),
        ("admin", "--http-allowed-host=http://a"),
    ],
)
def test_servers_refuse_them_at_the_start(run_here: Run, command: str, option: str) -> None:
    result = run_here(CliHere("", "", run=run_here), command, option)
    assert result.code == 2
    assert option.partition("=")[0] in result.err


@pytest.mark.parametrize(
    ("text", "size"),
    [("100kB", 100_000), ("100KB", 100_000), ("1mb", 10**6), ("2gib", 2**31), ("1TIB", 2**40)],
)
def test_units_of_sizes_in_upper_and_lower_case(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_megabits_are_no_size() -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size("1Mb")


def go_integer(text: str) -> int | None:
    """Parse an integer as documented: decimal or hexadecimal ASCII digits, with optional underscores."""
    digits = text.removeprefix("+" if text.startswith("+") else "-")
    base = 16 if digits[:2] in ("0x", "0X") else 10
    rest = digits[2:].removeprefix("_") if base == 16 else digits
    parts = rest.split("_")
    allowed = "0123456789abcdefABCDEF" if base == 16 else "0123456789"
    if not all(parts) or not set("".join(parts)) <= set(allowed):
        return None
    if base == 10 and digits[0] == "0" and digits.strip("0_"):
        return None  # octal in Go
    value = int("".join(parts), base)
    return -value if text.startswith("-") else value


@given(
    st.one_of(
        st.text(st.sampled_from("+-0123456789_xXabcof .\u0663\uff11"), max_size=8),
        st.integers(-(2**62), 2**62).map(str),
        st.integers(0, 2**62).map(hex),
    )
)
@example("\u0663")
@example("\uff11\uff12")
@example("0b1")
@example("0o7")
@example(" 5")
def test_integers_have_ascii_digits_only(text: str) -> None:
    wanted = go_integer(text)
    if wanted is None:
        with pytest.raises(click.BadParameter, match="is not an integer"):
            Integer().convert(text, None, None)
    else:
        assert Integer().convert(text, None, None) == wanted


@given(st.floats(0, 1e300, allow_nan=False))
def test_numbers(value: float) -> None:
    assert Number().convert(repr(value), None, None) == value


@pytest.mark.parametrize(
    "text", ["", "nan", "inf", "1e999", "1_0", "\u0663", "0x1", "1 2", "1,5", ".", "1e", "9" * 5000]
)
def test_texts_that_are_no_numbers(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number"):
        Number(min=0).convert(text, None, None)
    with pytest.raises(click.BadParameter):
        percentiles(text)


@pytest.mark.parametrize("digits", ["\u0663", "\uff11\uff12"])
def test_digits_of_other_scripts_are_no_digits(digits: str) -> None:
    for parse, unit in ((duration, "s"), (long_duration, "d"), (byte_size, "kB"), (byte_size, "")):
        with pytest.raises(click.BadParameter):
            parse(digits + unit)
    for parse_address in (address, listen_address, http_address):
        with pytest.raises(click.BadParameter):
            parse_address(f"127.0.0.1:{digits}")


def test_all_options_with_numbers_have_the_same_parser() -> None:
    params = [param for context in all_contexts() for param in context.command.params]
    kinds = {
        type(param.type) for param in params if isinstance(param.type, click.IntRange | click.FloatRange)
    }
    assert kinds == {Integer, Number}
    assert not [param.name for param in params if param.type in (click.INT, click.FLOAT)]


@given(st.text(st.sampled_from("./:a1[]"), max_size=6))
@example(".")
@example("..")
@example(".5s")
@example("./a:1")
@example("[a/b]:1")
def test_a_path_to_listen_on_is_a_path_for_the_server(text: str) -> None:
    try:
        listen_address(text)
    except click.BadParameter:
        return
    assert is_unix_path(text) or port_of(text) is not None
