"""Tests for the log lines of requests, connections, start and stop, in nsqd's words where possible."""

import logging
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.api import running_api
from broker.support import connected, running_broker, settle
from trio_nsq.broker.api.server import log_unless_publish
from trio_nsq.http.messages import Request


def info_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


async def test_requests_are_logged_except_publishes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_api(tmp_path / "d") as api:
        for method, path in [
            ("GET", "/ping"),
            ("GET", "/stats?format=json&topic=a%20b"),
            ("POST", "/pub?topic=t"),
            ("POST", "/mpub?topic=t"),
            ("POST", "/pub"),
            ("GET", "/topic/producer?topic=new&producer=p"),
            ("POST", "/topic/producer/forget?topic=new&producer=p"),
            ("GET", "/pub"),
            ("POST", "/topic/create?topic=u"),
            ("GET", "/nowhere"),
            ("GET", "/PING"),
            ("OPTIONS", "/ping"),
            ("GET", "/config/nope"),
        ]:
            await api.send(method, path, body=b"x")
    logged = [
        match for line in info_lines(caplog) if (match := re.fullmatch(r"(\d{3} .*) \((.*)\) (.*)", line))
    ]
    assert [match[1] for match in logged] == [
        "200 GET /ping",
        "200 GET /stats?format=json&topic=a%20b",
        "405 GET /pub",
        "200 POST /topic/create?topic=u",
        "404 GET /nowhere",
        "301 GET /PING",
        "200 OPTIONS /ping",
        "400 GET /config/nope",
    ]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", match[2]) for match in logged)
    assert all(re.fullmatch(r"\d+(\.\d{3})?(s|ms|µs|ns)", match[3]) for match in logged)


@pytest.mark.parametrize(
    ("elapsed_s", "text"),
    [
        (0, "0ns"),
        (921e-9, "921ns"),
        (5.148e-6, "5.148µs"),
        (0.00111652, "1.117ms"),
        (0.501060164, "501.060ms"),
        (61.5, "61.500s"),
    ],
)
def test_duration_of_a_request(caplog: pytest.LogCaptureFixture, elapsed_s: float, text: str) -> None:
    caplog.set_level("INFO")
    log_unless_publish(Request("GET", "/a b", {}, {}, b"", "1.2.3.4:5", "/a%20b?c"), 200, elapsed_s)
    assert info_lines(caplog) == [f"200 GET /a%20b?c (1.2.3.4:5) {text}"]


async def test_invalid_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_broker(tmp_path / "d") as bound:
        assert bound.http_address is not None
        async with connected(bound.http_address, greeting=b"") as client:
            await client.send(b"nonsense\x1b[31m\r\n\r\n")
            await client.stream.send_eof()
            while await client.stream.receive_some():
                pass
    (line,) = [line for line in info_lines(caplog) if line.startswith("400 ")]
    assert line.startswith("400 - - (127.0.0.1:")


async def test_connects_and_disconnects_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_broker(tmp_path / "d") as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"x")
            peer = "127.0.0.1:%d" % client.stream.socket.getsockname()[1]
        await settle()
        lines = info_lines(caplog)
        assert f"TCP: new client({peer})" in lines
        assert f"PROTOCOL(V2): [{peer}] exiting ioloop" in lines


async def test_start_and_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_broker(tmp_path / "d", node_id=5) as bound:
        started = info_lines(caplog)
        assert re.match(r"trio-nsq v\S+ \(Python \S+\)", started[0])
        assert started[1:] == [
            "ID: 5",
            "NSQ: found 0 topics, 0 channels, 0 messages",
            f"TCP: listening on {bound.tcp_address}",
            f"HTTP: listening on {bound.http_address}",
        ]
    assert info_lines(caplog)[-3:] == [
        f"TCP: closing {bound.tcp_address}",
        f"HTTP: closing {bound.http_address}",
        "NSQ: bye",
    ]


async def test_findings_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.publish("other", b"x")
        await client.subscribe("t", "c")
        await client.publish("t", b"1", b"2", b"3")
    segment = tmp_path / "d" / "topics" / "t.topic" / "00000000000000000000.log"
    segment.write_bytes(segment.read_bytes() + b"torn")
    caplog.set_level("INFO")
    caplog.clear()
    async with running_broker(tmp_path / "d"):
        lines = [record.getMessage() for record in caplog.records]
        assert "TOPIC(other): found, 1 message in its log, 0 channels" in lines
        assert "TOPIC(t): found, 3 messages in its log, 1 channel" in lines
        assert "NSQ: found 2 topics, 1 channel, 4 messages" in lines
        (cut,) = [line for line in lines if "cut" in line]
        assert cut.startswith(f"{segment}: cut 4 bytes of an unfinished record at byte ")


async def test_bye_is_the_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with AsyncExitStack() as stack:
        async with running_broker(tmp_path / "d") as bound:
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.publish("t", b"x")
        *lines, last = info_lines(caplog)
        assert last == "NSQ: bye"
        assert any(line.endswith("exiting ioloop") for line in lines)
