"""Tests for `to-parquet --dead-letter-topic`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.support import Cli
from interop.peers import Broker
from spark.support import column, export, run_in_process
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.log.record_metadata import headers_in
from trio_nsq.protocol.headers import decode_headers
from trio_nsq.spark.export.dead_letters import letters_topic
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.layout import BodyFormat, Layout
from trio_nsq.spark.export.manifest import result_path
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Advance, Done, Task, run_inline
from trio_nsq.spark.schemas.column_types import JsonType

GOOD = [b'{"user": 1}', b'{"user": 2}', b"{}"]
BAD = {
    b"no JSON": "is no JSON object",
    b"[1]": "is no JSON object",
    b'{"user": "x"}': "has a value of user that is no long",
    b"\xff": "is no JSON object",
}
MIXED = [GOOD[0], *list(BAD)[:2], GOOD[1], *list(BAD)[2:], GOOD[2]]


def letters(address: str, topic: str) -> list[tuple[bytes, dict[str, str]]]:
    log = BrokerLog(address, topic)
    found = []
    for record in log.read(Span(0, log.bounds().end)):
        assert not isinstance(record, Gap)
        texts = headers_in(record.metadata, record.count)
        for body, text in zip(record.messages.bodies(), texts or [""] * record.count, strict=True):
            found.append((body, dict(decode_headers(text))))
    return found


def exported(qcli: Cli, topic: str, folder: Path, *more: str) -> dict[str, Any]:
    return export(qcli, topic, folder, "--json", "--columns", "user:long", *more)


def test_messages_that_do_not_fit_are_published(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, MIXED)
    dead = f"{topic}.dead"
    said = exported(qcli, topic, tmp_path, "--dead-letter-topic", "{topic}.dead")
    assert (said["messages"], said["dead_letters"], said["unparsed"], said["discarded_rows"]) == (3, 4, 0, 0)
    assert said["body_bytes"] == sum(map(len, GOOD))
    assert column(tmp_path, "user") == [1, 2, None]
    assert column(tmp_path, "seq") == [0, 3, 6]
    assert column(tmp_path, "unparsed") == [None] * 3
    found = letters(qcli.http_address, dead)
    assert [body for body, _ in found] == list(BAD)
    assert [headers["dead-letter-reason"] for _, headers in found] == list(BAD.values())
    assert [headers["dead-letter-sequence"] for _, headers in found] == ["1", "2", "4", "5"]
    assert {headers["dead-letter-topic"] for _, headers in found} == {topic}
    assert {headers["dead-letter-broker"] for _, headers in found} == {qcli.http_address}
    assert exported(qcli, topic, tmp_path, "--dead-letter-topic", "{topic}.dead")["dead_letters"] == 0
    assert len(letters(qcli.http_address, dead)) == 4


@pytest.mark.parametrize("option", ["--mask", "--dead-letter-topic"])
def test_size_of_exported_bodies(qcli: Cli, topic: str, tmp_path: Path, option: str) -> None:
    """It is that of the published bodies of all rows, before masks."""
    published = [*MIXED, b'{"user": 3}']
    qcli.publish(topic, published)
    value = "user=null" if option == "--mask" else f"{topic}.dead"
    said = exported(qcli, topic, tmp_path, "--where", "user IS NULL OR user < 3", option, value)
    assert said["filtered"] == 1
    assert (said["dead_letters"] > 0) == (option == "--dead-letter-topic")
    assert said["body_bytes"] == sum(len(published[seq]) for seq in column(tmp_path, "seq"))


def test_dlq_shows_them_and_replay_publishes_them_again(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, MIXED)
    exported(qcli, topic, tmp_path, "--dead-letter-topic", f"{topic}.dead")
    shown = qcli("dlq", "show", f"{topic}.dead", "--format", "json")
    assert [each.get("body") for each in shown.records][:2] == ["no JSON", "[1]"], shown.err
    done = qcli("replay", f"{topic}.dead", topic)
    assert done.code == 0, done.err
    assert set(qcli.retained(topic)[len(MIXED) :]) == set(BAD)


def test_headers_of_the_message_are_kept(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    assert qcli("pub", topic, "--header", "tenant: 7", stdin=b"no JSON\n").code == 0
    exported(qcli, topic, tmp_path, "--dead-letter-topic", f"{topic}.dead")
    ((body, headers),) = letters(qcli.http_address, f"{topic}.dead")
    assert (body, headers["tenant"], headers["dead-letter-sequence"]) == (b"no JSON", "7", "0")


def test_text(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b"a", b"\xff", b"b"])
    export(qcli, topic, tmp_path, "--text", "--dead-letter-topic", f"{topic}.dead")
    assert column(tmp_path, "body") == ["a", "b"]
    ((body, headers),) = letters(qcli.http_address, f"{topic}.dead")
    assert (body, headers["dead-letter-reason"]) == (b"\xff", "is not UTF-8")


def test_columns_that_get_wider_make_no_dead_letters(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b'{"n": 1}'] * 3)
    line = ["--json", "--dead-letter-topic", f"{topic}.dead"]
    export(qcli, topic, tmp_path, *line)
    qcli.publish(topic, [b'{"n": 1.5}', b"no JSON"])
    assert export(qcli, topic, tmp_path, *line)["dead_letters"] == 1
    assert column(tmp_path, "n") == [1.0, 1.0, 1.0, 1.5]
    assert [body for body, _ in letters(qcli.http_address, f"{topic}.dead")] == [b"no JSON"]


def test_new_fields_with_discard_row(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b'{"user": 1}', b'{"user": 2, "more": 3}'])
    (tmp_path / "s.json").write_text(
        json.dumps({"type": "object", "properties": {"user": {"type": "integer"}}})
    )
    line = ["--schema", str(tmp_path / "s.json"), "--schema-contract", "discard-row"]
    export(qcli, topic, tmp_path / "a", *line, "--dead-letter-topic", f"{topic}.dead")
    assert column(tmp_path / "a", "user") == [1]
    ((_, headers),) = letters(qcli.http_address, f"{topic}.dead")
    assert headers["dead-letter-reason"] == "has the new field more"


def test_a_range_that_was_interrupted_publishes_its_letters_again(
    qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """The export ends after the letters were published, and before the result is stored: at least once."""
    qcli.publish(topic, MIXED)
    dead = f"{topic}.dead"
    request = ExportRequest(
        topic,
        str(tmp_path),
        layout=Layout(body=BodyFormat.JSON, headers=True),
        json_fields=[("user", JsonType.LONG)],
        dead_letter_topic=dead,
    )

    def interrupted(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        run_inline(tasks, lambda _: None, advance)
        (tmp_path / result_path(topic, place.label, Span(0, len(MIXED)))).unlink()
        raise OSError("interrupted")

    place = BrokerPlace(qcli.http_address, topic)
    with pytest.raises(OSError, match="interrupted"), open_export(request, [place]) as job:
        job.run(interrupted, job.plan([place]), lambda *_: None)
    assert exported(qcli, topic, tmp_path, "--dead-letter-topic", dead)["messages"] == 3
    assert column(tmp_path, "seq") == [0, 3, 6]
    assert [body for body, _ in letters(qcli.http_address, dead)] == [*BAD, *BAD]


def test_dead_letter_topics_are_not_dead_lettered(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A pattern also finds the dead-letter topics: what they have stays in their files."""
    qcli.publish(f"{topic}.a", [b'{"user": 1}', b"no JSON"])
    line = ["--topic-pattern", f"^{topic}\\.", str(tmp_path), "--json", "--columns", "user:long"]
    for _ in range(3):
        result = run_in_process(qcli, "to-parquet", *line, "--dead-letter-topic", "{topic}.dead")
        assert result.code == 0, result.err
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{topic}.a", f"{topic}.a.dead"]
    assert column(tmp_path / f"{topic}.a.dead", "unparsed") == [b"no JSON"]


