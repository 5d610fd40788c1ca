"""Tests for writing with the data source `nsq`: batches, streams, repeated tasks and errors."""

import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.functions import udf
from pyspark.sql.types import StructType

from cli.support import Cli
from client.support.scripted_http import NSQD, OK, scripted
from interop.peers import Broker, nsqd
from spark.support import bodies_in, numbers
from trio_nsq.client.errors import BrokerUnreachable, PublishInDoubt
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.sink.batches import (
    BatchNumbers,
    RetryCheck,
    RowBlock,
    RowsDiffer,
    group_by_topic,
    make_batches,
    make_blocks,
)
from trio_nsq.spark.sink.options import SinkOptions
from trio_nsq.spark.sink.task import SinkError, SinkTask, TaskResult, publish
from trio_nsq.spark.sink.writers import NsqStreamWriter, NsqWriter

DEADLINE_S = 60.0
DAY_MS = 24 * 3600 * 1000


def table(**columns: Sequence[Any]) -> Any:
    """Return rows as a task receives them."""
    types = {"body": pa.binary(), "topic": pa.string(), "defer_ms": pa.int64()}
    return pa.record_batch({name: pa.array(values, types[name]) for name, values in columns.items()})


def sink(address: str, topic: str, *columns: str, **more: Any) -> SinkOptions:
    return SinkOptions((address,), topic, columns or ("body",), **more)


# ---------------------------------------------------------------------- with Spark


@pytest.mark.slow
def test_batch_write(spark: SparkSession, qcli: Cli, topic: str) -> None:
    """Strings, two topics and a delay. Spark finds the source by its name."""
    frame = spark.range(0, 25_000, 1, 2).selectExpr(
        "concat('zwölf ', id) AS body",
        f"CASE WHEN id % 10 = 0 THEN '{topic}-tenth' END AS topic",
        f"CASE WHEN id = 7 THEN {DAY_MS} ELSE 0 END AS defer_ms",
    )
    frame.write.format("nsq").options(topic=topic, nsqdHttpAddress=qcli.http_address).mode("append").save()
    found = [bodies_in(qcli.http_address, name) for name in (topic, f"{topic}-tenth")]
    wanted = [f"zwölf {n}".encode() for n in range(25_000)]
    assert [len(bodies) for bodies in found] == [22_500, 2_500]
    assert sorted(found[0] + found[1]) == sorted(wanted)
    first_half = [body for n, body in enumerate(wanted[:12_500]) if n % 10 == 0]
    of_it = set(first_half)
    assert [body for body in found[1] if body in of_it] == first_half


