"""Tests for `qcli tail` with --from and --to, which read the topic's log."""

import base64
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from broker.letters import ORIGIN
from broker.state import damage
from cli.support import Cli, Run, does_not_exist, lines, only_ours, without_suggestion
from interop.peers import Broker, nsqd, qcli_serve
from soak import examples
from trio_nsq.client.reading.log_stream import is_for_all_channels
from trio_nsq.log import RecordBatch
from trio_nsq.log.record_metadata import (
    metadata_for_channel,
    metadata_for_dead_letters,
)
from trio_nsq.protocol import pack_messages

pytestmark = only_ours


def fill(qcli: Cli, topic: str, count: int, start: int = 0) -> list[bytes]:
    """Publish messages whose bodies are their sequences."""
    bodies = [b"%d" % number for number in range(start, start + count)]
    qcli.publish(topic, bodies, at_once=7)
    return bodies


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--from", "earliest", "--to", "latest"], range(100)),
        (["--since", "1h", "--until", "latest"], range(100)),
        (["--to", "latest"], range(100)),
        (["--from", "40", "--to", "60"], range(40, 60)),
        (["--from", "95", "--until", "500"], range(95, 100)),
        (["--since", "1970-01-01T00:00Z", "-n", "13"], range(13)),
        (["--from", "97", "-n", "2"], [97, 98]),
        (["--from", "0", "-n", "100"], range(100)),
    ],
)
def test_range_of_sequences(qcli: Cli, topic: str, args: list[str], expected: range | list[int]) -> None:
    fill(qcli, topic, 100)
    result = qcli("tail", topic, *args)
    assert (result.code, result.err) == (0, "")
    assert result.out == lines([b"%d" % number for number in expected])


@pytest.mark.parametrize("command", ["tail", "replay"])
@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--until", "1h"], "it begins and ends at message 0"),
        (["--from", "2", "--to", "2"], "it begins and ends at message 2"),
        (["--from", "latest", "--to", "1"], "it begins and ends at message 3"),
        (["--from", "8", "--to", "9"], "there is no message 8 yet, the newest message is 2"),
        (["--since", "2100-01-01", "--to", "latest"], "--from is in the future"),
    ],
)
def test_empty_log_is_explained(
    qcli: Cli, run_here: Run, broker: Broker, topic: str, command: str, args: list[str], why: str
) -> None:
    broker.post("/mpub", b"0\n1\n2", topic=topic)
    names = [topic] if command == "tail" else [topic, f"{topic}.again", "-q"]
    result = run_here(qcli, command, *names, *args)
    assert (result.code, result.out) == (0, b"")
    assert result.err == f"Note: {topic}: the range is empty: {why}.\n"


@pytest.mark.parametrize(
    ("first", "end"), [("20", "10"), ("1h", "2h"), ("2026-11-21", "2026-11-20"), ("@5", "@4.5")]
)
@pytest.mark.parametrize("command", [("tail", "t"), ("replay", "t", "other")], ids=lambda words: words[0])
def test_range_that_ends_before_it_begins(
    nowhere: Cli, run_here: Run, command: tuple[str, ...], first: str, end: str
) -> None:
    result = run_here(nowhere, *command, "--from", first, "--to", end)
    assert result.code == 2
    assert "--from is after --to" in result.err


@pytest.mark.parametrize(
    ("first", "why"),
    [("8", "there is no message 8 yet, the newest message is 1"), ("2100-01-01", "--from is in the future")],
)
def test_wait_for_new_messages(
    qcli: Cli, run_here: Run, broker: Broker, topic: str, first: str, why: str
) -> None:
    broker.post("/mpub", b"0\n1", topic=topic)
    result = run_here(qcli, "tail", topic, "--from", first, "--idle-timeout", "1ms")
    assert (result.code, result.out) == (0, b"")
    assert result.err == f"Note: {topic}: {why}; reading new messages.\n"


def test_old_messages_then_new_ones(qcli: Cli, broker: Broker, topic: str) -> None:
    """There is no gap and no duplicate between old and new messages, and no channel is created."""
    bodies = fill(qcli, topic, 500)
    with qcli.running("tail", topic, "--since", "1h") as tail:
        assert tail.read(len(lines(bodies))) == lines(bodies)
        for start in range(500, 1000, 100):
            more = fill(qcli, topic, 100, start)
            assert tail.read(len(lines(more))) == lines(more)
        tail.process.send_signal(signal.SIGINT)
        result = tail.end()
    assert (result.code, result.out, result.err) == (130, b"", "")
    stats = json.loads(broker.http("GET", "/stats", format="json", topic=topic))
    assert stats["topics"][0]["channels"] == []


def test_read_during_constant_publishing(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 1)
    count = 1 + examples(20_000)
    with qcli.running("tail", topic, "--from", "0", "-n", str(count)) as tail:
        with qcli.running("pub", topic, "-q", "--batch-size", "50") as pub:
            pub.write(lines([b"%d" % number for number in range(1, count)]))
            assert pub.end().code == 0
        assert tail.end().out == lines([b"%d" % number for number in range(count)])


