"""Tests for `qcli dlq`."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from cli.support import Cli, does_not_exist, fail_messages, without_suggestion
from interop.peers import Broker


@pytest.fixture
def dead(qcli: Cli, broker: Broker, topic: str) -> str:
    """A dead-letter topic with three letters of channel c. The topic also has a channel d."""
    broker.create(topic, "c", "d")
    name = f"{topic}.dead"
    qcli("channel", "set", f"{topic}/c", "max_attempts=1", f"dead_letter_topic={name}")
    qcli.publish(topic, [b"one", b"two", b"three"])
    fail_messages(broker.tcp_address, topic, "c", 3)
    qcli.wait_until(f"{topic}/c", lambda record: bool(record["dead_letter_count"] == 3))
    return name


def bodies(qcli: Cli, dead: str, *args: str) -> list[bytes]:
    return qcli("dlq", "show", dead, "--format", "raw", "-n", "0", *args).out.split()


def test_list(qcli: Cli, topic: str, dead: str) -> None:
    result = qcli("dlq", "list", dead)
    assert (result.code, result.err) == (0, "")
    heading, row = result.out.decode().splitlines()
    assert heading.split() == ["TOPIC", "FROM", "REASON", "FIRST", "(UTC)", "LAST", "(UTC)", "LETTERS"]
    cells = row.split()
    assert [*cells[:3], cells[-1]] == [dead, f"{topic}/c", "requeued", "3"]
    for time in (cells[3:5], cells[5:7]):
        assert datetime.now(UTC) - datetime.fromisoformat(f"{' '.join(time)}Z") < timedelta(minutes=10)
    (record,) = qcli("dlq", "list", dead, "--format", "json").records
    assert {key: record[key] for key in ("dead_letter_topic", "topic", "channel", "reason", "count")} == {
        "dead_letter_topic": dead,
        "topic": topic,
        "channel": "c",
        "reason": "requeued",
        "count": 3,
    }
    assert record["first_ns"] <= record["last_ns"]
    assert record in qcli("dlq", "list", "--format", "json").records


def test_list_fits_a_terminal(qcli: Cli, topic: str, dead: str) -> None:
    with qcli.on_terminal("dlq", "list", dead, columns=80) as terminal:
        assert terminal.end() == 0
    heading, row = terminal.shown.decode().splitlines()
    assert (heading.split()[-1], row.split()[-1]) == ("LETTERS", "3")
    assert max(len(heading), len(row)) <= 80


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [(100, ()), (75, ("PUBLISHED (UTC)",)), (50, ("PUBLISHED (UTC)", "ATTEMPTS", "REASON"))],
)
def test_show_fits_a_terminal(
    qcli: Cli, topic: str, dead: str, columns: int, left_out: tuple[str, ...]
) -> None:
    with qcli.on_terminal("dlq", "show", dead, columns=columns) as terminal:
        assert terminal.end() == 0
    heading, *rows = terminal.shown.decode().splitlines()
    shown = (name for name in ("ID", "FROM", "ATTEMPTS", "REASON", "PUBLISHED (UTC)", "BODY"))
    assert re.split("  +", heading) == [name for name in shown if name not in left_out]
    assert max(map(len, (heading, *rows))) <= columns
    assert [row.split()[-1] for row in rows] == ["one", "two", "three"]


def test_show(qcli: Cli, topic: str, dead: str) -> None:
    result = qcli("dlq", "show", dead)
    assert (result.code, result.err) == (0, "")
    heading, *rows = result.out.decode().splitlines()
    assert heading.split() == ["ID", "FROM", "ATTEMPTS", "REASON", "PUBLISHED", "(UTC)", "BODY"]
    assert [(row.split()[1:4], row.split()[-1]) for row in rows] == [
        ([f"{topic}/c", "1", "requeued"], body) for body in ("one", "two", "three")
    ]
    records = qcli("dlq", "show", dead, "--format", "json").records
    assert [(record["body"], record["origin"]["attempts"]) for record in records] == [
        ("one", 1),
        ("two", 1),
        ("three", 1),
    ]
    assert bodies(qcli, dead) == [b"one", b"two", b"three"]
    assert qcli("dlq", "show", dead, "-n", "2", "--format", "raw").out == b"one\ntwo\n"
    assert bodies(qcli, dead, "--id", records[1]["id"], "--id", records[2]["id"]) == [b"two", b"three"]
    assert bodies(qcli, dead, "--origin", f"{topic}/d") == bodies(qcli, dead, "--reason", "timed_out") == []
    assert len(bodies(qcli, dead, "--origin", topic, "--reason", "requeued")) == 3


def test_stat_shows_exhausted_messages(qcli: Cli, topic: str, dead: str) -> None:
    c, d = qcli("stat", topic, "--format", "json").records[1:]
    assert (c["dead_letter_count"], c["given_up_count"]) == (3, 0)
    assert (d["dead_letter_count"], d["given_up_count"]) == (None, None)
    heading, *_ = qcli("stat", topic).out.decode().splitlines()
    assert heading.endswith("  dead  given up")
    heading, *_ = qcli("stat", dead).out.decode().splitlines()
    assert "given up" not in heading


def test_requeue(qcli: Cli, broker: Broker, topic: str, dead: str) -> None:
    before = broker.channel_stats(topic, "d")["depth"]
    nothing = qcli("dlq", "requeue", dead, "--origin", f"{topic}/d", "--reason", "timed_out")
    assert nothing.err == f"{dead}: 0 requeued: no dead letters from {topic}/d with the reason timed_out\n"
    result = qcli("dlq", "requeue", dead, "-n", "1")
    assert (result.code, result.out, result.err) == (0, b"", f"{dead}: 1 requeued\n")
    assert qcli("tail", f"{topic}/c", "-n", "1").out == b"one\n"
    assert qcli("dlq", "requeue", dead).err == f"{dead}: 2 requeued\n"
    assert qcli("tail", f"{topic}/c", "-n", "2").out.split() == [b"two", b"three"]
    assert broker.channel_stats(topic, "d")["depth"] == before
    assert qcli("dlq", "list", dead).out == b""
    assert qcli("dlq", "requeue", dead).err == f"{dead}: 0 requeued: no dead letters\n"
    assert qcli("dlq", "list", dead).err == f"There are no dead letters in {dead}.\n"


def test_requeue_to_the_topic_for_all_channels(qcli: Cli, broker: Broker, topic: str, dead: str) -> None:
    (record,) = qcli("dlq", "show", dead, "-n", "1", "--format", "json").records
    assert qcli("dlq", "requeue", dead, "--to-topic", "--id", record["id"]).code == 0
    assert [broker.channel_stats(topic, name)["depth"] for name in ("c", "d")] == [1, 4]


def test_letters_without_an_origin_are_to_be_consumed(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(f"{topic}.dead", "dead-letters")
    qcli.publish(f"{topic}.dead", [b"one"])
    for flags in ([], ["--to-topic"]):
        result = qcli("dlq", "requeue", f"{topic}.dead", *flags)
        assert result.code == 1
        assert "no origin" in result.err
        assert "Consume those without an origin" in result.err
        assert "use --to-topic" not in result.err


def test_requeue_if_the_channel_was_deleted(qcli: Cli, broker: Broker, topic: str, dead: str) -> None:
    qcli("channel", "delete", "--yes", f"{topic}/c")
    result = qcli("dlq", "requeue", dead)
    assert (result.code, result.out) == (1, b"")
    assert result.err == (
        f"{dead}: 0 requeued\nError: Not requeued: 3 because there is no channel {topic}/c. To publish "
        "them to all channels of their topics, use --to-topic.\n"
    )
    assert len(bodies(qcli, dead)) == 3
    broker.create(topic, "e")
    qcli("channel", "set", f"{topic}/e", "max_attempts=1", f"dead_letter_topic={dead}")
    qcli.publish(topic, [b"four"])
    fail_messages(broker.tcp_address, topic, "e", 1)
    qcli.wait_until(f"{topic}/e", lambda record: bool(record["dead_letter_count"] == 1))
    result = qcli("dlq", "requeue", dead)
    assert (result.code, result.err.splitlines()[0]) == (4, f"{dead}: 1 requeued")


def test_drop(qcli: Cli, dead: str) -> None:
    refused = qcli("dlq", "drop", dead)
    assert refused.code == 2
    assert "confirm with --yes" in refused.err
    assert len(bodies(qcli, dead)) == 3
    assert qcli("dlq", "drop", dead, "--yes", "-n", "1").err == f"{dead}: 1 dropped\n"
    assert bodies(qcli, dead) == [b"two", b"three"]
    gone = qcli("dlq", "drop", dead, "-y", "--id", "f" * 16)
    assert (gone.code, gone.err) == (
        1,
        f"{dead}: 0 dropped\nError: There are no such dead letters in {dead}.\n",
    )
    assert qcli("dlq", "drop", dead, "-y").err == f"{dead}: 2 dropped\n"
    assert bodies(qcli, dead) == []


def test_drop_asks(qcli: Cli, dead: str) -> None:
    with qcli.on_terminal("dlq", "drop", dead, "-n", "1") as terminal:
        terminal.expect(b"Drop the selected dead letters in ")
        terminal.type(b"n\n")
        assert terminal.end() == 1
    with qcli.on_terminal("dlq", "drop", dead) as terminal:
        terminal.expect(b"Drop all dead letters in ")
        terminal.type(b"y\n")
        assert terminal.end() == 0
    assert bodies(qcli, dead) == []


def test_letters_in_flight_are_reported_and_kept(qcli: Cli, dead: str) -> None:
    with qcli.running("tail", f"{dead}/dead-letters", "--max-in-flight", "1") as tail:
        assert tail.read_line() == b"one\n"
        qcli.wait_until(f"{dead}/dead-letters", lambda record: bool(record["depth"] == 0))
    assert bodies(qcli, dead) == []


@pytest.mark.parametrize("verb", [["list"], ["show"], ["requeue"], ["drop", "--yes"]])
def test_topic_without_dead_letters(qcli: Cli, broker: Broker, topic: str, verb: list[str]) -> None:
    missing = qcli("dlq", *verb, topic)
    assert (missing.code, without_suggestion(missing.err)) == (1, does_not_exist(topic, qcli.http_address))
    broker.create(topic, "c")
    other = qcli("dlq", *verb, topic)
    error = f'Error: Topic "{topic}" on {qcli.http_address} never had a dead letter. '
    assert (other.code, other.err) == (1, f"{error}'qcli dlq list' lists the topics that have.\n")


def test_no_broker(nowhere: Cli) -> None:
    assert nowhere("dlq", "list").code == 3
    assert nowhere("dlq", "requeue", "dead").code == 3
