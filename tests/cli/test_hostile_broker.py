"""Tests for commands with a broker that sends hostile answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from typing import Any

import pytest

from cli.support import Cli, Run
from interop.peers import Broker
from soak import in_soak

EVIL = "\x1b]0;title\x07\x1b[2J\r"
SHOWN = r"\x1b]0;title\x07\x1b[2J\r"


@contextmanager
def answering(status: int, body: bytes | Callable[[], bytes]) -> Iterator[Cli]:
    """Run a server that answers every request with this, and return a `Cli` for it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            self.send_response(status)
            answer = body() if callable(body) else body
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

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
    said = "There are no connected clients.\n" if line.startswith("clients") else ""
    assert (result.code, result.err) == (0, said)


def test_name_that_cannot_be_encoded(run_here: Run) -> None:
    result = run_here(Cli("", "a..b:4151"), "topic", "create", "t")
    assert result.code == 2
    assert "'a..b:4151' has no valid host" in result.err


def test_half_of_a_surrogate_pair() -> None:
    """It becomes U+FFFD. As a process, which sets the encoding of its streams."""
    with answering(200, json.dumps(stats_of(client_client_id="\ud800")).encode()) as qcli:
        result = qcli("clients", "--interval", "0", "--format", "json")
    assert (result.code, result.records[0]["client_id"]) == (0, "\ufffd")


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


ACTING = "\x1b]0;t\x07\x9b2J\u202e\u2028\x7fx"


def acts(out: bytes | str) -> set[str]:
    """The characters that act on a terminal."""
    text = out.decode() if isinstance(out, bytes) else out
    return {char for char in text if not char.isprintable() and char != "\n"}


@pytest.mark.parametrize(
    "line",
    [
        "channel list",
        "channel list --format json",
        "topic list",
        "topic list --format json",
        "topic settings t",
        "topic settings t --format json",
        "topic set t ttl=1h",
        "channel settings t/c",
        "channel settings t/c --format json",
        "channel set t/c max_attempts=1",
        "channel set t/c max_attempts=1 --format json",
        "channel seek t/c --to latest --yes",
        "channel seek t/c --to latest --yes --format json",
        "stat",
        "stat --format json",
        "stat --format csv",
        "nodes",
        "nodes --format json",
        "nodes --check",
        "clients --interval 0",
        "clients --interval 0 --format json",
        "dlq list",
        "dlq list --format json",
        "peek t/c",
        "peek t/c --format json",
        "deferred list t/c",
        "deferred list t/c --format json",
    ],
)
def test_no_answer_acts_on_the_terminal(run_here: Run, line: str) -> None:
    """An answer that has the fields of all endpoints, with such text in each of them."""
    client = {"client_id": ACTING, "hostname": ACTING, "remote_address": ACTING, "user_agent": ACTING}
    counts = dict.fromkeys(
        ["depth", "message_count", "in_flight_count", "deferred_count", "requeue_count"], 1
    )
    channel = {"channel_name": ACTING, "clients": [client], "paused": False, **counts}
    answer = {
        "topics": [{"topic_name": ACTING, "topic": ACTING, "channels": [channel], "paused": False, **counts}],
        "version": ACTING, "hostname": ACTING, "broadcast_address": ACTING, "start_time": 1, "health": ACTING,
        "retention_time_ms": 1, "retention_bytes": 1, "ttl_ms": 1, "max_messages": 1, "max_bytes": 1,
        "when_full": ACTING, "max_attempts": 1, "dead_letter_topic": ACTING, "topic": ACTING, "channel": ACTING,
        "from_sequence": ACTING, "to_sequence": ACTING, "delivered_again": 1, "skipped": 0, "in_flight": 0,
        "limited_by": ACTING, "dry_run": False, "dropped": 0, "id": ACTING, "body": ACTING, "state": ACTING,
        "origins": [{"topic": ACTING, "channel": ACTING, "reason": ACTING, "count": 1, "first_ns": 1, "last_ns": 1}],
        "waiting": 1, "next_sequence": None, "sequence": 1, "due_ns": 1, "timestamp_ns": 1, "attempts": 1,
    }  # fmt: skip
    with answering(200, json.dumps(answer).encode()) as qcli:
        result = run_here(qcli, *line.split())
    assert acts(result.out) == set(), result.out
    assert acts(result.err) == set(), result.err
    if "--format json" in line and result.code == 0:
        for record in result.out.splitlines():
            json.loads(record)


