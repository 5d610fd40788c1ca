"""Tests for commands with a broker that sends hostile answers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.support import Cli

EVIL = "\x1b]0;title\x07\x1b[2J\r"
SHOWN = r"\x1b]0;title\x07\x1b[2J\r"


@contextmanager
def answering(status: int, body: bytes) -> Iterator[Cli]:
    """Run a server that answers every request with this, and return a `Cli` for it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_GET

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Cli("127.0.0.1:1", f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b"no JSON"], ids=["list", "object", "text"]
)
@pytest.mark.parametrize(
    "words",
    [
        ("stat", "t", "--count", "1"),
        ("topic", "list"),
        ("topic", "set", "t", "ttl=1h"),
        ("peek", "t/c"),
        ("channel", "seek", "t/c", "--to", "latest", "--yes"),
        ("dlq", "show", "t"),
        ("deferred", "list", "t/c"),
    ],
)
def test_invalid_or_deeply_nested_json(words: tuple[str, ...], body: bytes) -> None:
    with answering(200, body) as qcli:
        result = qcli(*words)
    assert result.code == 3, result.err
    assert "Traceback" not in result.err
    assert "is not the HTTP port of an NSQ broker" in result.err


@pytest.mark.parametrize(
    "line", ["nodes", "nodes --check", "clients --interval 0", "clients t --interval 10ms"]
)
@pytest.mark.parametrize(
    "topics",
    [
        [7],
        {"a": "b"},
        [{"topic_name": "t"}],
        [{"topic_name": "t", "channels": 5}],
        [{"topic_name": "t", "channels": [{"channel_name": "c", "clients": 5, "depth": "many"}]}],
    ],
)
def test_answers_for_nodes_and_clients_that_are_not_those_of_a_broker(line: str, topics: object) -> None:
    body = {"topics": topics, "producers": [5], "version": "1", "start_time": 1, "disk": {"free_bytes": 1}}
    with answering(200, json.dumps(body).encode()) as qcli:
        result = qcli(*line.split())
    told = result.out.decode() if "--check" in line else result.err
    assert (result.code, "is not the HTTP port of an NSQ broker" in told) == (3, True), result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "topics", [[{"topic_name": "t"}], [7], {"a": "b"}, [{"topic_name": "t", "channels": 5}]]
)
def test_statistics_that_are_not_those_of_a_broker(topics: object) -> None:
    with answering(200, json.dumps({"topics": topics}).encode()) as qcli:
        result = qcli("stat")
        with qcli.on_terminal("stat") as terminal:
            assert terminal.end() == 3
    assert (result.code, "is not the HTTP port of an NSQ broker" in result.err) == (3, True)
    assert b"Traceback" not in terminal.shown


def test_control_characters_in_an_error() -> None:
    with answering(400, json.dumps({"message": EVIL}).encode()) as qcli:
        result = qcli("topic", "create", "t")
    assert result.code == 1
    assert SHOWN in result.err
    assert "\x1b" not in result.err


def test_control_characters_in_names() -> None:
    figures = {"depth": 0, "message_count": 0, "message_bytes": 0, "paused": False}
    topic = {"topic_name": EVIL, **figures, "channels": [{"channel_name": EVIL, **figures}]}
    with answering(200, json.dumps({"version": "1.3.0", "topics": [topic]}).encode()) as qcli:
        result = qcli("topic", "list")
    assert result.code == 0, result.err
    assert result.out.decode().split() == [SHOWN, SHOWN]


def test_control_characters_on_a_screen() -> None:
    counts = dict.fromkeys(("depth", "message_count", "in_flight_count", "deferred_count", "client_count"), 1)
    topic = {"topic_name": EVIL, **counts, "paused": False, "unavailable": EVIL}
    topic["channels"] = [{"channel_name": EVIL, **counts, "paused": False}]
    with answering(200, json.dumps({"topics": [topic]}).encode()) as qcli:
        assert "\x1b" not in qcli("stat").out.decode()
        with qcli.on_terminal("stat", "--once", columns=80) as terminal:
            assert terminal.end() == 0
        assert b"\x1b" not in terminal.shown
        with qcli.on_terminal("stat", columns=80) as terminal:
            terminal.expect(b"total")
            assert terminal.interrupt() == 130
    assert EVIL.encode() not in terminal.shown
