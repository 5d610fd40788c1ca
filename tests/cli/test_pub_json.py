"""Tests for `qcli pub --format json`, also as the end of `qcli tail --format json`."""

import base64
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import processes
from cli.support import Cli, command_line, only_ours
from interop.peers import Broker, qcli_serve
from processes import popen
from qcli.commands.pub.batches import Batch
from qcli.commands.pub.records import RecordParser, Records
from qcli.framework.output import json_lines
from trio_nsq.protocol.message_json import body_field

EVERY_BYTE = bytes(range(256))
BODIES = [
    EVERY_BYTE,
    b"\xff\xfe",
    b"\xc3(",
    b"\n",
    b"two\nlines\r\n",
    b"\0",
    "ä\u2028\U0001f600".encode(),
    b'{"a": "b"}',
    b"x" * (1024 * 1024),
    EVERY_BYTE * 4096,
    *(bytes([number]) for number in range(256)),
]


def records(**more: Any) -> Records:
    """Make batches of at most 3 messages."""
    parser = RecordParser(more.pop("topic", None), more.pop("defer_ms", None), more.pop("max_msg_size", 2000))
    return Records(parser, 2000, 3, **({"skip_bad": False} | more))


def batches_of(source: Records, *chunks: bytes) -> list[Batch]:
    source.begin("input")
    found = [batch for chunk in chunks for batch in source.feed(chunk)]
    return [*found, *source.end(), *source.rest()]


def told(qcli: Cli, source: str) -> list[tuple[str, bytes]]:
    """Return topics and bodies of a log, in order."""
    found = qcli("tail", source, "--to", "latest", "--format", "json").records
    return [
        (
            record["topic"],
            record["body"].encode() if "body" in record else base64.b64decode(record["body_base64"]),
        )
        for record in found
    ]


messages = st.tuples(
    st.sampled_from(["a", "b", "c#ephemeral"]), st.binary(min_size=1, max_size=40), st.integers(0, 2)
)


@given(st.lists(messages, max_size=30), st.lists(st.integers(0, 4000)))
def test_batches_have_every_message_in_the_order_of_its_topic(
    given_messages: list[tuple[str, bytes, int]], places: list[int]
) -> None:
    data = json_lines(
        {"topic": topic, "defer_ms": defer_ms, **body_field(body)} for topic, body, defer_ms in given_messages
    ).encode()
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    source = records()
    found = batches_of(
        source, *(data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start)
    )
    assert source.error is None
    assert not source
    assert all(1 <= len(batch.bodies) <= 3 for batch in found)
    for topic in {"a", "b", "c#ephemeral"}:
        assert [
            (body, batch.delay_ms(0)) for batch in found if batch.topic == topic for body in batch.bodies
        ] == [(body, defer_ms) for name, body, defer_ms in given_messages if name == topic]


@given(st.text(max_size=60) | st.binary(max_size=60), st.booleans())
def test_no_line_is_a_surprise(line: str | bytes, as_body: bool) -> None:
    """Any bytes are a record, blank or a bad line."""
    data = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
    source = records(skip_bad=True, topic="t")
    text = data.decode("latin-1")
    chunk = json.dumps({"body": text}).encode() if as_body else data
    found = batches_of(source, chunk)
    assert source.error is None
    if as_body:
        assert [body for batch in found for body in batch.bodies] == ([text.encode()] if text else [])
        assert source.empty == (not text)


BAD = {
    "{": "not JSON: Expecting property name enclosed in double quotes (column 2). Each line is an object: 'jq -c .'",
    "plain text": "not JSON: Expecting value (column 1)",
    '{"body": "a"} x': "not JSON: more text follows the value (column 14)",
    '{"body": "a"},{"body": "b"}': "not JSON: more text follows the value (column 14)",
    '["a"]': "not a JSON object",
    '"a"': "not a JSON object",
    "{}": 'neither "body" nor "body_base64"',
    '{"body": "a", "body_base64": "YQ=="}': 'both "body" and "body_base64"',
    '{"body": {"a": 1}}': '"body" is not a string',
    '{"body_base64": 1}': '"body_base64" is not a string',
    '{"body_base64": "Y?"}': '"body_base64" is not base64: ',
    '{"body_base64": "YQ"}': '"body_base64" is not base64: ',
    r'{"body": "\ud800"}': '"body" has half of a surrogate pair, which is not a character',
    '{"body": "a"}': 'no "topic": name one for all records, qcli pub TOPIC',
    '{"body": "a", "topic": "a b"}': '"topic" is not a topic name: "a b"',
    '{"body": "a", "topic": ["t"]}': '"topic" is not a topic name: ["t"]',
    '{"body": "a", "topic": "t", "defer_ms": -1}': '"defer_ms" is not an integer of 0 or more',
    '{"body": "a", "topic": "t", "defer_ms": true}': '"defer_ms" is not an integer of 0 or more',
    '{"body": "a", "topic": "t", "due_ns": "soon"}': '"due_ns" is not an integer of 0 or more',
    '{"topic": "t", "body": "%s"}' % ("x" * 2001): "the body is longer than 2000 bytes: see --max-msg-size",
    "[" * 5000: "arrays or objects are nested too deeply",
}


