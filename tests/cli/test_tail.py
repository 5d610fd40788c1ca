"""Tests for `qcli tail`."""

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli, lines, only_ours
from interop.peers import Broker, nsqd, qcli_serve
from trio_nsq.protocol.message_json import rfc3339


def fill(qcli: Cli, topic: str, count: int) -> list[bytes]:
    """Publish this many different messages; return them."""
    bodies = [b"%d" % number for number in range(count)]
    qcli.publish(topic, bodies)
    return bodies


@pytest.mark.parametrize("count", [1, 7, 300, 2999])
def test_n_writes_exactly_n_and_returns_what_it_prefetched(
    qcli: Cli, broker: Broker, topic: str, count: int
) -> None:
    broker.create(topic, "c")
    bodies = fill(qcli, topic, 3000)
    result = qcli("tail", f"{topic}/c", "-n", str(count))
    assert (result.code, result.err) == (0, "")
    assert result.out == lines(bodies[:count])
    stats = broker.channel_stats(topic, "c")
    assert (stats["in_flight_count"], stats["depth"], stats["client_count"]) == (0, 3000 - count, 0)
    rest = qcli("tail", f"{topic}/c", "-n", str(3000 - count)).out.splitlines()
    assert sorted(rest) == sorted(bodies[count:])


def test_n_counts_all_topics_together(qcli: Cli, broker: Broker, topic: str) -> None:
    topics = [f"{topic}.{letter}" for letter in "abc"]
    for each in topics:
        broker.create(each, "c")
        fill(qcli, each, 100)
    result = qcli("tail", *(f"{each}/c" for each in topics), "-n", "150")
    assert len(result.out.splitlines()) == 150
    stats = [broker.channel_stats(each, "c") for each in topics]
    assert sum(each["depth"] for each in stats) == 150
    assert sum(each["in_flight_count"] for each in stats) == 0


def test_without_a_channel_other_channels_keep_their_messages(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "archive")
    with qcli.running("tail", topic, "-n", "2") as tail:
        private = qcli.wait_until(topic, lambda record: record["channel"] not in (None, "archive"))["channel"]
        assert private.startswith("tail")
        assert private.endswith("#ephemeral")
        assert private[4:10].isdigit()
        fill(qcli, topic, 2)
        assert tail.end().out == b"0\n1\n"
    assert broker.channel_stats(topic, "archive")["depth"] == 2
    assert private not in qcli("stat", topic).out.decode()  # deleted with its connection


@only_ours
def test_without_a_channel_a_backlog_stays(qcli: Cli, broker: Broker, topic: str) -> None:
    backlog = fill(qcli, topic, 3)
    with qcli.running("tail", topic, "-n", "1") as tail:
        qcli.wait_until(topic, lambda record: str(record["channel"]).startswith("tail"))
        qcli.publish(topic, [b"new"])
        result = tail.end()
    assert (result.code, result.out, result.err) == (0, b"new\n", "")
    assert qcli("tail", f"{topic}/archive", "-n", "4").out == lines([*backlog, b"new"])


