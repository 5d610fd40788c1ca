"""Tests for what differs between versions of Spark. `make oldest-spark` runs them with the oldest."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.support import cli_of, discard, numbers
from trio_nsq.client.reading.broker_log import LogReplaced
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.source.columns import infer_schema, row_format
from trio_nsq.spark.source.options import ReadMode, ReadOptions, SourceError
from trio_nsq.spark.source.without_limits import StreamReaderWithoutLimits
from trio_nsq.spark.versions import HAS_READ_LIMITS, VERSION


@pytest.mark.slow
def test_stream_without_limits(
    spark: SparkSession, broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """A query that is started again reads each message once, and detects another log of the same name."""
    seen: list[tuple[int, bytes]] = []

    def take(batch: DataFrame, _: int) -> None:
        seen.extend((row.seq, bytes(row.body)) for row in batch.collect())

    def read(**options: str) -> Any:
        source = spark.readStream.format("nsq").options(
            topic=topic, nsqdHttpAddress=qcli.http_address, **options
        )
        writer = source.load().writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    qcli.publish(topic, numbers(100))
    read()
    assert seen == list(enumerate(numbers(100)))
    qcli.publish(topic, numbers(30, 100))
    read()
    query = read()  # nothing is new
    assert sum(progress.numInputRows for progress in query.recentProgress) == 0
    assert seen == list(enumerate(numbers(130)))
    broker.http("POST", "/topic/delete", topic=topic)
    qcli.publish(topic, numbers(1000))
    with pytest.raises(Exception, match="it was deleted and recreated, or lost its last messages"):
        read()
    assert len(seen) == 130


@pytest.mark.skipif(HAS_READ_LIMITS, reason="this Spark has limits of batches")
def test_limits_are_refused() -> None:
    source = NsqDataSource({"topic": "t", "maxOffsetsPerTrigger": "10"})
    with pytest.raises(
        OptionError, match=f"maxOffsetsPerTrigger needs Spark 4.2 or newer; this is Spark {VERSION}"
    ):
        source.streamReader(source.schema())


# ---------------------------------------------------------------------- as Spark before 4.2 calls a reader


def reader(**options: str) -> StreamReaderWithoutLimits:
    options = {"topic": "t", "columns": "seq", **options}
    form = row_format(options, infer_schema(options, list))
    return StreamReaderWithoutLimits(ReadOptions.parse(options, ReadMode.STREAM), form)


def saved(offset: Any) -> Any:
    """Return an offset as Spark reads it from the checkpoint."""
    return json.loads(json.dumps(offset))


def planned(query: StreamReaderWithoutLimits, start: Any, end: Any) -> list[int]:
    return [n for partition in query.partitions(start, end) for n in range(*partition.span)]


def test_batches_end_where_the_log_ends(qcli: Cli, topic: str) -> None:
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "startingOffsets": "3"}
    qcli.publish(topic, numbers(10))
    query = reader(**options)
    first = saved(query.latestOffset())
    assert planned(query, query.initialOffset(), first) == list(range(3, 10))
    assert saved(query.latestOffset()) == first
    qcli.publish(topic, numbers(5))
    second = saved(query.latestOffset())
    assert planned(query, first, second) == list(range(10, 15))
    again = reader(**options)
    assert planned(again, first, second) == list(range(10, 15))  # after a kill during the batch
    assert saved(again.latestOffset()) == second
    after = reader(**options)  # after a kill between two batches
    qcli.publish(topic, numbers(1))
    assert planned(after, second, saved(after.latestOffset())) == [15]


def test_latest_is_fixed_by_the_first_batch(qcli: Cli, topic: str) -> None:
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "startingOffsets": "latest"}
    qcli.publish(topic, numbers(10))
    query = reader(**options)
    first = saved(query.latestOffset())
    assert planned(query, {}, first) == []
    qcli.publish(topic, numbers(5))
    again = reader(**options)
    assert planned(again, first, saved(again.latestOffset())) == list(range(10, 15))


def test_lost_messages_and_brokers_are_errors(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A restarted query does not know its position when it asks for the end, so it checks when it plans."""
    qcli.publish(topic, numbers(10))
    with qcli_serve(tmp_path / "data") as other:
        cli_of(other).publish(topic, numbers(10))
        both = {"topic": topic, "nsqdHttpAddress": f"{qcli.http_address},{other.http_address}"}
        start = saved(reader(**both).latestOffset())
        alone = reader(topic=topic, nsqdHttpAddress=qcli.http_address)
        qcli.publish(topic, numbers(1))
        end = saved(alone.latestOffset())
        with pytest.raises(SourceError, match=f"the checkpoint has the broker {other.http_address}"):
            alone.partitions(start, end)
        other.http("POST", "/topic/delete", topic=topic)
        cli_of(other).publish(topic, numbers(20))
        again = reader(**both)
        end = saved(again.latestOffset())
        with pytest.raises(LogReplaced, match=f"topic {topic} on {other.http_address} is not the one"):
            again.partitions(start, end)


def test_retention_that_passes_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    """What was deleted before the checkpoint is none."""
    with qcli_serve(tmp_path / "data", "--max-bytes-per-file=100000") as broker:
        options = {"nsqdHttpAddress": broker.http_address, "startingOffsets": "0"}
        cli_of(broker).publish("t", numbers(10))
        start = saved(reader(**options).latestOffset())
        first, end = discard(broker, "t", 10)
        position = saved(reader(**options).latestOffset())
        with pytest.raises(
            SourceError, match=f"messages 10 to {first - 1} of topic t on .* are no longer retained"
        ):
            reader(**options).partitions(start, position)
        with pytest.raises(
            SourceError, match=f"messages 0 to {first - 1} of topic t on .* are no longer retained"
        ):
            reader(**options).partitions({}, position)  # a new query
        cli_of(broker).publish("t", numbers(5))
        again = reader(**options)
        assert planned(again, position, saved(again.latestOffset())) == list(range(end, end + 5))
