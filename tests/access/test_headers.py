"""The headers that decide: Authorization, Host, and those by which browsers tell about the page."""

import time
from base64 import b64encode
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.http.credentials import MAX_TOKEN_BYTES, is_bearer, token_of
from trio_nsq.http.web_pages import HostNames, foreign_page

LATIN = st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n"), max_size=60)


def basic(text: bytes) -> str:
    """A Basic header."""
    return f"Basic {b64encode(text).decode()}"


@pytest.mark.parametrize(
    ("value", "token"),
    [
        ("Bearer abc", b"abc"),
        ("bearer abc", b"abc"),
        ("BEARER   abc ", b"abc"),
        ("Bearer abc def", b"abc def"),
        ("Bearer", b""),
        ("Bearer ", b""),
        ("Bearer\tabc", b""),
        ("Bearer \xe9", b"\xe9"),
        (basic(b"user:abc"), b"abc"),
        (basic(b":abc"), b"abc"),
        (basic(b":a:b:c"), b"a:b:c"),
        (basic(b"abc"), b""),
        (basic(b":\xff"), b"\xff"),
        ("basic OmFiYw==", b"abc"),
        ("Basic OmFiYw", b""),
        ("Basic Om Fi Yw==", b""),
        ("Basic \xe9", b""),
        ("Basic", b""),
        ("Digest abc", b""),
        ("abc", b""),
        ("", b""),
        ("Bearer a, Bearer b", b"a, Bearer b"),
        ("Bearer " + "a" * MAX_TOKEN_BYTES, b"a" * MAX_TOKEN_BYTES),
        ("Bearer " + "a" * (MAX_TOKEN_BYTES + 1), b""),
    ],
)
def test_the_token_of_a_header(value: str, token: bytes) -> None:
    assert token_of({"authorization": value}) == token


def test_no_header_is_not_an_empty_one() -> None:
    assert token_of({}) is None
    assert not is_bearer({})


@given(LATIN)
def test_no_header_raises(value: str) -> None:
    assert isinstance(token_of({"authorization": value}), bytes)
    assert isinstance(token_of({"authorization": f"Bearer {value}"}), bytes)
    assert isinstance(token_of({"authorization": f"Basic {value}"}), bytes)
    assert is_bearer({"authorization": f"Bearer {value}"})
    assert not is_bearer({"authorization": f"Basic {value}"})


@given(st.binary(max_size=60), st.binary(max_size=60).filter(lambda user: b":" not in user))
def test_the_password_of_basic_is_the_token(token: bytes, user: bytes) -> None:
    assert token_of({"authorization": basic(user + b":" + token)}) == token


# ---------------------------------------------------------------------- Host

HOSTS = HostNames(["Broker.Example.com", "queue"])


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LOCALHOST:4151",
        "localhost.",
        "a.localhost:1",
        "127.0.0.1",
        "127.0.0.1:4151",
        "10.1.2.3:80",
        "[::1]",
        "[::1]:4151",
        "[2001:db8::1]:80",
        "broker.example.com",
        "BROKER.example.com.:4151",
        "queue:4151",
        "web:4151",
        "queue.team.svc.cluster.local",
        "broker.internal",
        "nas.home.arpa",
    ],
)
def test_hosts_of_the_server(host: str) -> None:
    for _ in range(2):  # the second time from the cache
        assert HOSTS.allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:4151",
        "localhost.evil.example",
        "evil.localhost.example",
        "evillocal.example",
        "x.evilinternal.com",
        "localhost:4151, evil.example",
        "localhost, evil.example",
        "evil.example, localhost",
        "localhost:80:90",
        "localhost:abc",
        "localhost:123456",
        "localhost/",
        "localhost@evil.example",
        "evil@localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1:80@evil.example",
        "[::1]evil.example",
        "[::1].evil.example",
        "[evil.example]",
        "[fe80::1%evil]",
        "[::1",
        "::1",
        "0x7f.1",
        "127.1",
        " localhost",
        "localhost ",
        "localhost\t",
        "localhost\n",
        "loc\xe4lhost",
        "localh\u017ft",
        "sub.broker.example.com",
        "*",
        ".",
        "..",
        ".localhost.com",
        "a" * 300 + ".localhost",
    ],
)
def test_hosts_that_are_not_the_server_s(host: str) -> None:
    for _ in range(2):
        assert not HOSTS.allows(host)