def test_nsqd_without_a_channel_needs_permission_to_take_a_backlog(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        backlog = fill(qcli, "t", 3)
        refused = qcli("tail", "t", "-n", "1")
        assert (refused.code, refused.out) == (2, b"")
        assert refused.err.startswith(
            f"Error: Topic t has no durable channel on {broker.tcp_address}, which has no private"
        )
        assert "--take-backlog" in refused.err
        unknown = qcli("tail", "t", "-n", "1", "--nsqd-http-address", "127.0.0.1:1")
        assert (unknown.code, unknown.out) == (2, b"")
        assert "its HTTP address, which could tell whether t has a channel, is not known" in unknown.err
        with nsqd(tmp_path / "other") as other:
            other.create("t", "c")
            assert qcli("tail", "t", "--nsqd-http-address", other.http_address).code == 2
        assert [topic["depth"] for topic in stats_of(broker, "t")] == [3]
        taken = qcli("tail", "t", "-n", "3", "--take-backlog")
        assert (taken.code, taken.out) == (0, lines(backlog))
        assert taken.err.startswith(
            f"Warning: the broker at {broker.tcp_address} has no private channels: tail"
        )


def test_ephemeral_channel_of_nsqd_does_not_protect_a_backlog(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "other#ephemeral")
        refused = qcli("tail", "t", "-n", "1")
        assert (refused.code, refused.out) == (2, b"")
        assert refused.err.startswith(f"Error: Topic t has no durable channel on {broker.tcp_address}")
        assert (
            broker.channel_stats("t", "other#ephemeral")["depth"] == 0
        )  # the topic still has no other channel


def test_new_channel_of_nsqd_gets_a_copy_with_a_note(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "archive")
        with qcli.running("tail", "t", "-n", "1") as tail:
            assert "is an ordinary channel" in tail.hear_line()
            qcli.wait_until("t", lambda record: str(record["channel"]).startswith("tail"))
            fill(qcli, "t", 1)
            assert tail.end().out == b"0\n"
        assert broker.channel_stats("t", "archive")["depth"] == 1


def stats_of(broker: Broker, topic: str) -> list[dict[str, Any]]:
    """Return the entry of a topic in /stats."""
    found: list[dict[str, Any]] = json.loads(broker.http("GET", "/stats", format="json", topic=topic))[
        "topics"
    ]
    return found


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
    result = qcli("tail", f"{topic}/c", "-n", "2", *args)
    assert result.out == out.replace(b"{topic}", topic.encode())


def test_json(qcli: Cli, topic: str) -> None:
    begun_ns = time.time_ns()
    qcli("pub", topic, "--null", stdin='plain\0"quoted"\nä\u2028\0'.encode() + b"\xff\x00\xfe"[:1])
    records = qcli("tail", f"{topic}/c", "-n", "3", "--format", "json").records
    assert [record.get("body") for record in records] == ["plain", '"quoted"\nä\u2028', None]
    assert base64.b64decode(records[2]["body_base64"]) == b"\xff"
    for record in records:
        assert list(record)[:5] == ["topic", "id", "timestamp_ns", "timestamp", "attempts"]
        assert (record["topic"], record["attempts"], len(record["id"])) == (topic, 1, 16)
        assert begun_ns <= record["timestamp_ns"] <= time.time_ns()
        assert record["timestamp"] == rfc3339(record["timestamp_ns"])


def test_attempts_are_shown(qcli: Cli, broker: Broker, topic: str) -> None:
    """Messages that were received and not written are delivered again with more attempts."""
    broker.create(topic, "c")
    qcli.publish(topic, [b"a"])
    with full_pipe() as pipe, qcli.running("tail", f"{topic}/c", stdout=pipe) as tail:
        qcli.wait_until(f"{topic}/c", lambda record: record["in_flight_count"] == 1)
        tail.process.send_signal(signal.SIGINT)
        assert tail.process.wait(30) == 130
    (record,) = qcli("tail", f"{topic}/c", "-n", "1", "--format", "json").records
    assert (record["body"], record["attempts"]) == ("a", 2)


@contextmanager
def full_pipe() -> Iterator[int]:
    """Return the write end of a full pipe whose reader does not read."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"x" * 65536)
        except BlockingIOError:
            pass
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


def test_only_written_messages_are_finished(qcli: Cli, broker: Broker, topic: str) -> None:
    """If the reader stops reading, messages stay in flight. SIGTERM requeues them."""
    broker.create(topic, "c")
    body = b"x" * 1000
    qcli.publish(topic, [body] * 2000)
    with qcli.running("tail", f"{topic}/c") as tail:
        assert tail.read(1001) == body + b"\n"
        tail.process.send_signal(signal.SIGTERM)
        result = tail.end()
        written = 1 + result.out.count(b"\n")
    assert result.code == 143
    stats = broker.channel_stats(topic, "c")
    assert stats["in_flight_count"] == 0
    assert stats["depth"] >= 2000 - written


def test_sigint_requeues_messages_in_flight(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    with qcli.running("tail", f"{topic}/c") as tail:
        fill(qcli, topic, 10)
        assert tail.read(20) == lines([b"%d" % number for number in range(10)])
        tail.process.send_signal(signal.SIGINT)
        result = tail.end()
    assert (result.code, result.out, result.err) == (130, b"", "")
    stats = broker.channel_stats(topic, "c")
    assert (stats["in_flight_count"], stats["depth"]) == (0, 0)


def test_closed_pipe_is_a_silent_success(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 50_000)
    with (
        qcli.running("tail", f"{topic}/c") as tail,
        subprocess.Popen(["head", "-1"], stdin=tail.process.stdout, stdout=subprocess.PIPE) as head,
    ):
        assert head.communicate(timeout=30)[0] == b"0\n"
        assert tail.process.stdout is not None
        tail.process.stdout.close()
        assert tail.process.wait(30) == 0
        assert tail.process.stderr is not None
        assert tail.process.stderr.read() == b""
    stats = broker.channel_stats(topic, "c")
    assert stats["in_flight_count"] == 0
    assert 0 < stats["depth"] < 50_000


def test_closed_pipe_is_detected_without_messages(qcli: Cli, topic: str) -> None:
    """`tail t
    head -1` ends after one message.
    """
    with qcli.running("tail", f"{topic}/c") as tail:
        fill(qcli, topic, 1)
        assert tail.read(2) == b"0\n"
        assert tail.process.stdout is not None
        tail.process.stdout.close()
        assert tail.process.wait(30) == 0


def test_full_disk_is_an_error_and_finishes_nothing(qcli: Cli, broker: Broker, topic: str) -> None:
    qcli.publish(topic, [b"a", b"b"])
    with open("/dev/full", "wb") as full, qcli.running("tail", f"{topic}/c", stdout=full.fileno()) as tail:
        assert tail.process.wait(30) == 1
        assert tail.hear_line() == "Error: Cannot write to standard output: No space left on device.\n"
    stats = broker.channel_stats(topic, "c")
    assert (stats["in_flight_count"], stats["depth"]) == (0, 2)


def test_idle_timeout(qcli: Cli, topic: str) -> None:
    bodies = fill(qcli, topic, 1000)
    result = qcli("tail", f"{topic}/c", "--idle-timeout", "300ms")
    assert (result.code, result.out) == (0, lines(bodies))


def test_idle_timeout_starts_at_the_last_message(qcli: Cli, topic: str) -> None:
    with qcli.running("tail", f"{topic}/c", "--idle-timeout", "1s") as tail:
        begun = time.monotonic()
        fill(qcli, topic, 1)
        result = tail.end()
    assert (result.code, result.out) == (0, b"0\n")
    assert time.monotonic() - begun >= 1


def test_output_to_a_file(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = fill(qcli, topic, 10_000)
    with (tmp_path / "out").open("wb") as out:
        with qcli.running("tail", f"{topic}/c", "-n", "10000", stdout=out.fileno()) as tail:
            assert tail.process.wait(30) == 0
    assert (tmp_path / "out").read_bytes() == lines(bodies)


def test_no_broker(nowhere: Cli) -> None:
    result = nowhere("tail", "clicks")
    assert result.code == 3
    assert result.err.startswith("Error: No broker answers at 127.0.0.1:1: connection refused. ")
    assert result.err.count("\n") == 1


def test_server_that_is_not_a_broker(qcli: Cli) -> None:
    result = qcli("tail", "clicks", "--nsqd-tcp-address", qcli.http_address)
    assert result.code == 3
    assert result.err.count("\n") == 1


def test_broker_goes_down_and_is_retried(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        with qcli.running("tail", "t/c") as tail:
            fill(qcli, "t", 1)
            assert tail.read(2) == b"0\n"
            broker.process.terminate()
            assert broker.process.wait(30) == 0
            assert tail.hear_line().startswith(f"Warning: lost the connection to {broker.tcp_address}")
            with qcli_serve(tmp_path / "data", f"--tcp-address={broker.tcp_address}") as again:
                fill(Cli(again.tcp_address, again.http_address), "t", 1)
                assert tail.read(2) == b"0\n"
                while (heard := tail.hear_line()) != f"Note: connected to {broker.tcp_address}\n":
                    assert heard.startswith("Warning: could not connect")
            tail.process.send_signal(signal.SIGINT)
            assert tail.process.wait(30) == 130


def test_read_from_nsqd(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "c")
        bodies = fill(qcli, "t", 500)
        result = qcli("tail", "t/c", "-n", "100")
        assert result.code == 0
        stats = broker.channel_stats("t", "c")
        assert (stats["in_flight_count"], stats["depth"]) == (0, 400)
        rest = qcli("tail", "t/c", "-n", "400").out
        assert sorted((result.out + rest).splitlines()) == sorted(bodies)


def test_no_more_messages_are_taken_than_requested(qcli: Cli, broker: Broker, topic: str) -> None:
    """Each delivery counts as an attempt: with an attempts limit, taking more could lose messages."""
    broker.create(topic, "c")
    bodies = fill(qcli, topic, 20)
    for start in range(0, 18, 3):
        assert qcli("tail", f"{topic}/c", "-n", "3").out == lines(bodies[start : start + 3])
    assert broker.channel_stats(topic, "c")["requeue_count"] == 0


def test_prompt_after_ctrl_c_begins_a_line(qcli: Cli, topic: str) -> None:
    with qcli.on_terminal("tail", f"{topic}/c") as terminal:
        terminal.expect(b"Ctrl-C ends.\r\n")
        assert terminal.interrupt() == 130
    assert terminal.shown.endswith(b"\r\n\r\n")  # the terminal echoes ^C between them


def test_wait_is_reported_on_a_terminal(qcli: Cli, topic: str) -> None:
    with qcli.on_terminal("tail", f"{topic}/c", f"{topic}.more", "-n", "1") as terminal:
        terminal.expect(b"Waiting for messages of %s/c, %s.more; Ctrl-C ends.\r\n" % ((topic.encode(),) * 2))
        assert qcli("pub", topic, stdin=b"one\n").code == 0
        assert terminal.end() == 0
    assert terminal.shown.count(b"Waiting") == 1
    assert not terminal.shown.endswith(b"\r\n\r\n")
    assert qcli("tail", f"{topic}/c", "--idle-timeout", "10ms").err == ""
