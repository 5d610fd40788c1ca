"""Tests for `qcli drain`: progress and ends, moving to another broker, refusals."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.support import Cli, CliHere, Run, fail_messages
from interop.peers import Broker, nsqd, qcli_serve


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Broker]:
    with qcli_serve(tmp_path / "source") as running:
        yield running


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Broker]:
    with qcli_serve(tmp_path / "target") as running:
        yield running


@pytest.fixture
def here(source: Broker, run_here: Run) -> Cli:
    return CliHere(source.tcp_address, source.http_address, run=run_here)


def draining(broker: Broker) -> bool:
    return broker.http("GET", "/config/draining") == b"true"


def bodies(broker: Broker, topic: str, channel: str) -> list[str]:
    answer = broker.http("GET", "/channel/peek", topic=topic, channel=channel, max_messages=10_000)
    return [json.loads(line)["body"] for line in answer.splitlines()]


def receive(broker: Broker, name: str, count: int) -> socket.socket:
    """Return a consumer that has this many messages in flight."""
    topic, channel = name.split("/")
    host, port = broker.tcp_address.split(":")
    consumer = socket.create_connection((host, int(port)), timeout=20)
    identify = json.dumps({"client_id": "worker-1"}).encode()
    consumer.sendall(b"  V2IDENTIFY\n" + len(identify).to_bytes(4, "big") + identify)
    consumer.sendall(f"SUB {topic} {channel}\nRDY {count}\n".encode())
    received = b""
    while received.count(b"body") < count:
        received += consumer.recv(65536)
    return consumer


# ---------------------------------------------------------------------- draining


def test_end_of_the_mode_is_suggested_with_the_typed_address(run_here: Run, source: Broker) -> None:
    source.post("/pub", b"1", topic="t")
    typed = f"--nsqd-http-address {source.http_address}"
    result = run_here(Cli("", ""), "drain", "--timeout", "1s", *typed.split())
    assert result.code == 4
    assert f"'qcli drain --stop {typed}'" in result.err


def test_empty_broker(here: Cli, source: Broker) -> None:
    result = here("drain")
    assert (result.code, result.out) == (0, b"")
    assert result.err == f"{source.http_address} is empty, and still refuses publishes: it can be stopped.\n"
    assert draining(source)
    for words in (["drain", "--stop"], ["undrain"]):
        here("drain", "--timeout", "0.1s")
        stopped = here(*words)
        assert (stopped.code, stopped.err) == (0, f"{source.http_address} accepts publishes.\n")
        assert not draining(source)


def test_what_is_left_after_the_timeout(here: Cli, source: Broker) -> None:
    source.create("t", "c", "d")
    source.post("/pub", b"1", topic="t")
    source.post("/pub", b"2", topic="t", defer=3_600_000)
    source.post("/pub", b"3", topic="alone")
    result = here("drain", "--timeout", "100ms")
    assert result.code == 4
    assert [line.split() for line in result.out.decode().splitlines()] == [
        ["TOPIC/CHANNEL", "DEPTH", "IN", "FLIGHT", "DEFERRED", "CONSUMERS"],
        ["alone", "1", "0", "0", "0"],
        ["t/c", "1", "0", "1", "0"],
        ["t/d", "1", "0", "1", "0"],
    ]
    first, last = result.err.splitlines()
    assert (
        first
        == f"{source.http_address}: 5 messages left (2 deferred); no consumer: t/c (2), t/d (2), alone (1)"
    )
    assert last.startswith(f"Error: 5 messages are left on {source.http_address}. ")
    assert "still drains: it refuses publishes. Continue with the same command, or end it with" in last
    assert draining(source)


def test_consumers_empty_the_broker(here: Cli, source: Broker) -> None:
    source.create("t", "c")
    here.publish("t", [b"%d" % n for n in range(3000)])
    with here.running("drain", "--format", "json") as drain:
        first = json.loads(drain.read_line())
        assert (first["state"], first["messages"]) == ("draining", 3000)
        assert first["left"] == [
            {"topic": "t", "channel": "c", "depth": 3000, "in_flight": 0, "deferred": 0, "clients": 0}
        ]
        assert here("tail", "t/c", "-n", "3000").out.count(b"\n") == 3000
        result = drain.end()
    assert result.code == 0
    last = result.records[-1]
    assert (last["broker"], last["state"], last["messages"], last["left"]) == (
        source.http_address, "empty", 0, [],
    )  # fmt: skip


def test_dead_letters_count(here: Cli, source: Broker) -> None:
    source.create("t", "c")
    source.put(
        "/channel/settings", b'{"max_attempts": 1, "dead_letter_topic": "dead"}', topic="t", channel="c"
    )
    source.post("/pub", b"body", topic="t")
    fail_messages(source.tcp_address, "t", "c", 1)
    result = here("drain", "--timeout", "1s")
    assert result.code == 4
    assert "dead/dead-letters" in result.out.decode()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_broker_draining(here: Cli, source: Broker, which: signal.Signals) -> None:
    source.post("/pub", b"1", topic="t")
    with here.running("drain") as drain:
        drain.hear_line()
        drain.process.send_signal(which)
        result = drain.end()
    assert result.code == 128 + which
    assert result.err == (
        f"{source.http_address} still drains: it refuses publishes. Continue with the same command, or end it with "
        "'qcli drain --stop'.\n"
    )
    assert draining(source)


def test_status_line_on_a_terminal(here: Cli, source: Broker) -> None:
    source.create("t", "c")
    source.post("/pub", b"1", topic="t")
    with here.on_terminal("drain", "--timeout", "2s", columns=80) as terminal:
        terminal.expect(b" message left; no consumer: t/c (1)")
        assert terminal.end() == 4
    assert max(map(len, re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.shown).split(b"\r"))) < 400


def test_nsqd_cannot_drain(tmp_path: Path, run_here: Run) -> None:
    with nsqd(tmp_path / "nsqd") as broker:
        qcli = CliHere(broker.tcp_address, broker.http_address, run=run_here)
        for arguments in (["drain"], ["drain", "--stop"], ["undrain"]):
            result = qcli(*arguments)
            assert result.code == 1
            assert f"The broker at {broker.http_address} cannot drain: it is an nsqd" in result.err
            assert (
                "Instead, have producers publish to another broker, and stop it when 'qcli stat" in result.err
            )


# ---------------------------------------------------------------------- moving


def test_everything_is_moved(here: Cli, source: Broker, target: Broker) -> None:
    source.create("t", "c", "d")
    here.publish("t", [b"%04d" % n for n in range(3000)])
    source.post("/pub", b"later", topic="t", defer=3_600_000)
    source.post("/pub", b"alone", topic="alone")
    result = here("drain", "--move-to", target.http_address, "--quiet")
    assert (result.code, result.out, result.err) == (0, b"", "")
    for channel in "cd":
        assert bodies(target, "t", channel) == [f"{n:04}" for n in range(3000)] + ["later"]
        assert bodies(source, "t", channel) == []
    target.create("alone", "x")
    assert bodies(target, "alone", "x") == ["alone"]
    again = here("drain", "--move-to", target.http_address)
    assert again.err == (
        f"0 messages moved to {target.http_address}. {source.http_address} is empty, and still refuses publishes: it "
        "can be stopped.\n"
    )


def test_messages_larger_than_a_batch_of_the_target(tmp_path: Path, here: Cli, source: Broker) -> None:
    source.create("t", "c")
    here.publish("t", [b"x" * 20_000] * 100)
    with qcli_serve(tmp_path / "small", "--max-body-size=100000", "--max-msg-size=50000") as small:
        assert here("drain", "--move-to", small.http_address).code == 0
        assert len(bodies(small, "t", "c")) == 100
    here("drain", "--stop")
    here.publish("t", [b"x" * 20_000])
    with qcli_serve(tmp_path / "smaller", "--max-msg-size=10000") as smaller:
        result = here("drain", "--move-to", smaller.http_address)
        assert result.code == 4
        assert "MSG_TOO_BIG: --max-msg-size is 10000" in result.err
        assert "Nothing is lost: continue with the same command, or end the move with" in result.err
        assert here("undrain").code == 0
    assert len(bodies(source, "t", "c")) == 1


def test_messages_in_flight_are_waited_for(here: Cli, source: Broker, target: Broker) -> None:
    source.create("t", "c")
    for n in range(5):
        source.post("/pub", b"body %d" % n, topic="t")
    with receive(source, "t/c", 2):
        result = here("drain", "--move-to", target.http_address, "--timeout", "300ms", "--format", "json")
        assert result.code == 4
        assert re.search(r"t/c: 2 in flight to worker-1 at 127\.0\.0\.1:\d+\. ", result.err)
        assert "The move of t is not complete: the channels deliver nothing until it is." in result.err
        last = result.records[-1]
        assert (last["state"], last["messages"]) == ("timeout", 5)
        assert last["waits_for"].startswith("t/c: 2 in flight to worker-1")
    assert here("drain", "--move-to", target.http_address).code == 0
    assert sorted(bodies(target, "t", "c")) == [f"body {n}" for n in range(5)]


def test_a_move_can_be_ended(here: Cli, source: Broker, target: Broker) -> None:
    source.create("t", "c")
    source.post("/pub", b"body", topic="t")
    with receive(source, "t/c", 1):
        assert here("drain", "--move-to", target.http_address, "--timeout", "100ms").code == 4
        result = here("drain", "--stop")
        assert result.code == 0
        assert result.err.startswith("t: the move has ended; what was not moved is delivered here.\n")
    assert bodies(source, "t", "c") == ["body"]
    assert source.channel_stats("t", "c")["paused"] is False


def test_a_move_whose_target_is_gone_is_ended_by_force(tmp_path: Path, here: Cli, source: Broker) -> None:
    source.create("t", "c")
    source.post("/pub", b"body", topic="t")
    with qcli_serve(tmp_path / "gone") as gone, receive(source, "t/c", 1):
        assert here("drain", "--move-to", gone.http_address, "--timeout", "100ms").code == 4
    result = here("drain", "--stop")
    assert result.code == 4
    assert f"Topic t is being moved to {gone.http_address}, which has to say what it has" in result.err
    assert draining(source)
    assert here("drain", "--stop", "--force").code == 0
    assert bodies(source, "t", "c") == ["body"]


def test_another_target_is_refused_during_a_move(
    tmp_path: Path, here: Cli, source: Broker, target: Broker
) -> None:
    source.create("t", "c")
    source.post("/pub", b"body", topic="t")
    with qcli_serve(tmp_path / "other") as other, receive(source, "t/c", 1):
        assert here("drain", "--move-to", target.http_address, "--timeout", "100ms").code == 4
        result = here("drain", "--move-to", other.http_address)
        assert result.code in (1, 4)
        assert f"topic t is being moved to {target.http_address}" in result.err


def test_a_target_that_was_restored_from_a_backup_is_named(here: Cli, source: Broker, target: Broker) -> None:
    """The messages that it has lost are no longer on the source: the user must know."""
    source.create("t", "c")
    target.create("t", "c")
    for n in range(3):
        source.post("/pub", b"%d" % n, topic="t")
    source.put("/config/draining", b"true")
    move = json.loads(source.http("POST", "/topic/move/begin", topic="t", to=target.http_address))
    (producer,) = [each["producer"] for each in move["streams"] if each["channel"] == "c"]
    following = {"topic": "t", "channel": "c", "move": move["move"], "max_bytes": 1}
    target.post(
        "/topic/move/store",
        source.http("POST", "/topic/move/next", **following),
        topic="t",
        producer=producer,
    )
    # The target has lost the second message.
    source.http("POST", "/topic/move/next", **following, moved=1)
    result = here("drain", "--move-to", target.http_address)
    assert result.code == 4
    assert f"{target.http_address} had more messages of t/c than it has now" in result.err
    assert here("drain", "--move-to", target.http_address, "--force").code == 0
    assert bodies(target, "t", "c") == ["0", "2"]


def test_a_topic_that_takes_few_messages_at_once_gets_small_batches(
    here: Cli, source: Broker, target: Broker
) -> None:
    source.create("t", "c")
    here.publish("t", [b"%03d" % n for n in range(500)])
    target.create("t", "c")
    target.put("/topic/settings", b'{"max_messages": 20, "when_full": "reject"}', topic="t")
    there = Cli(target.tcp_address, target.http_address)
    with there.running("tail", "t/c", "-n", "500") as tail:
        assert here("drain", "--move-to", target.http_address).code == 0
        out, _ = tail.process.communicate()
    assert sorted(out.split()) == [b"%03d" % n for n in range(500)]


class Forwarder(ThreadingHTTPServer):
    """Forwards requests to a broker; `before` is called with each path, and returns whether to lose the request."""

    def __init__(self, broker: Broker, before: Callable[[str], bool]) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarding)
        self.broker = broker
        self.before = before
        self.answers: dict[str, bytes] = {}  # instead of the broker's, by path
        self.address = "127.0.0.1:%d" % self.server_address[1]


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Forwarder

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.server.before(self.path.partition("?")[0]):
            self.close_connection = True
            return
        wrong = self.server.answers.get(self.path.partition("?")[0])
        if wrong is not None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(wrong)))
            self.end_headers()
            self.wfile.write(wrong)
            return
        connection = HTTPConnection(self.server.broker.http_address)
        connection.request(self.command, self.path, body)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.startswith("NSQ-"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = forward

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@contextmanager
def forwarding(broker: Broker, before: Callable[[str], bool]) -> Iterator[Forwarder]:
    """Run a `Forwarder`."""
    with Forwarder(broker, before) as forwarder:
        thread = threading.Thread(target=forwarder.serve_forever)
        thread.start()
        try:
            yield forwarder
        finally:
            forwarder.shutdown()
            thread.join()


def test_the_patience_begins_at_an_error_not_at_the_last_progress(
    run_here: Run, source: Broker, target: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move that has waited for a consumer for a long time survives a restart, as any other."""
    monkeypatch.setattr("qcli.commands.drain.move.PATIENCE_S", 1.0)
    source.create("t", "c")
    source.post("/pub", b"body", topic="t")
    seen: list[str] = []
    with receive(source, "t/c", 1) as consumer:

        def before(path: str) -> bool:
            seen.append(path)
            if seen.count("/topic/move/next") < 5:  # twice the patience
                return False
            consumer.close()
            return path == "/topic/move/next" and seen.count(path) == 5

        with forwarding(source, before) as forwarder:
            through = CliHere(source.tcp_address, forwarder.address, run=run_here)
            result = through("drain", "--move-to", target.http_address)
    assert result.code == 0, result.err
    assert bodies(target, "t", "c") == ["body"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/topic/move/store", b"{}"),
        ("/topic/move/store", b"[]"),
        ("/topic/move/store", b'{"number": "1"}'),
        ("/topic/move/store", b'{"number": null}'),
        ("/topic/move/begin", b"null"),
        ("/stats", b'{"topics": [{}]}'),
        ("/stats", b'{"topics": [{"topic_name": "t", "depth": "x", "message_count": 1, "channels": []}]}'),
        ("/topic/move/begin", b'{"move": "m", "to": "x", "began_ns": 1, "streams": [{"channel": "c"}]}'),
    ],
)
def test_wrong_answers_lose_nothing(
    run_here: Run, source: Broker, target: Broker, path: str, wrong: bytes
) -> None:
    """Above all, the source keeps its messages unless the target confirms that it has them."""
    source.create("t", "c")
    for n in range(3):
        source.post("/pub", b"%d" % n, topic="t")
    with (
        forwarding(source, lambda _: False) as giving,
        forwarding(target, lambda _: False) as taking,
    ):
        (taking if path == "/topic/move/store" else giving).answers[path] = wrong
        result = CliHere(source.tcp_address, giving.address, run=run_here)(
            "drain", "--move-to", taking.address
        )
    assert result.code in (3, 4)
    assert result.err.count("Error: ") == 1
    assert len(bodies(source, "t", "c")) == 3


