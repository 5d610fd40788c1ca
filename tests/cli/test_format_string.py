"""Tests for `-f`, the format string of messages."""

import re
from datetime import datetime
from pathlib import Path
from struct import pack
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.support import Cli, fail_messages, only_ours
from interop.peers import Broker, qcli_serve
from qcli.commands.shared.format_string import LETTERS, FormatString, MessageColumns
from qcli.framework.params import unescape

EVERY_BYTE = bytes(range(256))


def columns(bodies: list[bytes], **more: Any) -> MessageColumns:
    count = len(bodies)
    known: dict[str, Any] = {
        "bodies": bodies,
        "ids": [b"%016x" % number for number in range(count)],
        "topics": b"t%d%",
        "timestamps_ns": [1_700_000_000_123_456_789 + number for number in range(count)],
    }
    return MessageColumns(**known | more)


literals = st.text(st.characters(blacklist_characters="%\\", blacklist_categories=["Cs"]), max_size=5)


@given(
    parts=st.lists(literals | st.sampled_from(["%s", "%%", r"\n", r"\x25s", r"\xff", "%i"]), max_size=8),
    bodies=st.lists(st.binary(max_size=9), max_size=5),
    count=st.integers(0, 6),
)
def test_text_is_literal_and_letters_are_replaced(parts: list[str], bodies: list[bytes], count: int) -> None:
    """An escaped percent sign is literal, as in kcat; so is one in a body."""
    messages = columns(bodies)

    def expected(part: str, number: int) -> bytes:
        values = {"%s": bodies[number], "%i": messages.ids[number], "%%": b"%"}
        return values.get(part, unescape(part))

    wanted = b"".join(expected(part, number) for number in range(len(bodies))[:count] for part in parts)
    shown = min(count, len(bodies))
    assert FormatString("".join(parts)).render(messages, shown) == wanted


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("%t,%S;", b"t%d%,1;t%d%,256;"),
        ("%R", pack(">i", 1) + pack(">i", 256)),
        ("%o %a|", b"-1 0|-1 0|"),
        ("%T %n %r|", b"1700000000123 1700000000123456789 2023-11-14T22:13:20.123456789Z|"
         b"1700000000123 1700000000123456790 2023-11-14T22:13:20.123456790Z|"),
        ("%d%c%b|", b"||"),
        (r"\0\t\x41\101", b"\0\tAA" * 2),
        ("", b""),
        ("ä", "ä".encode() * 2),
    ],
)  # fmt: skip
def test_letters(text: str, output: bytes) -> None:
    assert FormatString(text).render(columns([b"x", EVERY_BYTE]), 2) == output