def test_a_star_allows_every_name() -> None:
    assert HostNames(["*"]).allows("evil.example")
    assert HostNames("*").allows("evil.example")


@given(LATIN)
def test_no_host_raises(host: str) -> None:
    allowed = HostNames().allows(host)
    assert allowed is HostNames().allows(host)
    if allowed and host:
        assert "," not in host
        assert "@" not in host


def test_many_hosts_do_not_fill_the_memory() -> None:
    """And those that come later are allowed as well."""
    hosts = HostNames()
    for number in range(1000):
        assert hosts.allows(f"10.0.{number % 256}.{number // 256}:{number}")
    assert hosts.allows("localhost")
    assert not hosts.allows("evil.example")


# ---------------------------------------------------------------------- Origin, Referer, Sec-Fetch-Site


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "h:1"},
        {"host": "h:1", "origin": "http://h:1"},
        {"host": "h:1", "origin": "https://h:1"},
        {"host": "h:1", "origin": "http://H:1"},
        {"host": "h:1", "referer": "http://h:1/page?x=http://evil.example/"},
        {"host": "h:1", "sec-fetch-site": "same-origin", "origin": "http://h:1"},
        {"host": "h:1", "sec-fetch-site": "none"},
    ],
)
def test_requests_of_no_foreign_page(headers: dict[str, str]) -> None:
    assert not foreign_page(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "h:1", "origin": "http://evil.example"},
        {"host": "h:1", "origin": "http://h:2"},
        {"host": "h:1", "origin": "http://h"},
        {"host": "h:1", "origin": "http://h:1.evil.example"},
        {"host": "h:1", "origin": "http://h:1@evil.example"},
        {"host": "h:1", "origin": "null"},
        {"host": "h:1", "origin": "x"},
        {"host": "", "origin": "null"},
        {"origin": "null"},
        {"host": "h:1", "origin": "http://h:1, http://evil.example"},
        {"host": "h:1", "origin": "null", "referer": "http://h:1/"},
        {"host": "h:1", "referer": "http://evil.example/http://h:1/"},
        {"host": "h:1", "sec-fetch-site": "cross-site"},
        {"host": "h:1", "sec-fetch-site": "same-site"},
        {"host": "h:1", "sec-fetch-site": "cross-site", "origin": "http://h:1"},
        {"host": "h:1", "sec-fetch-site": "none, cross-site"},
        {"host": "h:1", "sec-fetch-site": ""},
    ],
)
def test_requests_of_foreign_pages(headers: dict[str, str]) -> None:
    assert foreign_page(headers)


@given(st.dictionaries(st.sampled_from(["host", "origin", "referer", "sec-fetch-site"]), LATIN))
def test_no_header_of_a_page_raises(headers: dict[str, str]) -> None:
    assert isinstance(foreign_page(headers), bool)


# ---------------------------------------------------------------------- time


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: token_of({"authorization": text}),
        lambda text: token_of({"authorization": f"Bearer {text}"}),
        lambda text: token_of({"authorization": f"Basic {text}"}),
        lambda text: HostNames().allows(text),
        lambda text: HostNames().allows(f"[{text}"),
        lambda text: foreign_page({"host": "h", "origin": f"http://{text}"}),
        lambda text: foreign_page({"host": text, "referer": text}),
    ],
)
@pytest.mark.parametrize("character", ["a", ".", ":", "[", " ", ",", "=", "A:", "//", "\xe9", "0"])
def test_parsing_takes_linear_time(parse: Callable[[str], object], character: str) -> None:
    start = time.process_time()
    parse(character * 1_000_000)
    assert time.process_time() - start < 1