def test_a_restart_between_two_topics_ends_no_move(tmp_path: Path, run_here: Run, target: Broker) -> None:
    """A restart ends the drain mode: the command switches it on again."""
    with ExitStack() as lives:
        source = lives.enter_context(qcli_serve(tmp_path / "restarted"))
        for topic in "ab":
            source.create(topic, "c")
            source.post("/pub", b"body", topic=topic)
        started = json.loads(source.http("GET", "/stats", format="json"))["start_time"]
        seen: list[str] = []

        def before(path: str) -> bool:
            seen.append(path)
            if path == "/topic/move/begin" and seen.count(path) == 2:
                lives.close()
                while int(time.time()) <= started:  # until another second
                    pass
                forwarder.broker = lives.enter_context(qcli_serve(tmp_path / "restarted"))
            return False

        with forwarding(source, before) as forwarder:
            through = CliHere(source.tcp_address, forwarder.address, run=run_here)
            result = through("drain", "--move-to", target.http_address)
        assert result.code == 0, result.err
    assert [bodies(target, topic, "c") for topic in "ab"] == [["body"], ["body"]]


def test_the_broker_itself_an_nsqd_and_a_draining_broker_are_no_targets(
    tmp_path: Path, here: Cli, source: Broker, target: Broker
) -> None:
    port = source.http_address.rpartition(":")[2]
    result = here("drain", "--move-to", f"localhost:{port}")
    assert (result.code, result.err) == (
        1,
        f"Error: localhost:{port} is the broker that drains. Name another one: --move-to.\n",
    )
    target.put("/config/draining", b"true")
    result = here("drain", "--move-to", target.http_address)
    assert (result.code, result.err) == (
        1,
        f"Error: {target.http_address} drains too: it accepts no messages. Name another broker: --move-to.\n",
    )
    with nsqd(tmp_path / "nsqd") as peer:
        result = here("drain", "--move-to", peer.http_address)
        assert result.code == 1
        assert f"The broker at {peer.http_address} cannot move messages: it is an nsqd" in result.err
    assert here("drain", "--move-to", "127.0.0.1:1").code == 3
    assert not draining(source)


