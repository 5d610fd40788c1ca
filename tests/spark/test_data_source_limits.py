"""Tests for the sizes of batches and tasks of the data source `nsq`, and for the channel of a stream."""

import json
import time
from pathlib import Path

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.queries import Query, await_rows, broker_on, options_for, sequences
from spark.support import cli_of, numbers, until
from trio_nsq.log.gaps import Span
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.versions import HAS_READ_LIMITS, ReadAllAvailable

MB = 1_000_000

pytestmark = pytest.mark.skipif(not HAS_READ_LIMITS, reason="this Spark has no limits of batches")


def publish_bytes(qcli: Cli, topic: str, *sizes: int) -> None:
    """Publish bodies of these sizes, each in a record of its own."""
    for size in sizes:
        qcli.publish(topic, [b"x" * size])


# ---------------------------------------------------------------------- limits of a batch


def test_batches_are_limited_by_bytes(qcli: Cli, topic: str) -> None:
    """Whatever the sizes are elsewhere in the log. A message that is larger is a batch."""
    sizes = [10] * 5000 + [150_000] * 10 + [900_000] * 2
    qcli.publish(topic, [b"x" * 10] * 5000)
    publish_bytes(qcli, topic, *sizes[5000:])
    query = Query([], **options_for(qcli, topic), maxBytesPerTrigger="500000")
    batches = [sequences(batch) for batch in query.batches()]
    assert [sequence for batch in batches for sequence in batch] == list(range(5012))
    assert all(len(batch) == 1 or sum(sizes[n] for n in batch) <= 500_000 for batch in batches)
    assert len(batches) <= 7
    both = Query([], **options_for(qcli, topic), maxBytesPerTrigger=str(MB), maxOffsetsPerTrigger="2000")
    assert len(both.batch() or []) == 2000


def test_bytes_are_divided_among_brokers(qcli: Cli, topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as other:
        publish_bytes(qcli, topic, *[100_000] * 30)
        publish_bytes(cli_of(other), topic, *[100_000] * 10)
        addresses = f"{qcli.http_address},{other.http_address}"
        query = Query([], topic=topic, nsqdHttpAddress=addresses, maxBytesPerTrigger=str(2 * MB))
        first = query.batch() or []
        assert 16 <= len(first) <= 20
        assert 3 <= len([row for row in first if row[0] == other.http_address]) <= 5
        assert len(first) + sum(len(batch) for batch in query.batches()) == 40


def test_batches_wait_for_enough_messages(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, numbers(3))
    options = options_for(qcli, topic)
    query = Query([], **options, minOffsetsPerTrigger="5")
    assert sequences(query.batch()) == [0, 1, 2]  # the first one does not wait
    qcli.publish(topic, numbers(4))
    assert query.batch() is None
    qcli.publish(topic, numbers(1))
    assert sequences(query.batch()) == [3, 4, 5, 6, 7]
    qcli.publish(topic, numbers(1))
    assert query.batch() is None
    assert query.control.latestOffset(json.loads(query.checkpoint[-1]), ReadAllAvailable()) != json.loads(
        query.checkpoint[-1]
    )  # Trigger.Once
    assert sequences(Query(query.checkpoint, **options, minOffsetsPerTrigger="5").until_now().batch()) == [8]


def test_batches_do_not_wait_for_ever(qcli: Cli, topic: str) -> None:
    query = Query([], **options_for(qcli, topic), minOffsetsPerTrigger="5", maxTriggerDelay="300ms")
    qcli.publish(topic, numbers(1))
    begun_s = time.monotonic()
    assert sequences(query.batch()) == [0]
    qcli.publish(topic, numbers(1))
    assert await_rows(query, 1) == [(qcli.http_address, 1)]
    assert time.monotonic() - begun_s >= 0.3


# ---------------------------------------------------------------------- tasks


@pytest.mark.parametrize("stream", [False, True])
def test_tasks_are_divided_by_bytes(qcli: Cli, topic: str, stream: bool) -> None:
    """Large topics have a task for 64 MiB at most; small ones have one."""
    qcli.publish(topic, numbers(1000))

    def spans() -> list[Span]:
        options = CaseInsensitiveDict(options_for(qcli, topic))
        source = NsqDataSource(options)
        if not stream:
            return [each.span for each in source.reader(source.schema()).partitions()]
        query = Query([], **options_for(qcli, topic))
        assert query.plan()
        return [each.span for each in query.control.partitions({}, json.loads(query.checkpoint[0]))]

    assert spans() == [Span(0, 1000)]
    for _ in range(40):
        qcli.publish(topic, [b"x" * MB] * 4)
    found = spans()
    assert [span.first for span in found[1:]] == [span.end for span in found[:-1]]
    assert (found[0].first, found[-1].end) == (0, 1160)
    assert len(found) >= 3  # of 160 MB


# ---------------------------------------------------------------------- the channel


def depth(broker: Broker, topic: str) -> int:
    return int(broker.channel_stats(topic, "spark")["depth"])


def test_channel_follows_the_stream(broker: Broker, qcli: Cli, topic: str) -> None:
    """It has what is not processed yet, so that retention keeps it."""
    qcli.publish(topic, numbers(10))
    options = options_for(qcli, topic) | {"channel": "spark", "maxOffsetsPerTrigger": "4"}
    query = Query([], **options, startingOffsets="2")
    assert query.plan()
    assert depth(broker, topic) == 8
    assert sequences(query.rows()) == [2, 3, 4, 5]
    again = Query(
        query.checkpoint, **options
    )  # after a kill, before Spark has saved that the batch is complete
    assert sequences(again.rows()) == [2, 3, 4, 5]
    assert depth(broker, topic) == 8
    assert again.plan()
    assert depth(broker, topic) == 4
    assert sequences(again.rows()) == [6, 7, 8, 9]
    assert again.batch() is None
    assert depth(broker, topic) == 0


def test_channel_holds_retention_back(tmp_path: Path) -> None:
    with broker_on(tmp_path / "data", "0", "--max-bytes-per-file=20000") as (broker, _):
        qcli = cli_of(broker)
        query = Query(
            [], topic="t", nsqdHttpAddress=broker.http_address, channel="spark", maxOffsetsPerTrigger="60"
        )
        qcli.publish("t", [b"x" * 1000] * 20)
        assert sequences(query.batch()) == list(range(20))
        for _ in range(10):
            qcli.publish("t", [b"x" * 1000] * 10)
        broker.http("POST", "/channel/create", topic="t", channel="fast")
        broker.http("POST", "/channel/empty", topic="t", channel="fast")
        assert query.plan()
        first = json.loads(broker.http("GET", "/topic/bounds", topic="t"))["first_sequence"]
        assert first <= 20
        assert sequences(query.rows()) == list(range(20, 80))
        assert sequences(query.batch()) == list(range(80, 120))
        assert query.batch() is None
        until(lambda: json.loads(broker.http("GET", "/topic/bounds", topic="t"))["first_sequence"] > 80)
