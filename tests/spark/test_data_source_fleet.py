"""Tests for the data source `nsq` with several topics and brokers: patterns, discovery, brokers that are down."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.query import StreamingQuery

from cli.support import Cli
from interop.peers import Broker, free_ports, nsqd, qcli_lookupd, qcli_serve
from spark.queries import Query, await_rows, broker_on
from spark.support import HOUR_NS, cli_of, numbers, until, write_log
from trio_nsq.client.errors import BrokerUnreachable, RequestRefused
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.source.fan_out_query import PROMPT_S
from trio_nsq.spark.source.options import SourceError
from trio_nsq.spark.versions import HAS_READ_LIMITS

SOON = {"discoveryIntervalMs": "1"}
WITH_TOPIC = {"columns": "topic,broker,seq"}


def fleet_of(*brokers: Broker) -> str:
    return ",".join(broker.http_address for broker in brokers)


def batch_rows(**options: str) -> list[tuple[object, ...]]:
    """Read all rows of a batch."""
    source = NsqDataSource(CaseInsensitiveDict(WITH_TOPIC | options))
    reader = source.reader(source.schema())
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return sorted(row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


# ---------------------------------------------------------------------- several topics


def test_several_topics(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A topic may be missing on a broker. Each topic has offsets of its own."""
    a, b, here = f"{topic}.a", f"{topic}.b", qcli.http_address
    with qcli_serve(tmp_path / "data") as other:
        there = other.http_address
        qcli.publish(a, numbers(3))
        qcli.publish(b, numbers(1))
        cli_of(other).publish(b, numbers(2))
        options = {"subscribe": f"{a}, {b}", "nsqdHttpAddress": f"{here},{there}"}
        expected = sorted(
            [*((a, here, n) for n in range(3)), (b, here, 0), *((b, there, n) for n in range(2))]
        )
        assert batch_rows(**options) == expected
        query = Query([], **options, **WITH_TOPIC)
        first = query.batch()
        assert sorted(first or []) == expected
        assert {name: [*of_topic] for name, of_topic in json.loads(query.checkpoint[0]).items()} == {
            a: [here],
            b: sorted([here, there]),
        }
        cli_of(other).publish(a, numbers(1))
        assert query.batches() == [[(a, there, 0)]]
        state = query.control.reportLatestOffset()
        assert state is not None
        state[b][there].pop("published_per_s", None)  # after a second
        assert state[b][there] == {"sequence": 2, "behind": 0}
        only = json.dumps({b: {here: 0, there: 1}, a: {here: 2, there: 1}})
        assert batch_rows(**options, startingOffsets=only) == sorted(
            [(a, here, 2), (b, here, 0), (b, there, 1)]
        )
        from_offset = batch_rows(**options, startingOffsets=query.checkpoint[0])
        assert from_offset == [(a, there, 0)]
    fewer = Query(query.checkpoint, subscribe=a, nsqdHttpAddress=f"{here},{there}")
    with pytest.raises(
        SourceError, match=f"the checkpoint has the topic {b}, which the query does not subscribe"
    ):
        fewer.plan()


def test_pattern_finds_new_topics(qcli: Cli, topic: str) -> None:
    """A topic that is created later is read from its first message, also if the query started at the end."""
    qcli.publish(f"{topic}.a", numbers(5))
    qcli.publish(f"not.{topic}", numbers(5))
    options = {"subscribePattern": rf"{topic}\..*", "nsqdHttpAddress": qcli.http_address, **SOON}
    query = Query([], **options, **WITH_TOPIC, startingOffsets="latest")
    assert query.batches() == [[]]
    qcli.publish(f"{topic}.b", numbers(2))
    assert query.batches() == [[(f"{topic}.b", qcli.http_address, n) for n in range(2)]]
    del options["discoveryIntervalMs"]
    assert len(batch_rows(**options)) == 7
    assert batch_rows(subscribePattern=f"{topic}.none", nsqdHttpAddress=qcli.http_address) == []