ORIGIN = {
    "topic": "t", "channel": "c", "id": "0" * 16, "sequence": 1, "attempts": 1, "timestamp_ns": 1, "reason": "requeued",
}  # fmt: skip
MESSAGE = {
    "topic": "t", "id": "0" * 16, "timestamp_ns": 1, "attempts": 1, "sequence": 1, "due_ns": 1, "channel": "c",
    "state": "fresh", "origin": ORIGIN, "body": "b",
}  # fmt: skip
GAP = {"topic": "t", "gap": "retention", "first_sequence": 1, "next_sequence": 2}
COUNT = {"topic": "t", "channel": "c", "reason": "requeued", "count": 1, "first_ns": 1, "last_ns": 1}
SETTINGS = {
    "retention_time_ms": 1, "retention_bytes": 1, "ttl_ms": 1, "max_messages": 1, "max_bytes": 1, "when_full": "reject",
    "table": "", "max_attempts": 1, "dead_letter_topic": "d", "dropped": 0,
}  # fmt: skip
SOUGHT = {
    "topic": "t", "channel": "c", "from_sequence": 1, "to_sequence": 2, "delivered_again": 0, "skipped": 0,
    "in_flight": 0, "limited_by": "latest", "dry_run": False,
}  # fmt: skip
ANSWERS: dict[str, dict[str, Any]] = {
    "topic settings t": SETTINGS,
    "topic set t ttl=1h --yes": SETTINGS,
    "channel settings t/c": SETTINGS,
    "channel set t/c max_attempts=1": SETTINGS,
    "channel seek t/c --to latest --yes": SOUGHT,
    "channel seek t/c --to latest --dry-run": SOUGHT,
    "dlq list": {"topics": [{"topic": "t"}], "origins": [COUNT], "in_flight": 1, "next_sequence": None},
    "dlq list t": {"origins": [COUNT], "in_flight": 1, "next_sequence": None},
    "dlq show t": MESSAGE,
    "dlq show t -n 0": MESSAGE,
    "dlq requeue t": {"requeued": 1, "kept": [{"why": "x", "count": 1}], "next_sequence": None},
    "dlq drop t --yes": {"dropped": 1, "next_sequence": None},
    "deferred list t/c": MESSAGE,
    "deferred cancel t/c 0000000000000000": {"cancelled": ["0" * 16]},
    "peek t/c": MESSAGE,
    "peek t --from 0": MESSAGE,
    "peek t --from 1": GAP,
    "peek t": {"first_sequence": 0, "next_sequence": 1},
    "tail t --from 0": {"first_sequence": 0, "next_sequence": 1, "bytes": 0, "at_sequence": None},
    "replay t u": {"first_sequence": 0, "next_sequence": 1, "bytes": 0, "at_sequence": None, "tcp_port": 1},
    "drain --timeout 1ms": {**stats_of(), "broadcast_address": "a", "http_port": 1},
    "drain --stop": {**stats_of(), "broadcast_address": "a", "http_port": 1},
}
"""A right answer to a command."""
WRONG = [None, -5, 1e400, "\ud800", [5], {"a": 1}]


def changed(answer: Any, wrong: Iterator[Any], at_one_place: int) -> Iterator[Any]:
    """Yield the answer without each of its fields, with other values in them, and with what has no fields.

    Args:
        wrong: Values of a wrong type.
        at_one_place: How many of these are in the place of one value; the next place has the next ones.
    """
    if isinstance(answer, dict):
        for name in answer:
            yield {other: value for other, value in answer.items() if other != name}
            for value in changed(answer[name], wrong, at_one_place):
                yield {**answer, name: value}
        if "origin" in answer or "origins" in answer:
            yield {**answer, "broker": {}, "more_ns": "x", "timestamp": []}
    elif isinstance(answer, list) and answer:
        yield from ([each] for each in changed(answer[0], wrong, at_one_place))
    yield from islice(wrong, at_one_place)


@pytest.mark.parametrize("line", ANSWERS)
@pytest.mark.parametrize("whole", [False, *in_soak(True)])
def test_answers_without_fields_or_of_wrong_types(run_here: Run, line: str, whole: bool) -> None:
    """Each is one error, or, if it is about what the command can do without, no error.

    The long form has all wrong values at all places, and prints each answer in all forms.
    """
    body = b""
    forms = [""]
    if line.startswith(("peek", "deferred list", "dlq show")):
        forms += [" --format json", " --format-string %t%o%T%i%a%c%b%s%d"]
    with answering(200, lambda: body) as qcli:
        for answer in changed(ANSWERS[line], cycle(WRONG), len(WRONG) if whole else 2):
            body = json.dumps(answer).encode()
            forms.append(forms.pop(0))
            for form in forms if whole else forms[:1]:
                result = run_here(qcli, *(line + form).split())
                assert "Traceback" not in result.err, (answer, result.err)
                assert result.code in (0, 1, 3, 4), (answer, result)
                assert result.err.count("Error:") <= 1, (answer, result.err)
                if result.code == 3:
                    break  # refused when it was read, before the format matters


@pytest.mark.parametrize("line", ["dlq list t", "dlq show t -n 0", "dlq requeue t", "dlq drop t --yes"])
def test_pages_without_end(run_here: Run, line: str) -> None:
    page = {"origins": [], "in_flight": 0, "requeued": 0, "dropped": 0, "next_sequence": 0}
    body = b"\n".join([json.dumps(MESSAGE).encode()] * 1000) if "show" in line else json.dumps(page).encode()
    with answering(200, body) as qcli:
        result = run_here(qcli, *line.split())
    assert "is not the HTTP port of an NSQ broker" in result.err


def test_an_error_is_one_line(run_here: Run) -> None:
    with answering(400, json.dumps({"message": "NO\nError: all is well\r\n\x1b[2J"}).encode()) as qcli:
        result = run_here(qcli, "topic", "create", "t")
    assert result.err.count("\n") == 1
    assert acts(result.err) == set()
