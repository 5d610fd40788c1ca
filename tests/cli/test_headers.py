"""Tests for headers of messages in the commands: who publishes them, who shows them, and what refuses them."""

import base64
import json
from pathlib import Path

import pytest

from cli.support import Cli, only_ours
from interop.peers import nsqd, qcli_serve
from qcli.commands.pub.batches import Batch, Lines
from qcli.commands.pub.input import Splitter
from qcli.commands.pub.records import RecordParser, Records
from trio_nsq.protocol.headers import MAX_HPUB_HEADERS_BYTES, MAX_HPUB_MESSAGES

TENANT = {"tenant": "7", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
OPTIONS = [text for name, value in TENANT.items() for text in ("-H", f"{name}: {value}")]


def shown(cli: Cli, *args: str) -> list[tuple[bytes, dict[str, str] | None]]:
    """Return the bodies that a command shows as JSON, with their headers; None: it shows none."""
    found = cli(*args, "--format", "json")
    assert found.code == 0, found.err
    return [
        (
            base64.b64decode(each["body_base64"]) if "body_base64" in each else each["body"].encode(),
            each.get("headers"),
        )
        for each in found.records
    ]


@only_ours
@pytest.mark.parametrize("numbered", [True, False])
def test_published_headers_are_shown(qcli: Cli, topic: str, numbered: bool) -> None:
    more = [] if numbered else ["--no-retry"]
    assert qcli("topic", "create", topic).code == 0
    assert qcli("channel", "create", f"{topic}/c").code == 0
    assert qcli("pub", topic, *OPTIONS, *more, stdin=b"one\ntwo\n").code == 0
    assert qcli("pub", topic, *more, stdin=b"plain\n").code == 0
    assert qcli("pub", topic, "-H", "late:1", "--defer", "2h", *more, stdin=b"\xff\n").code == 0
    expected = [(b"one", TENANT), (b"two", TENANT), (b"plain", None), (b"\xff", {"late": "1"})]
    assert shown(qcli, "tail", topic, "--to", "latest") == expected
    assert shown(qcli, "peek", topic) == expected
    assert shown(qcli, "peek", f"{topic}/c") == expected
    assert shown(qcli, "deferred", "list", f"{topic}/c") == expected[3:]
    assert shown(qcli, "tail", f"{topic}/c", "-n", "3") == expected[:3]
    assert qcli("tail", topic, "--to", "latest").out == b"one\ntwo\nplain\n\xff\n"
    lines = qcli("tail", topic, "--to", "latest", "-f", r"%h|%s\n").out.splitlines()
    text = ",".join(f"{name}={value}" for name, value in TENANT.items()).encode()
    assert lines == [text + b"|one", text + b"|two", b"|plain", b"late=1|\xff"]


@only_ours
def test_tables_have_a_column_only_if_there_are_headers(qcli: Cli, topic: str) -> None:
    qcli("pub", topic, stdin=b"plain\n")
    before = qcli("peek", topic).out.decode().splitlines()
    assert [line.split()[-1] for line in before] == ["BODY", "plain"]
    assert "HEADERS" not in before[0]
    qcli("pub", topic, "-H", "tenant:7\N{RIGHT-TO-LEFT OVERRIDE}", stdin=b"one\n")
    heading, *rows = qcli("peek", topic).out.decode().splitlines()
    assert heading.split()[-2:] == ["HEADERS", "BODY"]
    assert rows[0].split()[-1] == "plain"
    assert rows[1].split()[-2:] == [r"tenant=7\u202e", "one"]


@only_ours
def test_a_copy_by_tail_and_pub_has_the_headers(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli("pub", topic, *OPTIONS, stdin=b"one\n")
    qcli("pub", topic, stdin=b"two\n")
    data = qcli("tail", topic, "--to", "latest", "--format", "json").out
    with qcli_serve(tmp_path / "data") as other:
        there = Cli(other.tcp_address, other.http_address)
        result = there("pub", "--format", "json", "-H", "copied:yes", stdin=data)
        assert (result.code, result.out) == (0, b""), result.err
        expected = [(b"one", TENANT | {"copied": "yes"}), (b"two", {"copied": "yes"})]
        assert shown(there, "tail", topic, "--to", "latest") == expected


def test_dump_of_a_log_has_the_headers(qcli: Cli, topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as other:
        there = Cli(other.tcp_address, other.http_address)
        there("pub", topic, *OPTIONS, stdin=b"one\n")
    assert shown(qcli, "log", "dump", str(tmp_path / "data" / "topics" / f"{topic}.topic")) == [
        (b"one", TENANT)
    ]


def test_a_broker_without_headers_gets_nothing(topic: str, tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as other:
        there = Cli(other.tcp_address, other.http_address)
        for args, data in (
            ((topic, "-H", "a:1"), b"one\n"),
            (("--format", "json"), json_line(topic, {"a": "1"})),
        ):
            result = there("pub", *args, stdin=data)
            assert result.code == 1
            assert "does not know headers of messages" in result.err
            assert "0 messages acknowledged" in result.err


def json_line(topic: str, headers: object) -> bytes:
    return json.dumps({"topic": topic, "body": "x", "headers": headers}).encode() + b"\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tenant", "is not a header"),
        ("Tenant:7", "use 'tenant'"),
        (":7", "is not valid"),
        ("a b:7", "is not valid"),
        ("a:\x1b[1m", "control character"),
        ("a:" + "x" * 17_000, "more than 16384"),
    ],
)
def test_bad_options(nowhere: Cli, text: str, reason: str) -> None:
    result = nowhere("pub", "t", "-H", text, stdin=b"x\n")
    assert result.code == 2
    assert reason in result.err


def test_too_many_options_and_names_twice(nowhere: Cli) -> None:
    many = [text for number in range(65) for text in ("-H", f"n{number}:1")]
    assert "65 headers, more than 64" in nowhere("pub", "t", *many, stdin=b"x\n").err
    assert "has a name twice" in nowhere("pub", "t", "-H", "a:1", "-H", "a:2", stdin=b"x\n").err


@pytest.mark.parametrize("headers", ["text", ["a"], {"a": 1}, {"A": "1"}, {"a": "\n"}, {"a": "\ud800"}, 7])
def test_bad_headers_of_records(headers: object) -> None:
    source = Records(RecordParser(None, None, 2000), 2000, 3, skip_bad=False)
    source.begin("input")
    found = [*source.feed(json_line("t", None)), *source.feed(json_line("t", headers)), *source.rest()]
    assert [batch.bodies for batch in found] == [[b"x"]]
    assert source.error is not None
    assert source.error.startswith("Line 2 of input: ")


def test_batches_keep_to_the_limits_of_headers() -> None:
    """A broker takes 1,024 messages with headers at a time, and 1 MiB of headers."""
    short = Lines(Splitter(b"\n", 2000), 10_000, "t", headers={"a": "1"})
    check([*short.feed(b"x\n" * 3000), *short.rest()], 3000)
    long = Lines(Splitter(b"\n", 2000), 10_000, "t", headers={"a": "x" * 16_000})
    check([*long.feed(b"x\n" * 200), *long.rest()], 200)
    records = Records(RecordParser("t", 0, 2000), 2000, 10_000, skip_bad=False)
    data = json_line("t", None) * 5000 + json_line("t", {"a": "1"}) * 2000
    check([*records.feed(data), *records.rest()], 7000)
    records = Records(RecordParser("t", 0, 2000), 2000, 10_000, skip_bad=False)
    check([*records.feed(json_line("t", {"a": "x" * 16_000}) * 200), *records.rest()], 200)


def check(batches: list[Batch], count: int) -> None:
    assert sum(len(batch.bodies) for batch in batches) == count
    for batch in batches:
        if any(batch.headers):
            assert len(batch.headers) == len(batch.bodies) <= MAX_HPUB_MESSAGES
            size = sum(len(f"{name}:{value}\n") for each in batch.headers for name, value in each.items())
            assert size <= MAX_HPUB_HEADERS_BYTES


@only_ours
@pytest.mark.parametrize("strategy", ["round-robin", "hash"])
def test_divided_messages_keep_their_headers(qcli: Cli, topic: str, tmp_path: Path, strategy: str) -> None:
    data = b"".join(
        json.dumps({"topic": topic, "body": str(n), "headers": {"n": str(n)} if n % 3 else {}}).encode()
        + b"\n"
        for n in range(30)
    )
    with qcli_serve(tmp_path / "data") as other:
        addresses = [qcli.tcp_address, other.tcp_address], [qcli.http_address, other.http_address]
        options = [
            f"--nsqd-tcp-address={','.join(addresses[0])}",
            f"--nsqd-http-address={','.join(addresses[1])}",
        ]
        result = qcli("pub", "--format", "json", "--strategy", strategy, *options, stdin=data)
        assert result.code == 0, result.err
        there = Cli(other.tcp_address, other.http_address)
        parts = [shown(each, "tail", topic, "--to", "latest") for each in (qcli, there)]
    assert all(parts)
    expected = [(str(n).encode(), {"n": str(n)} if n % 3 else None) for n in range(30)]
    assert sorted(parts[0] + parts[1], key=lambda each: int(each[0])) == expected


@only_ours
def test_replay_of_a_topic_publishes_the_headers(qcli: Cli, topic: str, tmp_path: Path) -> None:
    lines = [
        json.dumps({"topic": topic, "body": str(n), "headers": {"n": str(n)} if n % 7 == 1 else {}})
        for n in range(1500)
    ]
    long = json.dumps({"topic": topic, "body": "x", "headers": {"long": "x" * 16_000}})
    data = "\n".join([*lines, *[long] * 100]).encode()
    assert qcli("pub", "--format", "json", stdin=data).code == 0
    result = qcli("replay", topic, f"{topic}.again", "--format", "json")
    assert result.code == 0, result.err
    assert result.records[-1]["published"] == 1600
    found = shown(qcli, "tail", f"{topic}.again", "--to", "latest")
    assert found == shown(qcli, "tail", topic, "--to", "latest")
    assert found[8] == (b"8", {"n": "8"})
    with nsqd(tmp_path / "data") as other:
        refused = qcli("replay", topic, "there", "--nsqd-tcp-address", other.tcp_address)
        assert refused.code == 1
        assert "does not know headers of messages" in refused.err
