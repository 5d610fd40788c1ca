"""Tests for `qcli peek`."""

import base64
from pathlib import Path

import pytest

from broker.state import damage
from cli.support import Cli, Run, does_not_exist, only_ours, without_suggestion
from interop.peers import Broker, nsqd, qcli_serve

pytestmark = only_ours


def fill(qcli: Cli, topic: str, count: int) -> None:
    qcli.publish(topic, [b"%d" % number for number in range(count)])


def bodies(out: bytes) -> list[str]:
    """Return the last column of a table."""
    return [line.split()[-1] for line in out.decode().splitlines()[1:]]


def test_next_messages_of_a_channel(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 15)
    result = qcli("peek", f"{topic}/c")
    assert (result.code, result.err) == (0, "")
    heading, *rows = result.out.decode().splitlines()
    assert heading.split() == ["SEQUENCE", "PUBLISHED", "(UTC)", "ATTEMPTS", "STATE", "BODY"]
    assert [row.split()[0] for row in rows] == [str(number) for number in range(10)]
    assert rows[3].split()[3:] == ["0", "fresh", "3"]
    assert bodies(qcli("peek", f"{topic}/c", "-n", "3").out) == ["0", "1", "2"]
    stats = broker.channel_stats(topic, "c")
    assert (stats["depth"], stats["in_flight_count"], stats["message_count"]) == (15, 0, 15)


