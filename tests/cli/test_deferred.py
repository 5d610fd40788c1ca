"""Tests for `qcli deferred`."""

from cli.support import Cli, does_not_exist
from interop.peers import Broker


def defer(qcli: Cli, topic: str, *bodies: bytes) -> None:
    for number, body in enumerate(bodies):
        qcli("pub", topic, "--defer", f"{48 + number}h", stdin=body + b"\n")


def test_list(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    assert qcli("deferred", "list", f"{topic}/c").out == b""
    defer(qcli, topic, b"first", b"second")
    result = qcli("deferred", "list", f"{topic}/c")
    assert (result.code, result.err) == (0, "")
    heading, *rows = result.out.decode().splitlines()
    assert heading.split() == ["DUE", "(UTC)", "ID", "ATTEMPTS", "PUBLISHED", "(UTC)", "BODY"]
    assert [row.split()[-1] for row in rows] == ["first", "second"]
    records = qcli("deferred", "list", f"{topic}/c", "--format", "json").records
    assert [(record["body"], record["attempts"], record["channel"]) for record in records] == [
        ("first", 0, "c"),
        ("second", 0, "c"),
    ]
    assert records[0]["due_ns"] < records[1]["due_ns"]
    assert [row.split()[2] for row in rows] == [record["id"] for record in records]
    assert qcli("deferred", "list", f"{topic}/c", "-n", "1", "--format", "json").records == records[:1]


def test_cancel(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c", "d")
    defer(qcli, topic, b"1", b"2", b"3")
    ids = [record["id"] for record in qcli("deferred", "list", f"{topic}/c", "--format", "json").records]
    result = qcli("deferred", "cancel", f"{topic}/c", ids[0], ids[2])
    assert (result.code, result.out, result.err) == (0, b"", f"channel {topic}/c: 2 cancelled\n")
    left = qcli("deferred", "list", f"{topic}/c", "--format", "json").records
    assert [record["body"] for record in left] == ["2"]
    assert broker.channel_stats(topic, "d")["deferred_count"] == 3
    partly = qcli("deferred", "cancel", f"{topic}/c", *ids[:2])
    assert (partly.code, partly.err) == (
        4,
        f"channel {topic}/c: 1 cancelled\nError: Not deferred in {topic}/c: {ids[0]}.\n",
    )
    assert qcli("deferred", "cancel", f"{topic}/c", ids[0]).code == 1


def test_errors(qcli: Cli, nowhere: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    wrong = qcli("deferred", "cancel", f"{topic}/c", "12")
    assert wrong.code == 2
    assert "'12' is not a message id: 16 of the digits 0-9 and a-f." in wrong.err
    missing = qcli("deferred", "list", f"{topic}/none")
    assert missing.code == 1
    assert missing.err.startswith(does_not_exist(f"{topic}/none", qcli.http_address)[:-1])
    assert nowhere("deferred", "list", "t/c").code == 3


def test_topic_without_channels_is_explained(qcli: Cli, topic: str) -> None:
    defer(qcli, topic, b"first")
    advice = f"qcli channel create {topic}/c"
    assert advice in qcli("deferred", "list", f"{topic}/c").err
    assert qcli(*advice.split()[1:]).code == 0
    assert [row["body"] for row in qcli("deferred", "list", f"{topic}/c", "--format", "json").records] == [
        "first"
    ]