def test_deleted_topic_of_a_pattern(broker: Broker, qcli: Cli, topic: str) -> None:
    """It is lost data. With failOnDataLoss=false, a topic that has its name again is read from its beginning."""
    options = {"subscribePattern": f"{topic}.[ab]", "nsqdHttpAddress": qcli.http_address, **SOON}
    for name in "ab":
        qcli.publish(f"{topic}.{name}", numbers(3))
    query = Query([], **options)
    assert len(query.batch() or []) == 6
    broker.http("POST", "/topic/delete", topic=f"{topic}.a")
    with pytest.raises(Exception, match="it was deleted and recreated"):
        query.plan()
    lax = Query(query.checkpoint, **options, **WITH_TOPIC, failOnDataLoss="false")
    assert lax.batch() == []
    qcli.publish(f"{topic}.a", numbers(2))
    assert lax.batch() == [(f"{topic}.a", qcli.http_address, n) for n in range(2)]


def test_options_that_select_topics(qcli: Cli, topic: str) -> None:
    for options, text in (
        ({"topic": "t", "subscribe": "u"}, "topic and subscribe exclude each other"),
        ({"subscribe": "t,,u"}, "subscribe: '' is not a valid topic name"),
        ({"subscribePattern": "("}, "subscribePattern is not a regular expression"),
        ({"topic": "t", "nsqdHttpAddress": "me:hush@localhost:4151"}, "must not have a user or password"),
        ({"topic": "t", "nsqdHttpAddress": "localhost:65536"}, "must be host:port, or several"),
        ({"topic": "t", "nsqdHttpAddress": "localhost:4151/stats"}, "must be host:port, or several"),
        (
            {"topic": "t", "lookupdHttpAddress": "http://me:hush@localhost:4161"},
            "must not have a user or password",
        ),
        (
            {"topic": "t", "lookupdHttpAddress": "a:4161", "authSecret": "hush", "tlsRootCaFile": "ca"},
            "would not be encrypted",
        ),
        ({"topic": "t", "channel": "a b"}, "channel: a b is not a valid channel name"),
        ({"topic": "t", "maxTriggerDelay": "soon"}, "maxTriggerDelay: 'soon' is not a duration"),
        ({"topic": "t", "minOffsetsPerTrigger": "2", "maxOffsetsPerTrigger": "1"}, "is greater than"),
    ):
        with pytest.raises(OptionError, match=text) as caught:
            Query([], **options)
        assert "hush" not in str(caught.value)
    qcli.publish(topic, numbers(1))
    options = {"subscribe": f"{topic},{topic}.none", "nsqdHttpAddress": qcli.http_address}
    with pytest.raises(SourceError, match=f"there is no topic {topic}.none on {qcli.http_address}"):
        batch_rows(**options)
    with pytest.raises(SourceError, match=f"there is no topic {topic}.none on {qcli.http_address}"):
        Query([], **options).plan()


# ---------------------------------------------------------------------- brokers found by discovery


@pytest.mark.parametrize("by_pattern", [False, True])
def test_brokers_are_found_by_lookupd(tmp_path: Path, stack: ExitStack, by_pattern: bool) -> None:
    """Also those that come later, and those that leave: their positions stay in the offset."""
    lookupd = stack.enter_context(qcli_lookupd())
    flags = (f"--lookupd-tcp-address={lookupd.tcp_address}", "--broadcast-address=127.0.0.1")
    one = stack.enter_context(qcli_serve(tmp_path / "one", *flags))
    cli_of(one).publish("t", numbers(3))
    where = {"subscribePattern": "t"} if by_pattern else {"topic": "t"}
    options = {**where, "lookupdHttpAddress": lookupd.http_address}

    def until_found(count: int) -> None:
        until(lambda: len({row[1] for row in batch_rows(**options)}) == count)

    until_found(1)
    query = Query([], **options, **SOON)
    assert query.batches() == [[(one.http_address, n) for n in range(3)]]
    with broker_on(tmp_path / "two", "0", *flags) as (two, port):
        cli_of(two).publish("t", numbers(2))
        until_found(2)
        assert query.batches() == [[(two.http_address, n) for n in range(2)]]
    cli_of(one).publish("t", numbers(1))
    again = Query(query.checkpoint, **options, **SOON)
    assert again.batches() == [[(one.http_address, 3)]]
    with broker_on(tmp_path / "two", port, *flags) as (two, _):
        cli_of(two).publish("t", numbers(1))
        assert await_rows(again, 1) == [(two.http_address, 2)]