@pytest.mark.parametrize(
    ("args", "out"),
    [
        ([], b"a\nb c\n"),
        (["--null"], b"a\0b c\0"),
        (["-d", r"\t--\n"], b"a\t--\nb c\t--\n"),
        (["--print-topic"], b"{topic} | a\n{topic} | b c\n"),
    ],
)
def test_delimiters(qcli: Cli, topic: str, args: list[str], out: bytes) -> None:
    qcli("pub", topic, stdin=b"a\nb c\n")
    result = qcli("tail", topic, "--to", "latest", *args)
    assert result.out == out.replace(b"{topic}", topic.encode())


def test_json(qcli: Cli, topic: str) -> None:
    qcli("pub", topic, "--null", stdin='plain\0"quoted"\nä\u2028\0'.encode() + b"\xff")
    qcli("pub", topic, "--defer", "1h", stdin=b"later")
    records = qcli("tail", topic, "--to", "latest", "--format", "json").records
    assert [list(record)[:8] for record in records] == [
        ["topic", "id", "timestamp_ns", "timestamp", "attempts", "sequence", "due_ns", "due"]
    ] * 4
    assert [record.get("body") for record in records] == ["plain", '"quoted"\nä\u2028', None, "later"]
    assert base64.b64decode(records[2]["body_base64"]) == b"\xff"
    assert [record["sequence"] for record in records] == [0, 1, 2, 3]
    assert [record["due_ns"] is None for record in records] == [True, True, True, False]
    live = qcli("tail", f"{topic}/c", "-n", "3", "--format", "json").records
    for record, known in zip(live, records, strict=False):
        assert {key: record[key] for key in ("topic", "id", "timestamp_ns")} == {
            key: known[key] for key in ("topic", "id", "timestamp_ns")
        }


def test_several_topics(qcli: Cli, topic: str) -> None:
    for letter in "ab":
        fill(qcli, f"{topic}.{letter}", 50)
    result = qcli("tail", f"{topic}.a", f"{topic}.b", "--to", "latest", "--print-topic")
    assert result.code == 0
    for letter in "ab":
        prefix = f"{topic}.{letter} | ".encode()
        found = [line.removeprefix(prefix) for line in result.out.splitlines() if line.startswith(prefix)]
        assert found == [b"%d" % number for number in range(50)]
    assert len(qcli("tail", f"{topic}.a", f"{topic}.b", "--from", "0", "-n", "70").out.splitlines()) == 70


def test_idle_timeout(qcli: Cli, topic: str) -> None:
    bodies = fill(qcli, topic, 30)
    begun = time.monotonic()
    result = qcli("tail", topic, "--from", "10", "--idle-timeout", "1s")
    assert (result.code, result.out) == (0, lines(bodies[10:]))
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize(
    ("metadata", "due_ns", "expected"),
    [
        (b"", 0, True),
        (b"", 5, True),
        (metadata_for_channel("c"), 5, False),
        (
            metadata_for_dead_letters([ORIGIN]),
            0,
            True,
        ),
    ],
)
def test_copies_for_one_channel_are_left_out(metadata: bytes, due_ns: int, expected: bool) -> None:
    """A copy was published to the topic before."""
    assert is_for_all_channels(RecordBatch(0, 1, 1, due_ns, pack_messages([b"a"]), metadata)) is expected


# ---------------------------------------------------------------------- missing messages