def test_ephemeral_channels_are_named(here: Cli, source: Broker, target: Broker) -> None:
    source.create("t", "e#ephemeral")
    source.post("/pub", b"1", topic="t")
    result = here("drain", "--move-to", target.http_address)
    assert result.code == 0
    assert "are not moved; their messages are lost when the broker stops: t/e#ephemeral (1)." in result.err


def test_secrets_of_both_brokers(tmp_path: Path, run_here: Run) -> None:
    files = {}
    for name in ("source", "target"):
        files[name] = tmp_path / f"{name}.toml"
    made = CliHere("127.0.0.1:1", "127.0.0.1:1", run=run_here)
    tokens = {}
    for name, roles in (("source", "admin,manage,read,publish"), ("target", "manage,publish")):
        added = made("token", "create", "mover", "--auth-file", str(files[name]), "--role", roles)
        assert added.code == 0, added.err
        tokens[name] = tmp_path / f"{name}.token"
        tokens[name].write_bytes(added.out)
        tokens[name].chmod(0o600)
    with (
        qcli_serve(tmp_path / "a", f"--auth-file={files['source']}") as a,
        qcli_serve(tmp_path / "b", f"--auth-file={files['target']}") as b,
    ):
        qcli = CliHere(a.tcp_address, a.http_address, run=run_here)
        secret = ("--auth-secret-file", str(tokens["source"]))
        assert qcli("topic", "create", "t", *secret).code == 0
        assert qcli("channel", "create", "t/c", *secret).code == 0
        assert qcli("pub", "t", *secret, stdin=b"1\n2\n").code == 0
        refused = qcli("drain", "--move-to", b.http_address, *secret)
        assert refused.code == 1
        assert f"{b.http_address} rejected your secret" in refused.err
        moved = qcli(
            "drain", "--move-to", b.http_address, *secret, "--move-to-auth-secret-file", str(tokens["target"])
        )
        assert (moved.code, moved.err.splitlines()[-1]) == (
            0,
            f"2 messages moved to {b.http_address}. {a.http_address} is empty, and still refuses publishes: it can be "
            "stopped.",
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stop", "--move-to", "x:1"],
        ["--stop", "--timeout", "1s"],
        ["--force"],
        ["--move-to-auth-secret-file", "x"],
        ["--move-to", "x"],
        ["--nsqd-http-address", "a:1,b:1"],
    ],
)
def test_wrong_command_lines(nowhere: Cli, arguments: list[str]) -> None:
    assert nowhere("drain", *arguments).code == 2