def test_other_fields_may_have_any_number() -> None:
    data = b'{"topic": "t", "body": "a", "hits": %s, "defer_ms": 5}\n' % (b"7" * 10_000)
    assert [(batch.bodies, batch.delay_ms(0)) for batch in batches_of(records(), data)] == [([b"a"], 5)]


def test_byte_order_mark_is_left_out() -> None:
    data = b'\xef\xbb\xbf{"topic": "t", "body": "a"}\n\xef\xbb\xbf\n'
    assert [batch.bodies for batch in batches_of(records(), data)] == [[b"a"]]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_bad_line(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    good = b'{"topic": "t", "body": "%d"}\n'
    data = good % 1 + b"\n" + line.encode() + b"\n" + good % 2
    source = records()
    assert [batch.bodies for batch in batches_of(source, data)] == [[b"1"]]
    assert source.error is not None
    assert source.error.startswith(f"Line 3 of input: {BAD[line]}")
    assert source.error.endswith(
        ". Nothing after it was published. Correct the line, or skip such lines with --skip-bad."
    )
    skipping = records(skip_bad=True)
    assert [batch.bodies for batch in batches_of(skipping, data)] == [[b"1", b"2"]]
    assert (skipping.error, skipping.skipped) == (None, 1)
    assert capfd.readouterr().err.startswith(f"Warning: line 3 of input skipped: {BAD[line]}")


def test_line_that_is_not_utf8() -> None:
    source = records(topic="t")
    batches_of(source, b'{"body": "\xff"}')
    assert source.error is not None
    assert source.error.startswith("Line 1 of input: not UTF-8. ")


def test_endless_line_is_not_buffered() -> None:
    source = records(topic="t", skip_bad=True)
    source.begin("input")
    for _ in range(100):
        assert list(source.feed(b" " * 1000)) == []
    assert source.error == "Line 1 of input is longer than 77536 bytes."


def test_many_bad_lines_are_counted_with_few_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    source = records(skip_bad=True)
    assert batches_of(source, b"x\n" * 1000) == []
    assert source.skipped == 1000
    assert len(capfd.readouterr().err.splitlines()) == 11


def test_delay_is_what_remains() -> None:
    due_ns = time.time_ns() + 3600 * 10**9
    source = records(topic="t")
    (late, soon, given_ms) = batches_of(
        source,
        b'{"body": "a", "due_ns": %d}\n{"body": "b", "due_ns": %d}\n{"body": "c", "defer_ms": 5, "due_ns": %d}\n'
        % (due_ns, time.time_ns() - 1, due_ns),
    )
    assert late.delay_ms(due_ns - 1_000_001) == 2  # rounded up: never too early
    assert late.delay_ms(due_ns - 1_000_000) == 1
    assert late.delay_ms(due_ns + 5) == 0
    assert soon.delay_ms(0) == 0
    assert given_ms.delay_ms(0) == 5
    overridden = records(topic="t", defer_ms=7)
    assert {
        batch.delay_ms(0) for batch in batches_of(overridden, b'{"body": "a", "due_ns": %d}' % due_ns)
    } == {7}


# ---------------------------------------------------------------------- with brokers


@only_ours
def test_copy_to_another_broker_keeps_everything(
    qcli: Cli, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Two topics, deferred messages and any bytes, over a real pipe; stored once, in order."""
    for name in ("one", "two"):
        qcli.publish(f"{topic}.{name}", random.Random(name).sample(BODIES, len(BODIES)), at_once=30)
    qcli("pub", f"{topic}.one", "--defer", "2h", stdin=b"later")
    with qcli_serve(tmp_path / "data") as other:
        there = Cli(other.tcp_address, other.http_address)
        tail = popen(
            command_line("tail", f"{topic}.one", f"{topic}.two", "--to", "latest", "--format", "json"),
            stdout=subprocess.PIPE,
            env=qcli.environment(),
        )
        pub = processes.run(
            command_line("pub", "--format", "json"),
            stdin=tail.stdout,
            env=there.environment(),
            timeout=60,
        )
        assert tail.stdout is not None
        tail.stdout.close()
        assert tail.wait() == 0
        assert pub.returncode == 0
        count = 2 * len(BODIES) + 1
        assert pub.stderr.decode().startswith(f"{count} messages (")
        assert ") published to 2 topics in " in pub.stderr.decode()
        for name in ("one", "two"):
            assert told(there, f"{topic}.{name}") == told(qcli, f"{topic}.{name}")
        dues = [
            [
                each["due_ns"]
                for each in cli("tail", f"{topic}.one", "--to", "latest", "--format", "json").records
            ]
            for cli in (qcli, there)
        ]
        assert [each is None for each in dues[0]] == [each is None for each in dues[1]]
        assert dues[0][-1] <= dues[1][-1] < dues[0][-1] + 5 * 10**9


def test_channel_to_topic(qcli: Cli, topic: str) -> None:
    """TOPIC overrides the topics of the records; the output of a channel is accepted."""
    qcli.publish(f"{topic}.a", BODIES, at_once=30)
    data = qcli("tail", f"{topic}.a/c", "-n", str(len(BODIES)), "--format", "json").out
    result = qcli("pub", f"{topic}.b", "--format", "json", stdin=data)
    assert (result.code, result.out) == (0, b"")
    assert f" published to {topic}.b in " in result.err
    again = qcli("tail", f"{topic}.b/c", "-n", str(len(BODIES)), "--format", "json").records
    strip = ("id", "timestamp_ns", "timestamp", "topic")
    assert [{name: each[name] for name in each if name not in strip} for each in again] == [
        {name: each[name] for name in each if name not in strip}
        for each in map(json.loads, data.splitlines())
    ]


@only_ours
@pytest.mark.parametrize("over_tcp", [True, False])
def test_topics_and_delays_of_records(qcli: Cli, broker: Broker, topic: str, over_tcp: bool) -> None:
    for name in "ab":
        broker.create(f"{topic}.{name}", "c")
    data = b"".join(
        b'{"topic": "%s.%s", "body": "%d", "defer_ms": %d}\n'
        % (topic.encode(), b"ab"[number % 2 : number % 2 + 1], number, 3_600_000 * (number % 5 == 0))
        for number in range(100)
    )
    args = ["--nsqd-http-address", "127.0.0.1:1"] if over_tcp else []
    result = qcli("pub", "--format", "json", *args, stdin=data)
    assert result.code == 0
    for offset, name in enumerate("ab"):
        mine = [number for number in range(100) if number % 2 == offset]
        assert [int(body) for _, body in told(qcli, f"{topic}.{name}")] == mine
        stats = broker.channel_stats(f"{topic}.{name}", "c")
        assert stats["deferred_count"] == len([number for number in mine if number % 5 == 0])


def test_bad_line_ends_the_command_after_the_messages_before_it(
    qcli: Cli, topic: str, tmp_path: Path
) -> None:
    for name, data in (("first", b'{"body":"1"}\n'), ("second", b'\n{"body":"2"}\n{"bod\n{"body":"3"}\n')):
        (tmp_path / name).write_bytes(data)
    files = [str(tmp_path / "first"), str(tmp_path / "second")]
    result = qcli("pub", topic, "--format", "json", *files)
    assert result.code == 4
    assert result.err.splitlines()[1] == (
        f"Error: Line 3 of {files[1]}: not JSON: Unterminated string starting at (column 2). Nothing after it was "
        "published. Correct the line, or skip such lines with --skip-bad. 2 messages acknowledged."
    )
    skipped = qcli("pub", topic, "--format", "json", "--skip-bad", *files)
    assert skipped.code == 0
    assert skipped.err.startswith(f"Warning: line 3 of {files[1]} skipped: not JSON: ")
    assert "; 1 bad line skipped" in skipped.err
    assert qcli("tail", f"{topic}/c", "-n", "5").out == b"1\n2\n1\n2\n3\n"


def test_first_line_is_bad(qcli: Cli, topic: str) -> None:
    result = qcli("pub", "--format", "json", stdin=b'{"body": "a"}\n')
    assert result.code == 1
    assert result.err == (
        'Error: Line 1 of standard input: no "topic": name one for all records, qcli pub TOPIC. Nothing after it was '
        "published. Correct the line, or skip such lines with --skip-bad. 0 messages acknowledged.\n"
    )


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "Missing argument 'TOPIC'."),
        (["t", "--skip-bad"], "--skip-bad is for --format json."),
        (
            ["t", "--format", "json", "-0"],
            "--null, --delimiter and --framing are for --format raw; JSON is one object per line.",
        ),
    ],
)
def test_usage_errors(nowhere: Cli, args: list[str], reason: str) -> None:
    result = nowhere("pub", *args)
    assert result.code == 2
    assert reason in result.err


def test_path_in_place_of_the_topic(nowhere: Cli, tmp_path: Path) -> None:
    (tmp_path / "records").touch()
    hint = "It is a file: write TOPIC before it, or, with --format json, - for the topics of the records."
    for name in ("records", "missing"):
        result = nowhere("pub", "--format", "json", str(tmp_path / name))
        assert result.code == 2
        assert "is not a topic name" in result.err
        assert (hint in " ".join(result.err.split())) == (name == "records")


def test_file_in_place_of_the_topic_is_noted(qcli: Cli, topic: str, tmp_path: Path) -> None:
    (tmp_path / topic).write_bytes(b'{"topic": "%s.x", "body": "a"}' % topic.encode())
    for args in ([topic], ["-", topic]):
        done = processes.run(
            command_line("pub", "--format", "json", *args),
            data=b"",
            env=qcli.environment(),
            cwd=tmp_path,
            timeout=30,
        )
        noted = (
            f"Note: all records go to the topic {topic}. To read the file {topic}: " in done.stderr.decode()
        )
        assert (done.returncode, noted) == (0, len(args) == 1)
    assert qcli("tail", f"{topic}.x/c", "-n", "1").out == b"a\n"
