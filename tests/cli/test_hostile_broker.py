"""Tests for commands with a broker that sends hostile answers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.support import Cli, Run
from interop.peers import Broker

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
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))
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
def test_invalid_or_deeply_nested_json(run_here: Run, words: tuple[str, ...], body: bytes) -> None:
    with answering(200, body) as qcli:
        result = run_here(qcli, *words)
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
def test_answers_for_nodes_and_clients_that_are_not_those_of_a_broker(
    run_here: Run, line: str, topics: object
) -> None:
    body = {"topics": topics, "producers": [5], "version": "1", "start_time": 1, "disk": {"free_bytes": 1}}
    with answering(200, json.dumps(body).encode()) as qcli:
        result = run_here(qcli, *line.split())
    told = result.out.decode() if "--check" in line else result.err
    assert (result.code, "is not the HTTP port of an NSQ broker" in told) == (3, True), result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "topics", [[{"topic_name": "t"}], [7], {"a": "b"}, [{"topic_name": "t", "channels": 5}]]
)
def test_statistics_that_are_not_those_of_a_broker(run_here: Run, topics: object) -> None:
    with answering(200, json.dumps({"topics": topics}).encode()) as qcli:
        result = run_here(qcli, "stat")
        with qcli.on_terminal("stat") as terminal:
            assert terminal.end() == 3
    assert (result.code, "is not the HTTP port of an NSQ broker" in result.err) == (3, True)
    assert b"Traceback" not in terminal.shown


def test_control_characters_in_an_error(run_here: Run) -> None:
    with answering(400, json.dumps({"message": EVIL}).encode()) as qcli:
        result = run_here(qcli, "topic", "create", "t")
    assert result.code == 1
    assert SHOWN in result.err
    assert "\x1b" not in result.err


def test_control_characters_in_names(run_here: Run) -> None:
    figures = {"depth": 0, "message_count": 0, "message_bytes": 0, "paused": False}
    topic = {"topic_name": EVIL, **figures, "channels": [{"channel_name": EVIL, **figures}]}
    with answering(200, json.dumps({"version": "1.3.0", "topics": [topic]}).encode()) as qcli:
        result = run_here(qcli, "topic", "list")
    assert result.code == 0, result.err
    assert result.out.decode().split() == [SHOWN, SHOWN]


def test_control_characters_on_a_screen(run_here: Run) -> None:
    counts = dict.fromkeys(("depth", "message_count", "in_flight_count", "deferred_count", "client_count"), 1)
    topic = {"topic_name": EVIL, **counts, "paused": False, "unavailable": EVIL}
    topic["channels"] = [{"channel_name": EVIL, **counts, "paused": False}]
    with answering(200, json.dumps({"topics": [topic]}).encode()) as qcli:
        assert "\x1b" not in run_here(qcli, "stat").out.decode()
        with qcli.on_terminal("stat", "--once", columns=80) as terminal:
            assert terminal.end() == 0
        assert b"\x1b" not in terminal.shown
        with qcli.on_terminal("stat", columns=80) as terminal:
            terminal.expect(b"total")
            assert terminal.interrupt() == 130
    assert EVIL.encode() not in terminal.shown


COUNTS = {"depth": 1, "backend_depth": 0, "message_count": 1, "paused": False}
MORE = {"in_flight_count": 0, "deferred_count": 0, "requeue_count": 0, "timeout_count": 0, "client_count": 0}
CLIENT = {
    "client_id": "a",
    "hostname": "b",
    "user_agent": "c",
    "remote_address": "127.0.0.1:5",
    "connect_ts": 1,
}


def stats_of(**changes: object) -> dict[str, object]:
    """Return the statistics of a topic, a channel and a client. `topic_depth`, for example, changes a topic's depth."""

    def changed(place: str, fields: dict[str, object]) -> dict[str, object]:
        return fields | {
            name.removeprefix(f"{place}_"): value
            for name, value in changes.items()
            if name.startswith(f"{place}_")
        }

    client = changed("client", CLIENT)
    channel = changed("channel", {"channel_name": "c", "clients": [client], **COUNTS, **MORE})
    topic = changed("topic", {"topic_name": "t", "channels": [channel], **COUNTS})
    return changed("stats", {"version": "1", "start_time": 1, "topics": [topic], "producers": [client]})