def test_columns_may_differ_by_message() -> None:
    messages = columns(
        [b"a", b"b"],
        topics=[b"t", b"u"],
        channels=[b"c", b""],
        brokers=[b"h:1", b"h:2"],
        sequences=range(7, 9),
        dues_ns=[0, 10**9],
        attempts=[1, 2],
    )
    assert FormatString("%t/%c %b %o %d %a\n").render(messages, 2) == (
        b"t/c h:1 7  1\nu/ h:2 8 1970-01-01T00:00:01.000000000Z 2\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "%x",
            "%x is unknown. Known are %s %S %R %t %o %T %n %r %d %i %a %c %b %h, and %% for a percent sign.",
        ),
        ("%", "% at the end: write %% for a percent sign."),
        ("%k", "%k: messages of NSQ have no key."),
        ("%p", "%p: messages of NSQ have no partition."),
        (r"%s\q", r"\q is not an escape."),
        ("%s\\", "\\ is not an escape."),
        ("%\\n", "%\\ is unknown."),
        ("%\n", "%\n is unknown."),
    ],
)
def test_errors(text: str, reason: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        FormatString(text)
    assert caught.value.message.startswith(reason)


def test_help_has_every_letter(nowhere: Cli) -> None:
    shown = nowhere("help", "format-strings").out.decode()
    assert re.findall(r"^ +%(\w)  ", shown, re.MULTILINE) == list(LETTERS)


@pytest.mark.parametrize("args", [["--format", "json"], ["-0"], ["-d", ";"], ["--print-topic"]])
def test_other_formats_are_refused(nowhere: Cli, args: list[str]) -> None:
    result = nowhere("tail", "t", "-f", "%s", *args)
    assert result.code == 2
    flag = {"-0": "--null", "-d": "--delimiter"}.get(args[0], args[0])
    assert re.search(f"{flag}|-d|-0", result.err)
    assert "exclude each other" in result.err


# ---------------------------------------------------------------------- with brokers


def test_tail_of_a_channel(qcli: Cli, broker: Broker, topic: str) -> None:
    qcli.publish(topic, [EVERY_BYTE, b"%s\n", b"\0"])
    text = r"%t %c %a %o %S %i %b %r:%s\n"
    out = qcli("tail", f"{topic}/c", "-n", "3", "-f", text).out
    found = re.fullmatch(
        rb"(?:%s c 1 -1 (?:256|3|1) [0-9a-f]{16} %s \S+Z:(?:.*?)\n){3}"
        % (topic.encode(), re.escape(broker.tcp_address.encode())),
        out,
        re.DOTALL,
    )
    assert found
    assert out.count(EVERY_BYTE + b"\n") == out.count(b":%s\n\n") == out.count(b":\0\n") == 1


@only_ours
def test_log_has_sequences_and_due_times(qcli: Cli, broker: Broker, topic: str) -> None:
    bodies = [b"%d" % number for number in range(1000)]
    qcli.publish(topic, bodies, at_once=70)
    qcli("pub", topic, "--defer", "1h", stdin=b"later")
    out = qcli("tail", topic, "--from", "0", "--to", "1001", "-f", r"%o|%s|%d|%n|%b\n").out.decode()
    rows = [line.split("|") for line in out.splitlines()]
    records = qcli("tail", topic, "--to", "latest", "--format", "json").records
    assert [row[:2] for row in rows] == [
        *([str(number), str(number)] for number in range(1000)), ["1000", "later"]
    ]  # fmt: skip
    assert [row[2] for row in rows] == [record["due"] or "" for record in records]
    assert [int(row[3]) for row in rows] == [record["timestamp_ns"] for record in records]
    assert {row[4] for row in rows} == {broker.http_address}
    assert qcli("tail", topic, "--to", "latest", "-n", "75", "-f", "%s,").out == b",".join(bodies[:75]) + b","


@only_ours
def test_peek_deferred_and_dead_letters(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    qcli.publish(topic, [b"\xff\n"])
    qcli("pub", topic, "--defer", "1h", stdin=b"later")
    text = r"%t|%c|%o|%a|%s;"
    assert qcli("peek", f"{topic}/c", "-f", text).out == f"{topic}|c|0|0|".encode() + (
        b"\xff\n;" + f"{topic}|c|1|0|later;".encode()
    )
    assert qcli("peek", topic, "-n", "1", "-f", text).out == f"{topic}||1|0|later;".encode()
    due = qcli("deferred", "list", f"{topic}/c", "-f", "%s %d").out.decode()
    assert due.startswith("later 2")
    assert datetime.fromisoformat(due.removeprefix("later ")).tzinfo is not None
    qcli("channel", "set", f"{topic}/c", "max_attempts=1", f"dead_letter_topic={topic}.dead")
    fail_messages(broker.tcp_address, topic, "c", 1)
    qcli.wait_until(f"{topic}.dead", lambda record: record["message_count"] == 1)
    assert (
        qcli("dlq", "show", f"{topic}.dead", "-f", "%t %S %s").out == f"{topic}.dead 2 ".encode() + b"\xff\n"
    )
    for args in (["peek", topic], ["deferred", "list", f"{topic}/c"], ["dlq", "show", f"{topic}.dead"]):
        assert qcli(*args, "-f", "%s", "--format", "json").code == 2


@only_ours
def test_broker_of_each_message(qcli: Cli, broker: Broker, topic: str, tmp_path: Path) -> None:
    """Batches of several brokers are combined; each message still has its own broker."""
    with qcli_serve(tmp_path / "data") as other:
        there = Cli(other.tcp_address, other.http_address)
        for cli, each in ((qcli, broker), (there, other)):
            each.create(topic, "c")
            cli.publish(topic, [each.tcp_address.encode()] * 50)
        both = Cli(f"{broker.tcp_address},{other.tcp_address}", f"{broker.http_address},{other.http_address}")
        out = both("tail", f"{topic}/c", "-n", "100", "-f", r"%b %s\n").out.decode()
        assert sorted(out.splitlines()) == sorted(
            [f"{each.tcp_address} {each.tcp_address}" for each in (broker, other)] * 50
        )