@pytest.mark.parametrize(
    ("name", "template", "said"),
    [
        ("clicks", "clicks", "clicks is a dead-letter topic itself"),
        ("clicks.dead", "{topic}.dead", "clicks.dead is a dead-letter topic itself"),
        ("c" * 62, "{topic}.dead", f"topic of {'c' * 62} would be {'c' * 62}.dead"),
    ],
)
def test_dead_letter_topic_that_cannot_be_used(
    qcli: Cli, tmp_path: Path, name: str, template: str, said: str
) -> None:
    result = run_in_process(
        qcli,
        "to-parquet",
        name,
        str(tmp_path),
        "--json",
        "--columns",
        "user:long",
        "--dead-letter-topic",
        template,
    )
    assert (result.code, said in result.err) == (2, True), result.err


@given(
    st.from_regex(r"[a-z.{}]{0,3}(\{topic\})?[a-z.]{0,3}", fullmatch=True),
    st.from_regex(r"[a-z.]{1,6}", fullmatch=True),
)
def test_no_chain_of_dead_letter_topics(template: str, topic: str) -> None:
    found = letters_topic(template, topic)
    assert found is None or letters_topic(template, found) is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ([], "give --json, --schema or --text"),
        (["--json", "--schema-contract", "freeze"], "exclude each other: no message is left out"),
        (["--json", "--from-segments", "x"], "it reads no broker"),
        (["--json", "--channel", "c", "--consume"], "is for brokers whose logs are read"),
    ],
)
def test_usage(qcli: Cli, tmp_path: Path, line: list[str], text: str) -> None:
    result = run_in_process(qcli, "to-parquet", "t", str(tmp_path), "--dead-letter-topic", "dead", *line)
    assert (result.code, text in result.err) == (2, True), result.err


def test_a_topic_that_cannot_be_written(qcli: Cli, topic: str, tmp_path: Path) -> None:
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path), "--json", "--dead-letter-topic", "a b")
    assert result.code == 2
    assert "a b" in result.err


def test_dead_letter_topic_of_a_pattern_that_cannot_be_used(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The other topics are exported."""
    long = f"{topic}.{'c' * 63}"[:62]
    for name in topic, long:
        qcli.publish(name, [b'{"user":1}'])
    arguments = ("--json", "--columns", "user:long", "--dead-letter-topic", "{topic}.dead")
    result = run_in_process(
        qcli, "to-parquet", "--topic-pattern", f"^{topic}", str(tmp_path), *arguments, "--format", "json"
    )
    assert result.code == 4
    assert {each["topic"]: (each["messages"], each["exit_code"]) for each in result.records} == {
        topic: (1, 0),
        long: (0, 1),
    }
    assert f"dead-letter topic of {long} would be {long}.dead, which is no name of a topic" in result.err