@pytest.mark.parametrize(
    "change",
    [
        {"stats_topics": 5},
        {"stats_topics": {"t": 1}},
        {"stats_topics": ["t"]},
        {"stats_version": ["1"]},
        {"stats_start_time": float("inf")},
        {"stats_disk": 5},
        {"topic_topic_name": None},
        {"topic_topic_name": ["t"]},
        {"topic_channels": "c"},
        {"topic_depth": "1"},
        {"topic_depth": 1e400},
        {"channel_channel_name": 7},
        {"channel_message_count": {}},
        {"channel_oldest_message_age_ms": "old"},
        {"client_connect_ts": "now"},
        {"client_remote_address": {}},
        {"client_pub_counts": [None]},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "line", ["stat", "stat --format json", "nodes", "clients --interval 0", "topic list"]
)
def test_statistics_of_wrong_types(run_here: Run, line: str, change: dict[str, object]) -> None:
    with answering(200, json.dumps(stats_of(**change)).encode()) as qcli:
        result = run_here(qcli, *line.split())
    assert result.code == 3, result.err
    assert "is not the HTTP port of an NSQ broker" in result.err


@pytest.mark.parametrize("line", ["stat", "nodes", "clients --interval 0", "topic list"])
def test_statistics_without_fields(run_here: Run, line: str) -> None:
    channel = {"channel_name": "c", "depth": 1, "message_count": 1}
    topics = [{"topic_name": name, "depth": 1, "message_count": 1} for name in "tu"]
    body = json.dumps({"version": "1", "topics": [{**topics[0], "channels": [channel]}, topics[1]]})
    with answering(200, body.encode()) as qcli:
        result = run_here(qcli, *line.split())
    assert (result.code, result.err) == (0, "")


def test_name_that_cannot_be_encoded(run_here: Run) -> None:
    result = run_here(Cli("", "a..b:4151"), "topic", "create", "t")
    assert result.code == 3
    assert "No broker answers at a..b:4151: the host name is not valid." in result.err


def test_half_of_a_surrogate_pair() -> None:
    """As a process, which sets the encoding of its streams."""
    with answering(200, json.dumps(stats_of(client_client_id="\ud800")).encode()) as qcli:
        result = qcli("clients", "--interval", "0", "--format", "json")
    assert (result.code, result.records[0]["client_id"]) == (0, "\ud800")


@pytest.mark.parametrize(
    "host",
    [EVIL, "a b", "/run/other.sock", "https://a", "user@a", "a\n", "a" * 64, "\ufffd", "a?b", ".."],
    ids=repr,
)
def test_services_that_list_unusable_hosts(run_here: Run, broker: Broker, topic: str, host: str) -> None:
    broker.create(topic)
    producers = [
        {"broadcast_address": each, "http_port": int(port), "tcp_port": 1, "topics": [], "tombstones": []}
        for each, port in (broker.http_address.split(":"), (host, "4151"))
    ]
    with answering(200, json.dumps({"version": "1", "producers": producers}).encode()) as service:
        for line in ("stat", "nodes", f"topic pause {topic}"):
            cli = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": service.http_address})
            result = run_here(cli, *line.split())
            assert result.code == 0, result.err
            assert f"{host!r} is not a host, but a broker is registered with it; left out." in result.err
            assert "\x1b" not in result.err + result.out.decode()


@pytest.mark.parametrize("producers", [5, [5], {"a": 1}, "x"], ids=repr)
def test_services_with_answers_of_wrong_types(run_here: Run, producers: object) -> None:
    with answering(200, json.dumps({"version": "1", "producers": producers}).encode()) as service:
        cli = Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": service.http_address})
        result = run_here(cli, "topic", "list")
    assert result.code == 3
    assert "is not the HTTP port of an nsqlookupd" in result.err


def test_warnings_about_listed_hosts_are_limited(run_here: Run, broker: Broker) -> None:
    producers = [
        {"broadcast_address": f"{number}/", "tcp_port": 1, "http_port": 4151} for number in range(1000)
    ]
    with answering(200, json.dumps({"producers": producers}).encode()) as service:
        cli = Cli("", broker.http_address, {"QCLI_LOOKUPD_HTTP_ADDRESS": service.http_address})
        result = run_here(cli, "topic", "list")
    assert result.code == 0
    assert len(result.err.splitlines()) == 11
    assert result.err.endswith("Warning: 990 more such hosts are left out.\n")


def test_number_of_failures_in_an_error_is_limited(run_here: Run) -> None:
    producers = [
        {"broadcast_address": "127.0.0.1", "tcp_port": 1, "http_port": port} for port in range(1, 302, 2)
    ]
    with answering(200, json.dumps({"producers": producers}).encode()) as service:
        result = run_here(Cli("", "", {"QCLI_LOOKUPD_HTTP_ADDRESS": service.http_address}), "topic", "list")
    assert result.code == 3
    assert result.err.splitlines()[0] == "Error: 151 failures:"
    assert result.err.splitlines()[101:] == ["  and 51 more."]


@pytest.mark.parametrize("line", ["tail {0} --to latest", "replay {0} {0}.again", "peek {0} --format raw"])
def test_server_that_is_no_broker_is_named(run_here: Run, broker: Broker, topic: str, line: str) -> None:
    broker.post("/pub", b"a", topic=topic)
    with answering(200, b"{}") as other:
        cli = Cli("", f"{broker.http_address},{other.http_address}")
        found = run_here(cli, *line.format(topic).split())
    assert (found.code, found.out) == (4, b"" if "replay" in line else b"a\n"), found.err
    assert f"{other.http_address} is not the HTTP port of an NSQ broker." in found.err
