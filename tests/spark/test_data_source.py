"""Tests for batch reads with the data source `nsq`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

from broker.state import damage
from cli.support import Cli
from interop.peers import qcli_serve
from soak import in_soak
from spark.support import HOUR_NS, NOON_NS, export, rows, write_log
from trio_nsq.log.gaps import Span
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.source.batch import NsqReader
from trio_nsq.spark.source.options import SourceError


@pytest.mark.slow
def test_batch_read(spark: SparkSession, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The rows equal those of an export. Spark finds the source without `register`."""
    qcli.publish(topic, [b"%d" % n for n in range(25_000)])
    export(qcli, topic, tmp_path)
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address}
    names = ["seq", "id", "ts_ns", "body"]
    source = spark.read.format("nsq").options(**options, minPartitions="2", columns=",".join(names))
    expected = rows(tmp_path, *names)
    assert source.load().toArrow().sort_by("seq").cast(expected.schema).equals(expected)
    ending = json.dumps({qcli.http_address: 13})
    part = spark.read.format("nsq").options(**options, startingOffsets="10", endingOffsets=ending).load()
    assert part.columns == ["topic", "broker", "seq", "id", "ts_ns", "ts", "attempts", "body"]
    assert [bytes(row.body) for row in part.collect()] == [b"10", b"11", b"12"]


def reader(**options: str) -> NsqReader:
    source = NsqDataSource(CaseInsensitiveDict(options))
    return source.reader(source.schema())


def test_invalid_options_are_refused(qcli: Cli, topic: str, tmp_path: Path) -> None:
    for options, text in (
        ({}, "needs the option topic"),
        ({"topic": "t", "startingOfsets": "1"}, "no option startingofsets"),
        ({"topic": "t", "columns": "seq,what"}, "no column what"),
        ({"topic": "t", "startingOffsets": "1", "startingTimestamp": "1"}, "exclude each other"),
        ({"topic": "t", "endingTimestamp": "1", "endingOffsetsByTimestamp": "{}"}, "exclude each other"),
        ({"topic": "t", "startingOffsetsByTimestamp": "5"}, "Unix milliseconds for each broker"),
        ({"topic": "t", "startingOffsetsByTimestamp": '{"a:1": "-1h"}'}, "Unix milliseconds for each broker"),
        ({"topic": "t", "startingOffsetsByTimestamp": '{"a:1": true}'}, "Unix milliseconds for each broker"),
        ({"topic": "t", "maxRecordsPerPartition": "0"}, "maxRecordsPerPartition"),
    ):
        with pytest.raises(OptionError, match=text):
            reader(**options)
    with pytest.raises(OptionError, match="have no entry for the broker"):
        reader(topic="t", nsqdHttpAddress=qcli.http_address, startingOffsets="{}").partitions()


def test_lost_messages_are_an_error(tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS + n * HOUR_NS, [b"body%03d" % n]) for n in range(30)])
    damage(tmp_path / "data" / "topics" / "t.topic", b"body007")
    with qcli_serve(tmp_path / "data") as broker:
        options = {"topic": "t", "nsqdHttpAddress": broker.http_address, "columns": "seq"}
        strict, lax = reader(**options), reader(**options, failOnDataLoss="false")
        (partition,) = strict.partitions()
        with pytest.raises(SourceError, match=r"messages 7 to 7 of topic t .* are damaged"):
            list(strict.read(partition))
        found = [number for batch in lax.read(partition) for number in batch.to_pydict()["seq"]]
        assert found == [n for n in range(30) if n != 7]
        late = reader(**options, startingTimestamp=str((NOON_NS + 10 * HOUR_NS) // 10**6))
        assert [each.span for each in late.partitions()] == [Span(10, 30)]
        at = json.dumps({broker.http_address: (NOON_NS + 10 * HOUR_NS) // 10**6})
        few = reader(**options, startingOffsetsByTimestamp=at, maxRecordsPerPartition="8", minPartitions="1")
        assert [each.span for each in few.partitions()] == [Span(10, 16), Span(16, 23), Span(23, 30)]
        none = reader(
            **options, startingTimestamp="0", endingOffsetsByTimestamp=json.dumps({"t": json.loads(at)})
        )
        assert [each.span for each in none.partitions()] == [Span(0, 10)]
        assert list(late.read(None)) == []


@pytest.mark.parametrize(("body_bytes", "count"), [(10_000_000, 40), *in_soak((1_000_000, 400))])
def test_memory_does_not_grow_with_the_bodies(tmp_path: Path, body_bytes: int, count: int) -> None:
    """A task needs less than 256 MiB, whatever the bodies; all of them are 400 MB."""
    sizes = ("--max-msg-size=10000000", "--max-body-size=40000100")
    with qcli_serve(tmp_path / "data", "--sync=interval", *sizes) as broker:
        for _ in range(count // 4):  # records of four bodies
            broker.post("/mpub", b"\n".join([b"x" * body_bytes] * 4), topic="t")
        options = json.dumps({"topic": "t", "nsqdHttpAddress": broker.http_address})
        program = Path(__file__).with_name("memory_program.py")
        done = subprocess.run(
            [sys.executable, str(program), options], capture_output=True, timeout=300, check=True
        )
    found = json.loads(done.stdout)
    assert found["rows"] == count
    assert found["bytes"] < 256 * 1024 * 1024