@pytest.mark.slow
def test_killed_task(spark: SparkSession, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """If a task is killed after it published a part, the next attempt publishes the rest."""
    seen = tmp_path / "seen"
    url = f"http://{qcli.http_address}/topic/bounds?topic={topic}"

    def body(number: int) -> str:
        context = TaskContext.get()
        if number == 40_500 and context is not None and context.attemptNumber() == 0:
            published, deadline = 0, time.monotonic() + DEADLINE_S
            while published < 10_000 and time.monotonic() < deadline:
                try:
                    published = json.loads(urlopen(url).read())["next_sequence"]
                except OSError:
                    time.sleep(0.01)  # the topic does not exist yet
            seen.write_text(str(published))
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{number:040d}"

    frame = spark.range(0, 45_000, 1, 1).select(udf(body, "string", useArrow=False)("id").alias("body"))
    frame.write.format("nsq").options(topic=topic, nsqdHttpAddress=qcli.http_address).mode("append").save()
    assert 10_000 <= int(seen.read_text()) < 45_000
    assert bodies_in(qcli.http_address, topic) == [b"%040d" % number for number in range(45_000)]


@pytest.mark.slow
def test_stream_that_repeats_its_last_batch(
    spark: SparkSession, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Simulate a crash after publishing and before Spark recorded it."""
    lines, checkpoint = tmp_path / "lines", tmp_path / "checkpoint"
    lines.mkdir()

    def run() -> None:
        source = spark.readStream.schema("value string").text(str(lines)).selectExpr("value AS body")
        writer = source.writeStream.format("nsq").options(topic=topic, nsqdHttpAddress=qcli.http_address)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    (lines / "1.txt").write_text("".join(f"first {n}\n" for n in range(500)))
    run()
    (checkpoint / "commits" / "0").unlink()
    (checkpoint / "commits" / ".0.crc").unlink(missing_ok=True)
    (lines / "2.txt").write_text("".join(f"second {n}\n" for n in range(500)))
    run()
    assert sorted(path.name for path in (checkpoint / "commits").glob("[0-9]")) == ["0", "1"]
    found = bodies_in(qcli.http_address, topic)
    assert found == [b"%s %d" % (word, n) for word in (b"first", b"second") for n in range(500)]


# ---------------------------------------------------------------------- tasks


def test_topics_and_delays(broker: Broker, topic: str) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        broker.create(name, "c")
    rows = table(
        body=[b"\0\xff", b"now", b"later", "später".encode(), b"other", b"now too"],
        topic=[None, topic, None, None, other, None],
        defer_ms=[None, 0, DAY_MS, DAY_MS, 0, 0],
    )
    where = sink(broker.http_address, topic, "body", "topic", "defer_ms")
    assert publish(where, SinkTask("topics", 0), [rows]) == TaskResult(messages=6)
    assert bodies_in(broker.http_address, topic) == [
        b"\0\xff",
        b"now",
        b"now too",
        b"later",
        "später".encode(),
    ]
    assert bodies_in(broker.http_address, other) == [b"other"]
    stats = broker.channel_stats(topic, "c")
    assert (stats["depth"], stats["deferred_count"]) == (3, 2)


class Killed(Exception):
    """Simulates the kill of a task."""


def test_two_attempts_in_sequence(qcli: Cli, topic: str) -> None:
    where, task, bodies = sink(qcli.http_address, topic, block_rows=4), SinkTask("attempts", 0), numbers(10)

    def dies_at(row: int) -> Iterator[Any]:
        yield table(body=bodies[:row])
        raise Killed

    for row, published in ((3, 0), (5, 4), (9, 8), (2, 8)):
        with pytest.raises(Killed):
            publish(where, task, dies_at(row))
        assert (bodies_in(qcli.http_address, topic) if published else []) == bodies[:published]
    done = publish(where, task, [table(body=bodies[:7]), table(body=bodies[7:])])
    assert done == TaskResult(messages=10, repeated=8)
    assert publish(where, SinkTask("attempts", 1), [table(body=bodies)]) == TaskResult(messages=10)
    assert bodies_in(qcli.http_address, topic) == bodies * 2
    for other in (bodies[::-1], bodies[:9], bodies[:4], [*bodies, b"more"]):
        with pytest.raises(RowsDiffer, match=r"with the same jobId, .* sortWithinPartitions"):
            publish(where, task, [table(body=other)])
    assert bodies_in(qcli.http_address, topic) == bodies * 2
    lax = sink(qcli.http_address, topic, idempotent=False)
    for _ in range(2):
        assert publish(lax, task, [table(body=bodies[::-1])]) == TaskResult(messages=10)
    assert bodies_in(qcli.http_address, topic) == bodies * 2 + bodies[::-1] * 2


def test_two_attempts_at_once(qcli: Cli, topic: str) -> None:
    """Two attempts run at once, and one overtakes the other."""
    where, task, bodies = sink(qcli.http_address, topic, block_rows=4), SinkTask("both", 0), numbers(10)

    def overtaken() -> Iterator[Any]:
        yield table(body=bodies[:4])
        assert publish(where, task, [table(body=bodies)]) == TaskResult(messages=10, repeated=4)
        yield table(body=bodies[4:])

    assert publish(where, task, overtaken()) == TaskResult(messages=10, repeated=6)
    assert bodies_in(qcli.http_address, topic) == bodies


def test_two_attempts_with_different_rows(qcli: Cli, topic: str) -> None:
    """The later attempt fails at the first difference, instead of treating its rows as published."""
    where, task, bodies = sink(qcli.http_address, topic, block_rows=4), SinkTask("both", 0), numbers(8)

    def second_number(end: list[bytes]) -> int:
        numbering = BatchNumbers()
        return [numbering.next(topic, 0, each) for each in (bodies[:4], end)][1]

    ends = ([b"other%d" % n] * 4 for n in range(1_000_000))  # the number of `bodies` may be high
    other = next(end for end in ends if second_number(end) > second_number(bodies[4:]))

    def overtaken() -> Iterator[Any]:
        yield table(body=bodies[:4])
        publish(where, task, [table(body=bodies[:4] + other)])
        yield table(body=bodies[4:])

    with pytest.raises(RowsDiffer, match="an earlier attempt of this task"):
        publish(where, task, overtaken())
    assert bodies_in(qcli.http_address, topic) == bodies[:4] + other


def open_sockets() -> int:
    """Return the number of open sockets of this process."""
    return sum(each.is_socket() for each in Path("/proc/self/fd").iterdir())


def test_many_topics_use_few_connections(qcli: Cli, topic: str) -> None:
    names = [f"{topic}-{n}" for n in range(8)]
    where = sink(qcli.http_address, "", "body", "topic", block_rows=8, max_connections=2)
    before = open_sockets()

    def rows() -> Iterator[Any]:
        for n in range(3):
            yield table(body=numbers(8, 8 * n), topic=names)
            assert open_sockets() <= before + 2

    task = SinkTask("topics", 0)
    for repeated in (0, 24):
        assert publish(where, task, rows()) == TaskResult(messages=24, repeated=repeated)
    assert [bodies_in(qcli.http_address, name) for name in names] == [
        [b"%d" % (8 * row + n) for row in range(3)] for n in range(8)
    ]


def test_nsqd_that_may_have_stored_a_batch() -> None:
    """If an answer is lost, the batch is sent again; the other batches of the task are not."""
    rows = [table(body=[b"a", b"b"])]
    with scripted(NSQD, None, OK) as stock:
        done = publish(sink(stock.address, "t"), SinkTask("doubt", 0), rows)
        assert done == TaskResult(messages=2, at_least_once={stock.address})
        assert [request.split("?")[0] for request, _ in stock.seen] == [
            "GET /topic/producer",
            "POST /mpub",
            "POST /mpub",
        ]
    with scripted(NSQD, None, None, None) as stock, pytest.raises(PublishInDoubt):
        publish(sink(stock.address, "t"), SinkTask("doubt", 0), rows)


def test_numbers_of_micro_batches(qcli: Cli, topic: str) -> None:
    where, rows = sink(qcli.http_address, topic), [table(body=numbers(10))]
    for micro_batch, repeated in ((0, 0), (0, 10), (3, 0), (3, 10)):
        done = publish(where, SinkTask("query", 0, micro_batch), rows)
        assert done == TaskResult(messages=10, repeated=repeated)
    with pytest.raises(RowsDiffer, match="with the same micro-batch"):
        publish(where, SinkTask("query", 0, 3), [table(body=numbers(9))])
    with pytest.raises(
        RowsDiffer, match="has micro-batch 3 of this query, and this is 2: the checkpoint was set"
    ):
        publish(where, SinkTask("query", 0, 2), rows)
    assert bodies_in(qcli.http_address, topic) == numbers(10) * 2


def test_partitions_are_distributed_over_brokers(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Partitions are published to the brokers in turn. One is an nsqd, where delivery is at least once."""
    with nsqd(tmp_path / "nsqd") as stock:
        stock.create(topic, "c")
        where = SinkOptions((stock.http_address, qcli.http_address), topic, ("body", "defer_ms"))
        rows = [table(body=[b"a", b"b", b"c", b"d"], defer_ms=[0, 0, 3_600_000, 3_600_000])]
        for _ in range(2):
            done = [publish(where, SinkTask("dealt", partition), rows) for partition in range(3)]
        assert [len(each.at_least_once) for each in done] == [1, 0, 1]
        assert bodies_in(qcli.http_address, topic) == [b"a", b"b", b"c", b"d"]
        stats = stock.channel_stats(topic, "c")
        assert (stats["depth"], stats["deferred_count"]) == (8, 8)
        with pytest.raises(SinkError, match=r"INVALID_DEFER.*defer_ms is 3600001, .*--max-req-timeout"):
            publish(where, SinkTask("dealt", 0), [table(body=[b"a"], defer_ms=[3_600_001])])


def test_invalid_rows(qcli: Cli, topic: str) -> None:
    columns = ("body", "topic", "defer_ms")
    for where, row, text in (
        (sink(qcli.http_address, topic), (b"", None, None), "the column body is empty, .*emptyBodies=skip"),
        (sink(qcli.http_address, topic), (None, None, None), "the column body is null"),
        (
            sink(qcli.http_address, topic),
            (b"x", "no topic", None),
            "column topic: 'no topic' is not a valid topic",
        ),
        (sink(qcli.http_address, ""), (b"x", None, None), "topic is null, and the option topic is not set"),
        (sink(qcli.http_address, topic), (b"x", None, -1), "the column defer_ms is -1, less than 0"),
        (
            sink(qcli.http_address, topic),
            (b"x" * 1024 * 1025, None, 0),
            "of 1,049,600 bytes, row 2 .*--max-msg",
        ),
        (sink(qcli.http_address, topic), (b"x", None, 400 * DAY_MS), "more than its --max-defer"),
    ):
        rows = [
            table(body=[b"good"], topic=[topic], defer_ms=[0]),
            table(body=[b"good", row[0]], topic=[topic, row[1]], defer_ms=[0, row[2]]),
        ]
        with pytest.raises(SinkError, match=text) as caught:
            publish(SinkOptions(where.addresses, where.topic, columns), SinkTask(topic, 5), rows)
        if "row" in text or "column" in text:
            assert "row 2 of partition 5" in str(caught.value)
        topic += "."
    left_out = sink(qcli.http_address, topic, "body", "topic", "defer_ms", skips_empty=True)
    rows = [table(body=[b"", b"a", None, b"b"], topic=[None] * 4, defer_ms=[0] * 4)]
    assert publish(left_out, SinkTask(topic, 0), rows) == TaskResult(messages=2, empty=2)
    assert bodies_in(qcli.http_address, topic) == [b"a", b"b"]


def set_limit(broker: Broker, topic: str, max_messages: int) -> None:
    """Set how many messages may wait in the topic; 0: no limit."""
    body = json.dumps({"max_messages": max_messages}).encode()
    url = f"http://{broker.http_address}/topic/settings?topic={topic}"
    urlopen(Request(url, body, method="PUT")).close()


def test_refused_publishes(broker: Broker, topic: str) -> None:
    """A full topic, a batch that is too large, and an unreachable broker."""
    broker.create(topic, "c")
    set_limit(broker, topic, 5)
    where = sink(broker.http_address, topic, patience_s=0.0)
    publish(where, SinkTask("filling", 0), [table(body=numbers(4))])
    with pytest.raises(SinkError, match=r"is full: .* repeat the write once the topic or the disk has space"):
        publish(where, SinkTask("full", 0), [table(body=numbers(4))])
    set_limit(broker, topic, 0)
    large = sink(broker.http_address, topic, batch_bytes=8 * 1024 * 1024)
    with pytest.raises(SinkError, match=r"BODY_TOO_BIG.*make the option batchBytes smaller"):
        publish(large, SinkTask("large", 0), [table(body=[b"x" * 900_000] * 8)])
    assert bodies_in(broker.http_address, topic) == numbers(4)
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1 cannot be reached"):
        publish(sink("127.0.0.1:1", topic, patience_s=0.0), SinkTask("gone", 0), [table(body=numbers(4))])


# ---------------------------------------------------------------------- planning and log messages


def planned(schema: str, overwrite: bool = False, stream: bool = False, **options: str) -> Any:
    """Create the writer, as Spark's driver does."""
    source = NsqDataSource(CaseInsensitiveDict(options))
    columns = StructType()
    for column in schema.split(", "):
        name, _, kind = column.partition(" ")
        columns.add(name, kind)
    return source.streamWriter(columns, overwrite) if stream else source.writer(columns, overwrite)


def test_invalid_writes_are_refused_before_publishing() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("body binary", {}, "needs the option topic, or a column topic"),
        ("body binary", {"topic": "no topic"}, "no topic is not a valid topic name"),
        ("body binary", {"topic": "t", "topc": "u"}, "the sink nsq has no option topc"),
        (
            "body binary",
            {"topic": "t", "nsqdHttpAddress": "here:4151,there"},
            "must be host:port, .*4151,there",
        ),
        ("body binary", {"topic": "t", "batchBytes": "0"}, "batchBytes must be a whole number, 1 or more"),
        ("body binary", {"topic": "t", "idempotent": "maybe"}, "idempotent must be true or false"),
        ("body binary", {"topic": "t", "emptyBodies": "keep"}, "emptyBodies must be fail or skip: 'keep'"),
        ("body binary", {"topic": "t", "jobId": "no/slash"}, "jobId must be 1 to 48 of"),
        ("topic string", {}, "body, topic, defer_ms, and body is required"),
        ("body integer", {"topic": "t"}, "body must be binary or string, not int: cast it"),
        ("body string, defer_ms double", {"topic": "t"}, "defer_ms must be .*, not double"),
        ("body string, topic binary", {}, "topic must be string, not binary"),
        ("body string, seq long, x integer", {"topic": "t"}, "not seq, x: drop these columns"),
        ("body string, BODY string", {"topic": "t"}, "each once"),
    ]
    for schema, options, text in cases:
        with pytest.raises(OptionError, match=text):
            planned(schema, **options)
    with pytest.raises(OptionError, match=r"cannot be overwritten, only appended to: mode\('append'\)"):
        planned("body binary", overwrite=True, topic="t")
    with pytest.raises(OptionError, match=r"only the output mode append"):
        planned("body binary", overwrite=True, stream=True, topic="t")
    with pytest.raises(OptionError, match="a stream is identified by its checkpoint"):
        planned("body binary", stream=True, topic="t", jobId="x")


def test_log_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    batch: NsqWriter = planned("body binary", topic="t", jobId="mine")
    stream: NsqStreamWriter = planned("body binary", topic="t", stream=True, checkpointLocation="x")
    batch.commit([TaskResult(5), TaskResult(5, 5)])
    stream.commit([TaskResult(5)], 7)
    assert not caplog.messages
    batch.abort([TaskResult(1000), None, TaskResult(1)])
    stream.abort([None], 7)
    batch.abort([TaskResult(1, at_least_once={"h:1"})])
    batch.commit([TaskResult(5, empty=1200), TaskResult(5, at_least_once={"h:1"})])
    planned("body binary", topic="t", idempotent="false").commit([TaskResult(5, at_least_once={"h:1"})])
    failed, repeats, again, empty, once = caplog.messages
    assert (
        "2 of 3 partitions are published, with 1,001 messages, and possibly some of the others; they"
        in failed
    )
    assert (
        "Repeating the write with .option('jobId', 'mine') publishes the missing messages, without" in failed
    )
    assert repeats.startswith("nsq: micro-batch 7 failed: 0 of 1 partitions")
    assert "publishes them again" in again
    assert "1,200 rows without a body were skipped" in empty
    assert "published at least once: h:1 does not deduplicate" in once


# ---------------------------------------------------------------------- cuts and numbers


@given(
    st.lists(
        st.tuples(st.binary(max_size=6) | st.none(), st.sampled_from([None, "t", "u"]), st.integers(0, 2)),
        max_size=30,
    ),
    st.lists(st.integers(1, 9), max_size=10),
    st.integers(1, 20),
)
def test_batches_depend_only_on_rows(
    rows: list[tuple[bytes | None, str | None, int]], cuts: list[int], batch_bytes: int
) -> None:
    """The batches do not depend on the sizes of Spark's parts. Each row is in one batch, in order within
    topic and delay.
    """

    def made(sizes: list[int]) -> tuple[list[RowBlock], list[Any]]:
        parts, start = [], 0
        for size in [*sizes, len(rows)]:
            some = rows[start : start + size]
            bodies, topics, delays = zip(*some, strict=True) if some else ((), (), ())
            parts.append(pa.Table.from_batches([table(body=bodies, topic=topics, defer_ms=delays)]))
            start += len(some)
        found = list(make_blocks(parts, max_rows=7, max_bytes=16))
        full = [replace(block, bodies=[body or b"" for body in block.bodies]) for block in found]
        by_topic = (group for block in full for group in group_by_topic(block, "d"))
        return found, list(make_batches(by_topic, BatchNumbers(5), batch_bytes))

    whole, pieces = made([]), made(cuts)
    assert whole == pieces
    for block in whole[0]:
        assert len(block) <= 7
        assert len(block) == 1 or sum(len(body or b"") for body in block.bodies) <= 16
    told = [(b.topic, b.delay_ms, body) for b in whole[1] for body in b.bodies]
    wanted = [(topic or "d", delay, body or b"") for body, topic, delay in rows]
    assert Counter(told) == Counter(wanted)
    for key in {each[:2] for each in wanted}:
        assert [each for each in told if each[:2] == key] == [each for each in wanted if each[:2] == key]
    assert [b.number for b in whole[1]] == sorted({b.number for b in whole[1]})


def test_batch_numbers() -> None:
    first = [BatchNumbers(n).next("t", 0, [b"x"]) for n in (None, 0, 1, 2)]
    assert first[0] == first[1] < first[2] < first[3]
    assert BatchNumbers((1 << 28) - 1).next("t", 0, [b"x"]) < 1 << 63
    with pytest.raises(RowsDiffer, match="268,435,456 micro-batches"):
        BatchNumbers(1 << 28)
    for other in (("u", 0, [b"x"]), ("t", 1, [b"x"]), ("t", 0, [b"y"]), ("t", 0, [b"x", b""])):
        assert BatchNumbers().next(*other) != first[0]
    later = BatchNumbers(1)
    for check in (RetryCheck(None, later), RetryCheck(first[1], later)):
        check.check(first[2])
        check.check_complete()
    with pytest.raises(RowsDiffer):
        RetryCheck(first[2], later).check_complete()
