"""Tests for Host headers that name a server, and for requests of foreign web pages."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.http.web_pages import HostNames, foreign_page


@pytest.mark.parametrize(
    "host",
    [
        "",  # HTTP/1.0 without Host
        "127.0.0.1",
        "127.0.0.1:4151",
        "10.1.2.3:80",
        "[::1]:4151",
        "[fe80::1]",
        "localhost:4151",
        "LOCALHOST",
        "localhost.",
        "app.localhost:4151",
        "broker",
        "nsq.default.svc.cluster.local:4151",
        "nsq.prod.internal",
        "printer.home.arpa",
        "nsq.example.com",
        "NSQ.Example.com.:4151",
        socket.gethostname(),
    ],
)
def test_names_of_the_server(host: str) -> None:
    names = HostNames(["nsq.example.com"])
    assert names.allows(host)
    assert names.allows(host)  # also if it is cached


async def test_the_fully_qualified_name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Nsq1.example.org.")
    names = HostNames()
    assert not names.allows("nsq1.example.org")
    await names.learn_own_name()
    assert names.allows("nsq1.example.org:4151")


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "evil.example.com:4151",
        "nsq.example.com.evil.test",
        "127.0.0.1.evil.test",
        "localhost.evil.test",
        "xlocal.example",
        "a.notlocal.com",
        "evil.test, localhost",  # two headers
        "localhost, evil.test",
        "evil.test:80:80",
        "0x7f.1",
    ],
)
def test_other_names(host: str) -> None:
    assert not HostNames(["nsq.example.com"]).allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "nsqd-0.nsqd",
        "nsqd-0.nsqd:4151",
        "queue.nsq.svc",
        "nas.lan",
        "nsq.CORP.",
        "nsq.service.consul:4151",
        "x.cluster.home",
    ],
)
def test_names_in_no_public_top_level_domain(host: str) -> None:
    assert HostNames().allows(host)
    assert HostNames().admits({"host": host, "accept-language": "en", "user-agent": "Mozilla/5.0"})


@pytest.mark.parametrize(
    "host", ["a.com", "nsq.prod", "evil.de", "evil.ai", "evil.xn--p1ai", "evil.zip", "evil.travel", "x.arpa"]
)
def test_names_in_a_public_top_level_domain(host: str) -> None:
    assert not HostNames().allows(host)
    assert not HostNames().admits({"host": host, "accept-language": ""})


PROGRAM = {
    "host": "nsqd-1.prod.example.com:4151",
    "user-agent": "Go-http-client/1.1",
    "accept-encoding": "gzip",
    "accept": "application/vnd.nsq; version=1.0",
    "connection": "close",
}


def test_public_names_in_requests_that_no_browser_can_send() -> None:
    assert HostNames().admits(PROGRAM)
    assert not HostNames().admits(PROGRAM | {"host": "evil.example.com, localhost"})


@pytest.mark.parametrize(
    "sign",
    [
        {"accept-language": ""},
        {"accept-language": "*"},
        {"origin": "null"},
        {"referer": ""},
        {"cookie": "a=b"},
        {"sec-fetch-mode": "cors"},
        {"sec-ch-ua": ""},
        {"sec-websocket-key": "x"},
        {"upgrade-insecure-requests": "1"},
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
)
def test_each_sign_of_a_browser_is_enough(sign: dict[str, str]) -> None:
    assert not HostNames().admits(PROGRAM | sign)
    assert HostNames(["*.example.com"]).admits(PROGRAM | sign)


def test_refused_names_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    names = HostNames()
    for host in ("evil.example.com", "EVIL.example.com:4151", "other.example.com", "a b\x1b[31m"):
        for _ in range(3):
            assert not names.admits({"host": host, "accept-language": "en"})
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "evil.example.com" in first
    assert "--http-allowed-host evil.example.com" in first
    assert "other.example.com" in second
    assert "\x1b" not in third
    for number in range(1000):  # a page may use many
        assert not names.admits({"host": f"evil{number}.example.com", "accept-language": "en"})
    assert len(caplog.records) == 100


def test_asterisk_stands_for_any_characters() -> None:
    names = HostNames(["*.example.com", "nsq-*.example.org"])
    for host in ("a.example.com", "a.b.EXAMPLE.com.:80", "nsq-1.example.org"):
        assert names.allows(host)
    for host in ("example.com", "a.example.com.evil.com", "nsq.example.org", "badexample.com"):
        assert not names.allows(host)


def test_asterisk_allows_every_name() -> None:
    assert HostNames(["*"]).allows("evil.test")


@given(st.text(max_size=300))
def test_any_header_has_an_answer(host: str) -> None:
    HostNames().allows(host)
    foreign_page({"host": "localhost", "origin": host, "referer": host})


def test_cache_of_known_names_is_limited() -> None:
    names = HostNames()
    for number in range(10_000):
        assert names.allows(f"h{number}")
    assert names.allows("h9999")


HERE = {"host": "127.0.0.1:4151"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://127.0.0.1:4151"},
        {"origin": "http://127.0.0.1:4151", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"referer": "http://127.0.0.1:4151/path?x"},
    ],
)
def test_requests_of_programs_and_of_own_pages(headers: dict[str, str]) -> None:
    assert not foreign_page(HERE | headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:4152"},  # another port is another origin
        {"origin": "http://127.0.0.1:4151.evil.test"},
        {"referer": "http://evil.test/127.0.0.1:4151"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:4151", "sec-fetch-site": "cross-site"},
    ],
)
def test_requests_of_foreign_pages(headers: dict[str, str]) -> None:
    assert foreign_page(HERE | headers)