def test_damage_is_skipped_and_reported(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        for start in (0, 7, 14):
            fill(Cli(broker.tcp_address, broker.http_address), "t", 7, start)
    damage(tmp_path / "data" / "topics" / "t.topic", b"10")
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        result = qcli("tail", "t", "--to", "latest")
        assert result.code == 5
        assert result.out == lines([b"%d" % number for number in (*range(7), *range(14, 21))])
        assert result.err == "Damage: t: messages 7 to 13 are damaged or missing in the log; skipped.\n"
        assert qcli("tail", "t", "--from", "14", "--to", "latest").code == 0


def test_deleted_messages_are_reported(tmp_path: Path, run_here: Run) -> None:
    with qcli_serve(tmp_path / "data", "--mem-queue-size=5") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        for number in range(10):
            broker.post("/pub", b"%d" % number, topic="t#ephemeral")
        result = qcli("tail", "t#ephemeral", "--from", "2", "--to", "latest")
        assert (result.code, result.out) == (0, b"5\n6\n7\n8\n9\n")
        assert result.err == "Note: t#ephemeral: messages 2 to 4 are no longer retained.\n"
        result = run_here(qcli, "tail", "t#ephemeral", "--from", "1", "--to", "3")
        assert (result.code, result.out) == (0, b"")
        assert result.err == "Note: t#ephemeral: messages 1 to 2 are no longer retained.\n"
        result = run_here(qcli, "replay", "t#ephemeral", "other", "--from", "1", "--to", "7", "-q")
        assert result.err == "Note: t#ephemeral: messages 1 to 4 are no longer retained.\n"
        result = qcli("tail", "t#ephemeral", "--since", "1h", "--to", "latest")
        assert (result.code, result.out) == (0, b"5\n6\n7\n8\n9\n")
        assert result.err == "Note: t#ephemeral: the oldest retained message is 5.\n"
        assert qcli("tail", "t#ephemeral", "--from", "earliest", "--to", "latest").err == ""


# ---------------------------------------------------------------------- brokers that come and go, pipes


def test_broker_goes_down_and_is_retried(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        fill(qcli, "t", 3)
        with qcli.running("tail", "t", "--since", "1h") as tail:
            assert tail.read(6) == b"0\n1\n2\n"
            broker.process.terminate()
            assert broker.process.wait(30) == 0
            assert tail.hear_line().startswith(f"Warning: lost the connection to {broker.http_address}: ")
            with qcli_serve(
                tmp_path / "data",
                f"--tcp-address={broker.tcp_address}",
                f"--http-address={broker.http_address}",
            ):
                fill(qcli, "t", 3, 3)
                assert tail.read(6) == b"3\n4\n5\n"
                assert tail.hear_line() == f"Note: connected to {broker.http_address}\n"
            tail.process.send_signal(signal.SIGTERM)
            assert tail.process.wait(30) == 143


def test_blocked_reader_of_the_pipe_is_awaited(qcli: Cli, topic: str) -> None:
    body = b"x" * 1000
    qcli.publish(topic, [body] * 20_000)
    with qcli.running("tail", topic, "--from", "0", "-n", "20000") as tail:
        assert tail.read(1001) == body + b"\n"
        time_to_fill = time.monotonic() + 1
        while time.monotonic() < time_to_fill:
            qcli("peek", topic, "-n", "1")  # meanwhile other clients are served
        assert tail.end().out == lines([body] * 19_999)


def test_closed_pipe_is_a_silent_success(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 1)
    with (
        qcli.running("tail", topic, "--from", "0") as tail,
        subprocess.Popen(["head", "-1"], stdin=tail.process.stdout, stdout=subprocess.PIPE) as head,
    ):
        assert head.communicate(timeout=30)[0] == b"0\n"
        assert tail.process.stdout is not None
        tail.process.stdout.close()
        assert tail.process.wait(30) == 0
        assert tail.process.stderr is not None
        assert tail.process.stderr.read() == b""


def test_full_disk(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 1)
    with (
        open("/dev/full", "wb") as full,
        qcli.running("tail", topic, "--from", "0", stdout=full.fileno()) as tail,
    ):
        assert tail.process.wait(30) == 1
        assert tail.hear_line() == "Error: Cannot write to standard output: No space left on device.\n"


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["t/c", "--since", "1h"], "--from and --to read a topic's log: leave '/c' out, or see 'qcli channel seek'."),
        (["t", "--from", "0", "--max-in-flight", "5"], "--max-in-flight is for channels: nothing is in flight with "
         "--from and --to."),
        (["t", "--from", "1x"], "Invalid value for '--from' / '--since': '1x' is neither a sequence such as 1000, nor "
         "a time such as 2026-11-21T04:14 or @1700000000.5 (Unix seconds), nor a time ago such as 15m, nor earliest "
         "or latest."),
    ],
)  # fmt: skip
def test_usage_errors(nowhere: Cli, args: list[str], error: str) -> None:
    result = nowhere("tail", *args)
    assert (result.code, result.out) == (2, b"")
    assert result.err.splitlines()[-1] == f"Error: {error}"


def test_missing_topic(qcli: Cli, topic: str) -> None:
    result = qcli("tail", topic, "--since", "1h")
    assert (result.code, without_suggestion(result.err)) == (1, does_not_exist(topic, qcli.http_address))


def test_deleted_topic(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 1)
    with qcli.running("tail", topic, "--from", "0") as tail:
        assert tail.read(2) == b"0\n"
        qcli("topic", "delete", "--yes", topic)
        result = tail.end()
    assert (result.code, without_suggestion(result.err)) == (1, does_not_exist(topic, qcli.http_address))


def test_no_broker(nowhere: Cli) -> None:
    result = nowhere("tail", "clicks", "--since", "1h")
    assert result.code == 3
    assert result.err.startswith("Error: No broker answers at 127.0.0.1:1: connection refused. ")
    assert "--nsqd-http-address" in result.err


def test_nsqd_is_refused(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        qcli("topic", "create", "t")
        result = qcli("tail", "t", "--since", "1h")
        assert (result.code, result.err) == (
            1,
            f"Error: The broker at {broker.http_address} cannot be read by sequence or time: it is an nsqd, or an "
            "older 'qcli serve'.\n",
        )
