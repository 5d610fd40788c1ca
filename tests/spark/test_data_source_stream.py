"""Tests for streams with the data source `nsq`: with Spark, and with a substitute for single calls."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.queries import Query, broker_on, options_for, reader, sequences
from spark.support import HOUR_NS, NOON_NS, cli_of, discard, numbers, write_log
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.client.reading.broker_log import LogReplaced
from trio_nsq.protocol.errors import NSQError
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.source.fleet import LogKey
from trio_nsq.spark.source.offsets import (
    LogOffset,
    LogOffsets,
    NotReached,
    build_offset,
    parse_offset,
    share_limit,
)
from trio_nsq.spark.source.options import SourceError, Subscription
from trio_nsq.spark.versions import ReadAllAvailable

# ---------------------------------------------------------------------- with Spark


@pytest.mark.slow
def test_stream_reads_each_message_once(spark: SparkSession, tmp_path: Path) -> None:
    """Triggers of limited size, with a restart of the broker and of the query in between."""
    seen: list[tuple[int, bytes]] = []
    sizes: list[int] = []

    def take(batch: DataFrame, _: int) -> None:
        rows = [(row.seq, bytes(row.body)) for row in batch.collect()]
        seen.extend(rows)
        sizes.append(len(rows))

    def stream(**options: str) -> Any:
        source = spark.readStream.format("nsq").options(topic="t", columns="seq,body", **options)
        writer = source.load().writeStream.foreachBatch(take)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint"))

    with broker_on(tmp_path / "data") as (broker, port):
        cli_of(broker).publish("t", numbers(250))
        options = {"nsqdHttpAddress": broker.http_address}
        query = (
            stream(**options, maxOffsetsPerTrigger="100").trigger(processingTime="50 milliseconds").start()
        )
        query.processAllAvailable()
        assert (len(seen), sizes) == (250, [100, 100, 50])
        broker.process.kill()
        broker.process.wait()
    with broker_on(tmp_path / "data", port) as (broker, _):
        cli_of(broker).publish("t", numbers(30, 250))
        query.processAllAvailable()
        assert len(seen) == 280
        query.stop()
        cli_of(broker).publish("t", numbers(200, 280))
        query = stream(**options, maxOffsetsPerTrigger="150").trigger(availableNow=True).start()
        query.awaitTermination()
        assert (query.exception(), sizes[-2:]) == (None, [150, 50])
        assert seen == list(enumerate(numbers(480)))
        first, last = (progress.sources[0] for progress in query.recentProgress[:2])
        assert json.loads(first.endOffset)[broker.http_address]["sequence"] == 430
        state = json.loads(first.latestOffset)[broker.http_address]
        assert (state["sequence"], state["behind"]) == (480, 50)
        assert json.loads(last.endOffset)[broker.http_address]["sequence"] == 480
        broker.http("POST", "/topic/delete", topic="t")
        cli_of(broker).publish("t", numbers(1000))
        query = stream(**options).trigger(availableNow=True).start()
        with pytest.raises(Exception, match="it was deleted and recreated, or lost its last messages"):
            query.awaitTermination()
    assert len(seen) == 480


# ---------------------------------------------------------------------- everything once


def test_triggers_have_a_limited_size(qcli: Cli, topic: str) -> None:
    options = options_for(qcli, topic)
    qcli.publish(topic, numbers(25))
    query = Query([], **options, maxOffsetsPerTrigger="10", minPartitions="3")
    assert [sequences(batch) for batch in query.batches()] == [
        [*range(10)],
        [*range(10, 20)],
        [*range(20, 25)],
    ]
    qcli.publish(topic, numbers(3))
    again = Query(query.checkpoint, **options)
    assert [sequences(batch) for batch in again.batches()] == [[25, 26, 27]]


def test_partitions(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, numbers(100))
    for least, spans in (("0", 1), ("4", 4)):
        planner = reader(**options_for(qcli, topic), minPartitions=least)
        end = planner.latestOffset({}, ReadAllAvailable())
        found = planner.partitions({}, end)
        assert len(found) == spans
        assert [n for each in found for n in range(*each.span)] == list(range(100))
        assert planner.partitions(end, end) == []


def test_two_brokers_are_read_fairly_and_in_order(qcli: Cli, topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as other:
        addresses = [qcli.http_address, other.http_address]
        qcli.publish(topic, numbers(90))
        cli_of(other).publish(topic, numbers(10))
        there, back = ",".join(addresses), ", ".join([*reversed(addresses), addresses[0]])
        query = Query([], topic=topic, nsqdHttpAddress=there, maxOffsetsPerTrigger="50")
        first = query.batch()
        assert first is not None
        assert 48 <= len(first) <= 50
        assert {broker for broker, _ in first} == set(addresses)
        again = Query(query.checkpoint, topic=topic, nsqdHttpAddress=back)
        rest = again.batch()
        assert rest is not None
        assert again.batch() is None  # the order of the addresses does not change the offset
        assert sorted(first + rest) == sorted(
            [(addresses[0], n) for n in range(90)] + [(addresses[1], n) for n in range(10)]
        )


def test_an_empty_topic(broker: Broker, qcli: Cli, topic: str) -> None:
    broker.create(topic)
    query = Query([], **options_for(qcli, topic))
    assert [query.batch(), query.batch()] == [
        [],
        None,
    ]  # the first batch, which is empty, saves the starting position
    qcli.publish(topic, numbers(2))
    assert [sequences(each) for each in query.batches()] == [[0, 1]]


def test_available_now_fixes_the_end_at_the_start(qcli: Cli, topic: str) -> None:
    options = options_for(qcli, topic)
    qcli.publish(topic, numbers(20))
    query = Query([], **options, maxOffsetsPerTrigger="15").until_now()
    assert sequences(query.batch()) == list(range(15))
    qcli.publish(topic, numbers(5))
    assert [sequences(each) for each in query.batches()] == [[15, 16, 17, 18, 19]]
    state = query.control.reportLatestOffset()
    assert state is not None
    state[qcli.http_address].pop("published_per_s", None)  # after a second
    assert state == {qcli.http_address: {"sequence": 25, "behind": 5}}
    again = Query(query.checkpoint, **options).until_now()
    assert [sequences(each) for each in again.batches()] == [[20, 21, 22, 23, 24]]


def test_columns_and_rows(qcli: Cli, topic: str) -> None:
    """Arrow batches have at most 10,000 rows. Columns can be selected in any order."""
    qcli.publish(topic, numbers(25_000))
    stream = reader(**options_for(qcli, topic), columns="body, seq")
    (partition,) = stream.partitions({}, stream.latestOffset({}, ReadAllAvailable()))
    batches = list(stream.read(partition))
    assert max(batch.num_rows for batch in batches) == 10_000
    assert batches[0].schema.names == ["body", "seq"]
    rows = [row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]
    assert rows == [(b"%d" % n, n) for n in range(25_000)]


# ---------------------------------------------------------------------- starting positions


def test_latest_is_fixed_by_the_first_batch(qcli: Cli, topic: str) -> None:
    """A query that was killed before its first batch completed starts at the same position again."""
    options = options_for(qcli, topic) | {"startingOffsets": "latest"}
    qcli.publish(topic, numbers(10))
    query = Query([], **options)
    assert query.batch() == []
    qcli.publish(topic, numbers(5))
    assert query.plan()
    qcli.publish(topic, numbers(5))
    again = Query(query.checkpoint, **options)
    assert sequences(again.rows()) == [10, 11, 12, 13, 14]
    assert sequences(again.batch()) == [15, 16, 17, 18, 19]


def test_starting_positions(tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS + n * HOUR_NS, [b"%d" % n]) for n in range(12)])
    seconds = (NOON_NS + 10 * HOUR_NS) // 10**9
    with qcli_serve(tmp_path / "data") as broker:
        options = {"topic": "t", "nsqdHttpAddress": broker.http_address}
        places: list[object] = [10, "10", f"@{seconds}", {"first": 0, "sequence": 10}]
        for starting in ["10", *(json.dumps({broker.http_address: place}) for place in places)]:
            assert sequences(Query([], **options, startingOffsets=starting).batch()) == [10, 11]
        later = Query([], **options, startingTimestamp=str(seconds * 1000 + 1))
        assert sequences(later.batch()) == [11]


def test_added_broker_starts_at_the_option(qcli: Cli, topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as other:
        qcli.publish(topic, numbers(5))
        cli_of(other).publish(topic, numbers(3))
        query = Query([], **options_for(qcli, topic))
        assert sequences(query.batch()) == list(range(5))
        both = {"topic": topic, "nsqdHttpAddress": f"{qcli.http_address},{other.http_address}"}
        joined = Query(query.checkpoint, **both)
        assert joined.batch() == [(other.http_address, n) for n in range(3)]
        assert joined.rows() == [(other.http_address, n) for n in range(3)]
        assert joined.batch() is None
        cli_of(other).publish(topic, numbers(1))
        alone = Query(joined.checkpoint, **options_for(qcli, topic))
        with pytest.raises(
            SourceError, match=f"the checkpoint has the broker {other.http_address}, which nsqdHttpAddress"
        ):
            alone.plan()
        without = Query(joined.checkpoint, **options_for(qcli, topic), failOnDataLoss="false")
        assert without.batch() is None
        qcli.publish(topic, numbers(1))
        assert without.batch() == [(qcli.http_address, 5)]
        assert Query(without.checkpoint, **both).batch() == [(other.http_address, 3)]


# ---------------------------------------------------------------------- failures


def test_unreachable_broker_is_retried(tmp_path: Path) -> None:
    options = {"topic": "t", "columns": "broker,seq"}
    with ThreadPoolExecutor(1) as thread:
        with broker_on(tmp_path / "data") as (broker, port):
            options["nsqdHttpAddress"] = broker.http_address
            cli_of(broker).publish("t", numbers(5))
            query = Query([], **options)
            assert sequences(query.batch()) == list(range(5))
        for ask in (query.batch, lambda: Query(query.checkpoint, **options).until_now().batches()):
            waiting = thread.submit(ask)
            with broker_on(tmp_path / "data", port):
                assert waiting.result() in (None, [])
        with pytest.raises(
            BrokerUnreachable, match=f"the broker at {broker.http_address} cannot be reached: "
        ):
            Query(query.checkpoint, **options, patienceMs="150").plan()


def test_retention_passes_the_checkpoint(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--max-bytes-per-file=100000") as broker:
        options = options_for(cli_of(broker), "t")
        broker.create("t", "c")
        cli_of(broker).publish("t", numbers(10))
        planned, query = Query([], **options), Query([], **options)
        assert planned.plan()
        assert sequences(query.batch()) == list(range(10))
        first, end = discard(broker, "t", 10)
        for attempt, lost in ((planned.rows, "0 to 9"), (query.plan, f"10 to {first - 1}")):
            with pytest.raises(
                SourceError, match=f"messages {lost} of topic t on .* are no longer retained; .*failOn"
            ):
                attempt()
        lax = options | {"failOnDataLoss": "false", "maxOffsetsPerTrigger": "5"}
        assert Query(planned.checkpoint, **lax).rows() == []
        over = Query(query.checkpoint, **lax)
        assert sequences(over.batch()) == list(range(first, first + 5))
        assert sequences(over.rows()) == list(range(first, first + 5))
        with pytest.raises(
            SourceError, match=f"messages 3 to {first - 1} of topic t on .* are no longer retained"
        ):
            Query([], **options, startingOffsets="3").plan()
        assert sequences(Query([], **lax, startingOffsets="3").batch()) == list(range(first, first + 5))
        assert sequences(Query([], **options).batch()) == list(range(first, end))


@pytest.mark.parametrize("published", [None, 0, 5, 10, 20])
def test_recreated_topic_is_an_error(broker: Broker, qcli: Cli, topic: str, published: int | None) -> None:
    """With fewer messages, as many, or more: the new topic is always detected, also with
    failOnDataLoss=false.
    """
    options = options_for(qcli, topic)
    qcli.publish(topic, numbers(10))
    idle, planned, read = (Query([], **options, failOnDataLoss="false") for _ in range(3))
    assert sequences(idle.batch()) == list(range(10))
    assert planned.plan()
    assert read.plan()
    (partition,) = read.control.partitions({}, json.loads(read.checkpoint[-1]))
    broker.http("POST", "/topic/delete", topic=topic)
    if published is not None:
        broker.create(topic)
        qcli.publish(topic, numbers(published))
    started = Query(idle.checkpoint, **options)
    attempts: list[Callable[[], object]] = [started.plan, planned.rows, idle.plan]
    if published is not None:
        attempts.append(lambda: list(read.tasks.read(partition)))
    for attempt in attempts:
        with pytest.raises(LogReplaced, match="deleted and recreated"):
            attempt()


def test_missing_topic_or_position(qcli: Cli, topic: str) -> None:
    options = options_for(qcli, topic)
    with pytest.raises(SourceError, match=f"there is no topic {topic} on .*: create it"):
        Query([], **options).plan()
    qcli.publish(topic, numbers(10))
    for more, text in (
        ({"startingOffsets": "11"}, "ends before message 10, and the query starts at 11"),
        ({"startingOffsets": "soon"}, "INVALID_AT: 'soon' is not"),
        ({"startingOffsets": "{}"}, "have no entry for the broker"),
        ({"startingOffsets": "{"}, "are not JSON"),
    ):
        with pytest.raises(NSQError, match=text):
            Query([], **options, **more).plan()


def test_invalid_options(qcli: Cli) -> None:
    for more, text in (
        ({"endingOffsets": "10"}, r"endingOffsets is for spark\.read only"),
        ({"endingtimestamp": "10"}, r"endingTimestamp is for spark\.read only"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be a whole number, 1 or more"),
        ({"startingTimestamp": "noon"}, "startingTimestamp must be a whole number"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss must be true or false"),
        ({"nsqdHttpAddress": "localhost"}, "nsqdHttpAddress must be host:port"),
    ):
        with pytest.raises(OptionError, match=text):
            reader(topic="t", **more)


# ---------------------------------------------------------------------- offsets


def test_format_of_offsets() -> None:
    """With the option topic, offsets are those of earlier versions."""
    one = Subscription(("t",), single=True)
    text = '{"a:1": {"first": 0, "id": "9a46b01870c003e7", "sequence": 1000}, "b:2": {"first": 7, "sequence": 7}}'
    places: LogOffsets = {
        LogKey("t", "b:2"): LogOffset(7, 7),
        LogKey("t", "a:1"): LogOffset(0, 1000, "9a46b01870c003e7"),
    }
    assert json.dumps(build_offset(places, one)) == text
    assert parse_offset(json.loads(text), one) == places
    several = Subscription(("t", "u"))
    places[LogKey("u", "a:1")] = NotReached("@12.5")
    text = '{"t": ' + text + ', "u": {"a:1": {"start": "@12.5"}}}'
    assert json.dumps(build_offset(places, several)) == text
    assert parse_offset(json.loads(text), several) == places
    for offset, other, reason in (
        ('{"topic": {"0": 12}}', one, "the checkpoint belongs to another source"),
        ('{"topic": {"0": 12}}', several, "the checkpoint belongs to another source"),
        (text, one, "the checkpoint belongs to another source, .* or a query with other topics"),
        ('{"a:1": {"first": 0, "sequence": 0}}', several, "a query with the option topic: give this option"),
    ):
        with pytest.raises(SourceError, match=reason):
            parse_offset(json.loads(offset), other)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10**6), max_size=5), st.integers(1, 10**6))
def test_shares_of_a_limit(available: dict[str, int], most: int) -> None:
    shares = share_limit(available, most)
    assert shares.keys() == available.keys()
    assert all(0 <= shares[broker] <= available[broker] for broker in available)
    waiting = [broker for broker in available if available[broker]]
    assert sum(shares.values()) <= most
    assert sum(shares.values()) >= min(most - len(waiting) + 1, sum(available.values()))
    if most >= len(waiting):
        assert all(shares[broker] for broker in waiting)
    if sum(available.values()) <= most:
        assert shares == available == share_limit(available, None)
