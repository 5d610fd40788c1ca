"""Tests for `qcli channel seek`."""

from pathlib import Path

import pytest

from cli.support import Cli, does_not_exist, only_ours, without_suggestion
from interop.peers import Broker, qcli_serve

pytestmark = only_ours


def fill(qcli: Cli, topic: str, count: int) -> None:
    qcli.publish(topic, [b"%d" % number for number in range(count)])


def depth(broker: Broker, topic: str) -> int:
    found: int = broker.channel_stats(topic, "c")["depth"]
    return found


def test_seek_back(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c", "other")
    fill(qcli, topic, 10)
    assert len(qcli("tail", f"{topic}/c", "-n", "10").out.splitlines()) == 10
    would = qcli("channel", "seek", f"{topic}/c", "--to", "7", "--dry-run")
    assert (would.code, would.err) == (0, "")
    assert would.out.decode() == (
        f"channel {topic}/c: would move from sequence 10 to 7; 3 messages delivered again, 0 messages skipped\n"
    )
    assert depth(broker, topic) == 0
    done = qcli("channel", "seek", f"{topic}/c", "--to", "7")
    assert done.out == would.out.replace(b"would move", b"moved")
    assert qcli("tail", f"{topic}/c", "-n", "3").out == b"7\n8\n9\n"
    assert broker.channel_stats(topic, "other")["depth"] == 10
    assert qcli("channel", "seek", f"{topic}/c", "--to", "2h").code == 0
    assert depth(broker, topic) == 10


def test_seek_forward_asks(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 10)
    refused = qcli("channel", "seek", f"{topic}/c", "--to", "1")
    assert refused.code == 2
    assert refused.err.splitlines()[-1] == (
        "Error: This would skip 1 message, and standard input is not a terminal: confirm with --yes."
    )
    assert depth(broker, topic) == 10
    assert qcli("channel", "seek", f"{topic}/c", "--to", "1", "--yes").code == 0
    assert depth(broker, topic) == 9
    with qcli.on_terminal("channel", "seek", f"{topic}/c", "--to", "latest") as terminal:
        terminal.expect(f"Skip 9 messages of channel {topic}/c on {qcli.http_address}? [y/N]".encode())
        terminal.type(b"n\n")
        assert terminal.end() == 1
    assert b"Nothing was done." in terminal.shown
    assert depth(broker, topic) == 9
    with qcli.on_terminal("channel", "seek", f"{topic}/c", "--to", "latest") as terminal:
        terminal.expect(b"[y/N]")
        terminal.type(b"y\n")
        assert terminal.end() == 0
    assert depth(broker, topic) == 0


def test_messages_in_flight(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 3)
    with qcli.running("tail", f"{topic}/c", "--max-in-flight", "3") as tail:
        assert tail.read(6) == b"0\n1\n2\n"
        qcli.wait_until(f"{topic}/c", lambda record: record["in_flight_count"] == 0)
        assert qcli("channel", "seek", f"{topic}/c", "--to", "earliest").code == 0
        assert tail.read(6) == b"0\n1\n2\n"


def test_json_report(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 10)
    (move,) = qcli("channel", "seek", f"{topic}/c", "--to", "4", "--yes", "--format", "json").records
    assert move == {
        "topic": topic,
        "channel": "c",
        "from_sequence": 0,
        "to_sequence": 4,
        "delivered_again": 0,
        "skipped": 4,
        "in_flight": 0,
        "limited_by": None,
        "dry_run": False,
    }


def test_seek_beyond_the_log(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--max-bytes-per-file=1") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "c")
        for number in range(5):
            qcli.publish("t", [b"%d" % number])
        qcli("channel", "seek", "t/c", "--to", "3", "--yes")
        for to in ("0", "1h"):
            result = qcli("channel", "seek", "t/c", "--to", to)
            assert result.out.decode() == (
                "channel t/c: moved from sequence 3 to 3; 0 messages delivered again, 0 messages skipped\n"
                "The earliest message that is kept is 3.\n"
            )
        result = qcli("channel", "seek", "t/c", "--to", "99", "--dry-run")
        assert (
            result.out.decode().splitlines()[1] == "The channel's topic has passed on messages up to 5 only."
        )


def test_new_position_survives_a_kill(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--checkpoint-interval=1h") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t", "c")
        fill(qcli, "t", 10)
        qcli("channel", "seek", "t/c", "--to", "6", "--yes")
        broker.process.kill()
        broker.process.wait(30)
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        assert qcli("tail", "t/c", "-n", "4").out == b"6\n7\n8\n9\n"


def test_missing_channel(qcli: Cli, nowhere: Cli, topic: str) -> None:
    result = qcli("channel", "seek", f"{topic}/c", "--to", "0")
    assert (result.code, without_suggestion(result.err)) == (1, does_not_exist(topic, qcli.http_address))
    qcli("topic", "create", topic)
    result = qcli("channel", "seek", f"{topic}/c", "--to", "0")
    assert (result.code, result.err) == (1, does_not_exist(f"{topic}/c", qcli.http_address))
    assert nowhere("channel", "seek", "t/c", "--to", "0").code == 3


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["t/c"], "Missing option '--to'."),
        (["t", "--to", "0"], "Invalid value for 'TOPIC/CHANNEL': 't' has no channel: write t/CHANNEL."),
    ],
)
def test_usage_errors(nowhere: Cli, args: list[str], error: str) -> None:
    result = nowhere("channel", "seek", *args)
    assert (result.code, result.err.splitlines()[-1]) == (2, f"Error: {error}")


def test_seek_is_listed_in_the_help_of_its_group(qcli: Cli) -> None:
    assert b"seek" in qcli("channel", "--help").out
