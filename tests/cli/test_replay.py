"""Tests for `qcli replay` of a topic."""

import re
import signal
import time
from pathlib import Path

import pytest

from broker.state import damage
from cli.support import Cli, does_not_exist, lines, only_ours, without_suggestion
from interop.peers import Broker, nsqd, qcli_serve
from soak import in_soak

pytestmark = only_ours


def fill(qcli: Cli, topic: str, count: int, start: int = 0) -> list[bytes]:
    bodies = [b"%d" % number for number in range(start, start + count)]
    qcli.publish(topic, bodies)
    return bodies


def stored(qcli: Cli, topic: str) -> list[bytes]:
    """Return all messages in a topic's log."""
    return qcli("tail", topic, "--to", "latest").out.splitlines()


@pytest.mark.parametrize(
    ("args", "expected", "told"),
    [
        ([], range(50), "; sequences 0 to 49"),
        (["--from", "10", "--to", "20"], range(10, 20), "; sequences 10 to 19"),
        (["--since", "1h", "-n", "7"], range(7), "; sequences 0 to 6"),
        (["--match", "^[0-3]$"], range(4), "; sequences 0 to 49; 46 do not match"),
        (["--match", "7", "-n", "2"], [7, 17], "; sequences 0 to 17; 16 do not match"),
        (["--rate", "1000"], range(50), "; sequences 0 to 49"),
        (["--speed", "1000x"], range(50), "; sequences 0 to 49"),
    ],
)
def test_selection(qcli: Cli, topic: str, args: list[str], expected: range | list[int], told: str) -> None:
    fill(qcli, topic, 50)
    result = qcli("replay", topic, f"{topic}.copy", *args)
    assert (result.code, result.out) == (0, b"")
    count = len(expected)
    assert re.fullmatch(
        rf"{count} messages? \(\d+ B\) of {topic} published to {topic}.copy in [\d.]+ s: [\d.,]+ messages/s"
        rf"{re.escape(told)}\n",
        result.err,
    ), result.err
    assert stored(qcli, f"{topic}.copy") == [b"%d" % number for number in expected]


def test_topic_into_itself_ends(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 1000)
    assert qcli("replay", topic, topic, "-q").code == 0
    assert stored(qcli, topic) == [b"%d" % number for number in [*range(1000), *range(1000)]]
    assert broker.channel_stats(topic, "c")["depth"] == 2000


def test_bodies_are_unchanged(qcli: Cli, topic: str) -> None:
    odd = [bytes(range(1, 256)), b"\xff" * 1000, b"x" * 700_000, b"y" * 700_000]
    qcli("pub", topic, "-q", "--null", stdin=b"\0".join(odd))
    assert qcli("replay", topic, f"{topic}.copy", "-q").code == 0
    assert qcli("tail", f"{topic}.copy", "--to", "latest", "-0").out == b"".join(body + b"\0" for body in odd)


def test_other_broker(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, 20)
    with nsqd(tmp_path / "data") as other:
        other.create("t", "c")
        result = qcli("replay", topic, "t", "--nsqd-tcp-address", other.tcp_address)
        assert result.code == 0, result.err
        assert other.channel_stats("t", "c")["depth"] == 20


def test_original_spacing(qcli: Cli, topic: str) -> None:
    begun = time.monotonic()
    fill(qcli, topic, 5)
    fill(qcli, topic, 5, 5)
    fill(qcli, topic, 5, 10)
    spread_s = time.monotonic() - begun  # at least the time between the first and the last message
    times = [r["timestamp_ns"] for r in qcli("tail", topic, "--to", "latest", "--format", "json").records]
    distances = {body: (times[body] - times[0]) / 2e9 for body in (5, 10)}
    qcli("replay", topic, f"{topic}.copy", "--speed", "2x")
    copied = qcli("tail", f"{topic}.copy", "--to", "latest", "--format", "json").records
    assert [record["body"] for record in copied] == [str(number) for number in range(15)]
    for body, distance_s in distances.items():
        found_s = (copied[body]["timestamp_ns"] - copied[0]["timestamp_ns"]) / 1e9
        assert distance_s - 0.1 <= found_s <= spread_s + 10


def test_rate_is_kept(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 30)
    begun = time.monotonic()
    qcli("replay", topic, f"{topic}.copy", "--rate", "20")
    assert time.monotonic() - begun >= 1.4
    assert len(stored(qcli, f"{topic}.copy")) == 30


# ---------------------------------------------------------------------- ending early, and going on


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *in_soak((signal.SIGTERM, 143))])
def test_interrupted_replay_prints_how_to_continue(
    qcli: Cli, topic: str, number: signal.Signals, code: int
) -> None:
    fill(qcli, topic, 3000)  # half a minute: it must not end before the signal
    copy = f"{topic}.copy"
    with qcli.running("replay", topic, copy, "--rate", "100") as replay:
        qcli("topic", "create", copy)
        qcli.wait_until(copy, lambda record: record["message_count"] > 10)
        replay.process.send_signal(number)
        result = replay.end()
    assert result.code == code
    report, advice = result.err.splitlines()
    done = int(report.split()[0])
    assert advice == f"Continue with --from {done} --to 3000."
    assert stored(qcli, copy) == [b"%d" % each for each in range(done)]
    assert qcli("replay", topic, copy, "-q", "--from", str(done), "--to", "3000").code == 0
    assert stored(qcli, copy) == [b"%d" % each for each in range(3000)]


