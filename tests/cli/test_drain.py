"""Tests for `qcli drain`: progress and ends, moving to another broker, refusals."""

import json
import re
import signal
import socket
from collections.abc import Iterator
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


def test_empty_broker(here: Cli, source: Broker) -> None:
    result = here("drain")
    assert (result.code, result.out) == (0, b"")
    assert result.err == f"{source.http_address} is empty, and still refuses publishes: it can be stopped.\n"
    assert draining(source)
    stopped = here("drain", "--stop")
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
        terminal.expect(b"messages left; no consumer: t/c (1)")
        assert terminal.end() == 4
    assert max(map(len, re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.shown).split(b"\r"))) < 400


def test_nsqd_cannot_drain(tmp_path: Path, run_here: Run) -> None:
    with nsqd(tmp_path / "nsqd") as broker:
        qcli = CliHere(broker.tcp_address, broker.http_address, run=run_here)
        for arguments in (["drain"], ["drain", "--stop"]):
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
        assert here("drain", "--stop").code == 0
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