def test_states(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    fill(qcli, topic, 3)
    qcli("pub", topic, "-q", "--defer", "1h", stdin=b"later")
    heading, *rows = qcli("peek", f"{topic}/c").out.decode().splitlines()
    assert heading.split() == ["SEQUENCE", "PUBLISHED", "(UTC)", "ATTEMPTS", "STATE", "DUE", "(UTC)", "BODY"]
    assert [row.split()[4] for row in rows] == ["fresh", "fresh", "fresh", "deferred"]
    assert bodies(qcli("peek", f"{topic}/c", "--state", "deferred").out) == ["later"]
    assert bodies(qcli("peek", f"{topic}/c", "--state", "fresh", "--state", "requeued").out) == [
        "0",
        "1",
        "2",
    ]
    assert qcli("peek", f"{topic}/c", "--state", "requeued").out == b""


def test_newest_messages_of_a_topic(qcli: Cli, topic: str) -> None:
    fill(qcli, topic, 15)
    result = qcli("peek", topic)
    heading = result.out.decode().splitlines()[0]
    assert heading.split() == ["SEQUENCE", "PUBLISHED", "(UTC)", "BODY"]
    assert bodies(result.out) == [str(number) for number in range(5, 15)]
    assert bodies(qcli("peek", topic, "-n", "2").out) == ["13", "14"]
    assert bodies(qcli("peek", topic, "-n", "100").out) == [str(number) for number in range(15)]
    assert bodies(qcli("peek", topic, "--from", "4", "-n", "2").out) == ["4", "5"]
    assert bodies(qcli("peek", topic, "--since", "1h", "-n", "2").out) == ["0", "1"]


def test_no_messages(qcli: Cli, run_here: Run, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    broker.create(f"{topic}.used", "c")
    broker.create(f"{topic}.none")
    broker.post("/mpub", b"1\n2", topic=f"{topic}.used")
    for args, what in (
        (["peek", topic], f"messages in {topic}."),
        (["peek", f"{topic}/c"], f"messages in {topic}/c."),
        (["peek", f"{topic}/c", "--state", "deferred"], f"deferred messages in {topic}/c."),
        (["deferred", "list", f"{topic}/c"], f"deferred messages in {topic}/c."),
        (["channel", "list", f"{topic}.none"], f"channels in {topic}.none."),
        (
            ["peek", f"{topic}.used", "--from", "2"],
            f"messages in {topic}.used after --from. The newest message is 1.",
        ),
        (
            ["peek", f"{topic}.used", "--from", "2100-01-01"],
            f"messages in {topic}.used after --from, which is in the future. The newest message is 1.",
        ),
    ):
        result = run_here(qcli, *args)
        assert (result.code, result.out, result.err) == (0, b"", f"There are no {what}\n")


def test_json_and_raw(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    qcli("pub", topic, "-q", "--null", stdin=b"a\nb\0\xff\xfe")
    records = qcli("peek", f"{topic}/c", "--format", "json").records
    assert list(records[0]) == [
        "topic", "id", "timestamp_ns", "timestamp", "attempts", "sequence", "due_ns", "due", "channel", "state", "body"
    ]  # fmt: skip
    assert base64.b64decode(records[1]["body_base64"]) == b"\xff\xfe"
    of_topic = qcli("peek", topic, "--format", "json").records
    assert [each["id"] for each in of_topic] == [each["id"] for each in records]
    assert list(of_topic[0]) == [
        "topic", "id", "timestamp_ns", "timestamp", "attempts", "sequence", "due_ns", "due", "body"
    ]  # fmt: skip
    for source in (topic, f"{topic}/c"):
        assert qcli("peek", source, "--format", "raw").out == b"a\nb\n\xff\xfe\n"


def test_bodies_are_one_line_each_and_shortened_on_a_terminal(qcli: Cli, topic: str) -> None:
    odd = ["tab\tand\nline", "\x1b[31mred", "x" * 500]
    stdin = b"\0".join([*(text.encode() for text in odd), b"\xff\x01"])
    qcli("pub", topic, "-q", "--null", stdin=stdin)
    shown = [line.split(maxsplit=3)[3] for line in qcli("peek", topic).out.decode().splitlines()[1:]]
    assert shown == [r"tab\tand\nline", r"\x1b[31mred", "x" * 500, r"\xff\x01"]
    with qcli.on_terminal("peek", topic, columns=80) as terminal:
        assert terminal.end() == 0
    widths = [len(line.rstrip(b"\r")) for line in terminal.shown.split(b"\n")]
    assert max(widths) <= 80


def test_damage(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create("t", "c")
        qcli = Cli(broker.tcp_address, broker.http_address)
        for batch in (b"a\nb\n", b"bad\nluck\n", b"c\n"):
            qcli.publish("t", batch.splitlines())
    damage(tmp_path / "data" / "topics" / "t.topic", b"luck")
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        for source in ("t", "t/c"):
            result = qcli("peek", source, "--format", "raw")
            assert (result.code, result.out) == (5, b"a\nb\nc\n")
            assert result.err == "Damage: t: messages 2 to 3 are damaged or missing in the log; skipped.\n"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["t", "--state", "fresh"], "--state is for channels: write TOPIC/CHANNEL."),
        (["t/c", "--from", "0"], "--from is for topics: a channel begins with its next message."),
        (["t", "c"], "Got unexpected extra argument (c). Did you mean t/c?"),
        (["t/c", "d"], "Got unexpected extra argument (d)."),
    ],
)
def test_usage(nowhere: Cli, args: list[str], error: str) -> None:
    result = nowhere("peek", *args)
    assert (result.code, result.err.splitlines()[-1]) == (2, f"Error: {error}")


def test_missing_topic_or_channel(qcli: Cli, broker: Broker, nowhere: Cli, topic: str) -> None:
    broker.create(topic, "c")
    for source, what in ((f"{topic}.x", f"{topic}.x"), (f"{topic}.x/c", f"{topic}.x"),
                         (f"{topic}/x", f"{topic}/x")):  # fmt: skip
        result = qcli("peek", source)
        assert (result.code, without_suggestion(result.err)) == (1, does_not_exist(what, qcli.http_address))
    assert nowhere("peek", topic).code == 3


def test_nsqd_is_refused(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        broker.create("t", "c")
        qcli = Cli(broker.tcp_address, broker.http_address)
        for args in (("peek", "t"), ("channel", "seek", "t/c", "--to", "0")):
            result = qcli(*args)
            assert result.code == 1
            assert "cannot be read by sequence or time" in result.err
        result = qcli("peek", "t/c")
        assert (result.code, "cannot show the messages of a channel: it is an nsqd" in result.err) == (
            1,
            True,
        )