def test_destination_goes_down(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, 3000)
    with qcli_serve(tmp_path / "data") as other:
        there = Cli(other.tcp_address, other.http_address)
        there("topic", "create", "t")
        with qcli.running(
            "replay", topic, "t", "--rate", "100", "-n", "2500", "--nsqd-tcp-address", other.tcp_address
        ) as replay:
            there.wait_until("t", lambda record: record["message_count"] > 10)
            other.process.kill()
            result = replay.end()
    assert result.code == 4
    error = result.err.splitlines()[-1]
    found = re.fullmatch(
        rf"Error: The broker at {other.tcp_address}: .*\. (\d+) messages acknowledged.*"
        r"Continue with --from (\d+) --to 3000 -n (\d+)\.",
        error,
    )
    assert found, error
    assert int(found[1]) == int(found[2]) == 2500 - int(found[3])


def test_source_goes_down_and_is_retried(tmp_path: Path, qcli: Cli, topic: str) -> None:
    with qcli_serve(tmp_path / "data") as source:
        here = Cli(qcli.tcp_address, source.http_address)
        fill(Cli(source.tcp_address, source.http_address), "t", 5000)
        body = b"x" * 10_000
        Cli(source.tcp_address, source.http_address)("pub", "t", "-q", stdin=lines([body] * 5000))
        with here.running("replay", "t", topic, "--rate", "4000") as replay:
            qcli("topic", "create", topic)
            qcli.wait_until(topic, lambda record: record["message_count"] > 1000)
            source.process.kill()
            source.process.wait(30)
            assert replay.hear_line().startswith(f"Warning: lost the connection to {source.http_address}: ")
            with qcli_serve(
                tmp_path / "data",
                f"--tcp-address={source.tcp_address}",
                f"--http-address={source.http_address}",
            ):
                result = replay.end()
    assert result.code == 0
    assert stored(qcli, topic) == [*(b"%d" % number for number in range(5000)), *([body] * 5000)]


def test_damage_is_reported(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        for batch in (b"a\nb\n", b"bad\nluck\n", b"c\n"):
            qcli.publish("t", batch.splitlines())
    damage(tmp_path / "data" / "topics" / "t.topic", b"luck")
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        result = qcli("replay", "t", "copy")
        assert result.code == 5
        told, report = result.err.splitlines()
        assert told == "Damage: t: messages 2 to 3 are damaged or missing in the log; skipped."
        assert report.startswith("3 messages (3 B) of t published to copy in ")
        assert report.endswith("; sequences 0 to 4; 2 missing")
        assert stored(qcli, "copy") == [b"a", b"b", b"c"]


def test_progress_on_a_terminal(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 100)
    with qcli.on_terminal("replay", topic, f"{topic}.copy", "--rate", "60") as terminal:
        terminal.expect(b" messages/s, ")
        assert terminal.end() == 0
    assert re.search(rb"\d+%, ", terminal.shown)
    with qcli.on_terminal("replay", topic, f"{topic}.copy", "-q") as terminal:
        assert terminal.end() == 0
    assert terminal.shown == b""


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["t", "t/c"], "Invalid value for 'DESTINATION': 't/c' is a channel. To deliver messages to it again, "
         "see 'qcli channel seek'."),
        (["t", "u", "--rate", "5", "--speed", "1x"], "--rate and --speed exclude each other."),
        (["t", "u", "--speed", "fast"], "Invalid value for '--speed': 'fast' is not a speed such as 1x, 2x or 0.5x."),
        (["t", "u", "--speed", "0x"], "Invalid value for '--speed': '0x' is not a speed such as 1x, 2x or 0.5x."),
        (["t", "u", "--match", "["], "Invalid value for '--match': '[' is not a regular expression: unterminated "
         "character set at position 0."),
    ],
)  # fmt: skip
def test_usage_errors(nowhere: Cli, args: list[str], error: str) -> None:
    result = nowhere("replay", *args)
    assert (result.code, result.err.splitlines()[-1]) == (2, f"Error: {error}")


def test_missing_topic(qcli: Cli, topic: str) -> None:
    result = qcli("replay", topic, f"{topic}.copy")
    assert (result.code, without_suggestion(result.err)) == (1, does_not_exist(topic, qcli.http_address))


def test_no_broker(qcli: Cli, nowhere: Cli, topic: str) -> None:
    fill(qcli, topic, 1)
    no_source = Cli(qcli.tcp_address, "127.0.0.1:1")("replay", topic, topic)
    assert (no_source.code, "--nsqd-http-address" in no_source.err) == (3, True)
    no_destination = Cli("127.0.0.1:1", qcli.http_address)("replay", topic, topic)
    assert (no_destination.code, "--nsqd-tcp-address" in no_destination.err) == (3, True)
    assert nowhere("replay", topic, topic).code == 3


def test_message_too_long_for_the_destination(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, 5)
    qcli("pub", topic, "-q", stdin=b"x" * 5000)
    with qcli_serve(tmp_path / "data", "--max-msg-size=1000") as other:
        there = Cli(other.tcp_address, qcli.http_address)
        result = there("replay", topic, "t", "--rate", "1000000")
    assert result.code == 1
    assert "E_BAD_MESSAGE" in result.err
    assert "Continue with --from 0 --to 6." in result.err