def test_lookupd_that_does_not_answer(qcli: Cli, topic: str, stack: ExitStack) -> None:
    """Another one, and brokers that are named, are enough for a stream."""
    down = f"127.0.0.1:{free_ports(1)[0]}"
    options = {"topic": topic, "lookupdHttpAddress": down, "patienceMs": "100"}
    with pytest.raises(BrokerUnreachable, match=f"the nsqlookupd at {down} cannot be reached"):
        batch_rows(**options)
    with pytest.raises(BrokerUnreachable, match="the server is not an nsqlookupd"):
        batch_rows(**options | {"lookupdHttpAddress": qcli.http_address})
    lookupd = stack.enter_context(qcli_lookupd())
    options["lookupdHttpAddress"] = f"{down},{lookupd.http_address}"
    with pytest.raises(SourceError, match=f"there is no topic {topic} on {down}, {lookupd.http_address}"):
        batch_rows(**options)


def test_nsqd_has_no_log(tmp_path: Path) -> None:
    with nsqd(tmp_path / "data") as broker:
        broker.create("t")
        with pytest.raises(RequestRefused, match="the broker may be an nsqd"):
            batch_rows(topic="t", nsqdHttpAddress=broker.http_address)


# ---------------------------------------------------------------------- brokers that are down


def test_stream_goes_on_without_a_dead_broker(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read when it returns; its position is unharmed, also if the query is started again meanwhile."""
    one, two = (stack.enter_context(qcli_serve(tmp_path / name)) for name in ("one", "two"))
    with broker_on(tmp_path / "dead") as (dead, port):
        options = {"topic": "t", "nsqdHttpAddress": fleet_of(one, dead, two)}
        for broker in (one, dead, two):
            cli_of(broker).publish("t", numbers(4))
        query = Query([], **options)
        assert len(query.batch() or []) == 12
        cli_of(dead).publish("t", numbers(2))
        dead.process.kill()
        dead.process.wait()
    caplog.clear()
    for start, now in ((4, query), (6, Query(query.checkpoint, **options))):
        for broker in (one, two):
            cli_of(broker).publish("t", numbers(2))
        rows = [row for batch in now.batches() for row in batch]
        assert sorted(rows) == sorted((each.http_address, start + n) for each in (one, two) for n in range(2))
        state = now.control.reportLatestOffset()
        assert state is not None
        assert state[dead.http_address]["away"] == "Connection refused"
        assert "away" not in state[one.http_address]
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2, warnings  # each query warns once
    assert f"the broker at {dead.http_address} cannot be reached: Connection refused" in warnings[0]
    with broker_on(tmp_path / "dead", port):
        assert await_rows(now, 2) == [(dead.http_address, 4), (dead.http_address, 5)]
    assert f"the server at {dead.http_address} answers again" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("starting", "expected"), [("latest", [2]), ("-1h", [1, 2]), ("earliest", [0, 1, 2])]
)
def test_broker_that_is_down_when_the_query_starts(
    qcli: Cli, topic: str, tmp_path: Path, starting: str, expected: list[int]
) -> None:
    """Its starting position is that of the time when the query started."""
    now_ns = time.time_ns()
    write_log(tmp_path / "dead", topic, [(now_ns - 3 * HOUR_NS, [b"0"]), (now_ns - HOUR_NS // 2, [b"1"])])
    port = str(free_ports(1)[0])
    dead = f"127.0.0.1:{port}"
    qcli.publish(topic, numbers(1))
    options = {"topic": topic, "nsqdHttpAddress": f"{qcli.http_address},{dead}", "startingOffsets": starting}
    query = Query([], **options)
    query.batches()
    again = Query(query.checkpoint, **options)
    with broker_on(tmp_path / "dead", port) as (broker, _):
        cli_of(broker).publish(topic, numbers(1))
        assert await_rows(again, len(expected)) == [(dead, n) for n in expected]


def test_stopped_broker_delays_no_batch(tmp_path: Path, stack: ExitStack) -> None:
    """A broker that accepts connections and does not answer is waited for once, and for a second."""
    one = stack.enter_context(qcli_serve(tmp_path / "one"))
    with qcli_serve(tmp_path / "two") as two:
        for broker in (one, two):
            cli_of(broker).publish("t", numbers(1))
        query = Query([], topic="t", nsqdHttpAddress=fleet_of(one, two))
        assert len(query.batch() or []) == 2
        two.process.send_signal(SIGSTOP)
        try:
            begun_s = time.monotonic()
            for number in range(1, 30):
                cli_of(one).publish("t", numbers(1))
                assert query.batch() == [(one.http_address, number)]
            assert time.monotonic() - begun_s < 29 * PROMPT_S
            state = query.control.reportLatestOffset()
            assert state is not None
            assert state[two.http_address]["away"] == "it has not answered yet"
        finally:
            two.process.send_signal(SIGCONT)
        cli_of(two).publish("t", numbers(1))
        assert await_rows(query, 1) == [(two.http_address, 1)]


def test_available_now_ends_without_a_dead_broker(tmp_path: Path, stack: ExitStack) -> None:
    one, two = (stack.enter_context(qcli_serve(tmp_path / name)) for name in ("one", "two"))
    for broker in (one, two):
        cli_of(broker).publish("t", numbers(3))
    down = f"127.0.0.1:{free_ports(1)[0]}"
    options = {"topic": "t", "nsqdHttpAddress": f"{fleet_of(one, two)},{down}", "patienceMs": "300"}
    query = Query([], **options, maxOffsetsPerTrigger="2").until_now()
    assert sum(len(batch) for batch in query.batches()) == 6


def test_batch_needs_all_brokers(qcli: Cli, topic: str) -> None:
    """Without one, its result would be incomplete. It waits once, not once for each broker."""
    qcli.publish(topic, numbers(1))
    down = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    with pytest.raises(BrokerUnreachable, match="cannot be reached: Connection refused"):
        batch_rows(topic=topic, nsqdHttpAddress=f"{qcli.http_address},{down}", patienceMs="200")


def test_without_patience_a_broker_that_answers_is_read(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, numbers(2))
    assert len(batch_rows(topic=topic, nsqdHttpAddress=qcli.http_address, patienceMs="0")) == 2


def test_planned_batch_waits_for_its_broker(tmp_path: Path, stack: ExitStack) -> None:
    """Its rows are determined, so it cannot leave out a broker."""
    one = stack.enter_context(qcli_serve(tmp_path / "one"))
    with broker_on(tmp_path / "two") as (two, port):
        for broker in (one, two):
            cli_of(broker).publish("t", numbers(2))
        options = {"topic": "t", "nsqdHttpAddress": fleet_of(one, two)}
        query = Query([], **options)
        assert query.plan()
    with pytest.raises(BrokerUnreachable, match=two.http_address):
        Query(query.checkpoint, **options, patienceMs="100").rows()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(Query(query.checkpoint, **options).rows)
        with broker_on(tmp_path / "two", port):
            assert len(waiting.result()) == 4


@pytest.mark.slow
@pytest.mark.skipif(not HAS_READ_LIMITS, reason="this Spark does not show the state of logs")
def test_spark_goes_on_without_a_dead_broker(spark: SparkSession, tmp_path: Path, stack: ExitStack) -> None:
    """Three brokers, one of which is killed and returns, and a query that is started again meanwhile."""
    seen: list[tuple[str, int]] = []

    def take(batch: DataFrame, _: int) -> None:
        seen.extend((row.broker, row.seq) for row in batch.collect())

    def start(addresses: str) -> StreamingQuery:
        source = spark.readStream.format("nsq").options(topic="t", columns="broker,seq")
        writer = source.option("nsqdHttpAddress", addresses).load().writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(processingTime="50 milliseconds").start()

    one, two = (stack.enter_context(qcli_serve(tmp_path / name)) for name in ("one", "two"))
    with broker_on(tmp_path / "dead") as (dead, port):
        addresses = fleet_of(one, dead, two)
        for broker in (one, dead, two):
            cli_of(broker).publish("t", numbers(10))
        query = start(addresses)
        until(lambda: len(seen) == 30)
        dead.process.kill()
        dead.process.wait()
    try:
        for count in (50, 70):
            for broker in (one, two):
                cli_of(broker).publish("t", numbers(10))
            query.processAllAvailable()
            assert len(seen) == count
            until(lambda query=query: "Connection refused" in str(query.lastProgress))  # type: ignore[misc]
            query.stop()
            query = start(addresses)
        with broker_on(tmp_path / "dead", port) as (dead, _):
            cli_of(dead).publish("t", numbers(5))
            until(lambda: len(seen) == 75)
    finally:
        query.stop()
    lengths = {one.http_address: 30, two.http_address: 30, dead.http_address: 15}
    assert sorted(seen) == sorted((broker, n) for broker, length in lengths.items() for n in range(length))
