"""Exports of a broker's archive, which never ask the broker: each message once, the newest ones included.

The broker is killed and restarted, begins segments, and archives them, and old states are removed from the archive. A
few lives by default; `FAULT_KILLS=50` for the long form.
"""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

from cli.support import Cli, Running
from interop.peers import Broker, qcli_serve
from qcli.framework.errors import ExitCode
from spark.support import cli_of, export, leftovers, numbers, parquet_files, rows, run_in_process, until
from storage.stores import Store
from trio_nsq.client.reading.broker_log import LogReplaced
from trio_nsq.log.gaps import Span
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.places import storage_at
from trio_nsq.spark.segments.places import TopicNotThere, parse_places, topics_in

LIVES = int(os.environ.get("FAULT_KILLS", "2"))
SEED = int(os.environ.get("FAULT_SEED", "11"))
FLAGS = ("--archive-interval=50ms", "--max-bytes-per-file=5000")
OFFLINE = Cli("", "")
in_soak = pytest.mark.skipif("FAULT_KILLS" not in os.environ, reason="it takes long: it is in `make soak`")
WORKER = """
import pickle, sys
reader, partitions = pickle.load(sys.stdin.buffer)
print(*(body.decode() for each in partitions for batch in reader.read(each) for body in batch["body"].to_pylist()))
"""


def of_archive(broker: Broker) -> dict[str, Any]:
    """Return what a broker tells of its archive."""
    with urlopen(f"http://{broker.http_address}/stats?format=json") as answer:
        found: dict[str, Any] = json.load(answer)["archive"]
    return found


def until_archived(broker: Broker) -> None:
    def is_archived() -> bool:
        found = of_archive(broker)
        return found["state"] == "archiving" and not found["lag_operations"]

    until(is_archived)


def exported(folder: Path) -> int:
    """Return how many messages an export has; fail if one is missing before them, or there twice."""
    if not parquet_files(folder):
        return 0
    found = rows(folder)
    seqs, bodies = found["seq"].to_pylist(), found["body"].to_pylist()
    assert seqs == list(range(len(seqs)))
    assert bodies == numbers(len(bodies))
    return len(seqs)


def read_by_source(place: str) -> list[bytes]:
    """Return the bodies that Spark's data source reads, without Spark."""
    source = NsqDataSource(CaseInsensitiveDict({"topic": "t", "segments": place, "minPartitions": "3"}))
    reader = source.reader(source.schema())
    batches = [batch for each in reader.partitions() for batch in reader.read(each)]
    return sorted((body for batch in batches for body in batch.column("body").to_pylist()), key=int)


class Exports:
    """Two exports of an archive: one that is repeated, and one that follows."""

    def __init__(self, place: str, folder: Path, stack: ExitStack) -> None:
        self.place = place
        self.repeated, self.followed = folder / "repeated", folder / "followed"
        self._stack = stack
        self._running: Running | None = None

    def follow(self) -> None:
        """Begin to follow; if it did before, that one is killed."""
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
        args = ("t", str(self.followed), "--from-segments", self.place, "--follow", "--every", "100ms")
        self._running = self._stack.enter_context(OFFLINE.running("to-parquet", *args))

    def repeat(self) -> int:
        """Export what is archived now; return how many messages there are."""
        export(OFFLINE, "t", self.repeated, "--from-segments", self.place)
        return exported(self.repeated)

    def end(self, count: int) -> None:
        """Check that both have this many messages."""
        assert self.repeat() == count
        assert self._running is not None
        until(lambda: exported(self.followed) == count)
        self._running.process.send_signal(signal.SIGINT)
        assert self._running.end().code == 130
        assert leftovers(self.repeated) == []


def run_lives(place: str, folder: Path, env: dict[str, str]) -> None:
    chance = random.Random(SEED)
    count = 0
    with ExitStack() as stack:
        exports = Exports(place, folder, stack)
        for life in range(LIVES):
            with qcli_serve(folder / "data", f"--archive={place}", *FLAGS, env=env) as broker:
                for _ in range(chance.randint(2, 4)):
                    more = chance.randint(1, 600)
                    cli_of(broker).publish("t", numbers(more, count), at_once=chance.choice((1, 7, 100)))
                    count += more
                    if chance.random() < 0.5:
                        until_archived(broker)
                        assert exports.repeat() == count
                        assert read_by_source(place) == numbers(count)
                until_archived(broker)
                assert exports.repeat() == count
                exports.follow()
                if chance.random() < 0.7:
                    assert OFFLINE("archive", "prune", place, "--keep", "0s").code == 0
                if life < LIVES - 1 and chance.random() < 0.7:
                    broker.process.kill()
                    broker.process.wait()
        exports.end(count)
    names = [each.name for each in found] if isinstance(found := storage_at(place).files(), list) else []
    assert any(name.endswith(".seg") for name in names), "a start archives the segments that are closed"


@pytest.mark.slow
def test_each_message_is_exported_once(tmp_path: Path) -> None:
    run_lives(str(tmp_path / "archive"), tmp_path, {})


@in_soak
def test_each_message_is_exported_once_from_a_bucket(s3: Store, tmp_path: Path) -> None:
    with s3.here():
        run_lives(s3.new_place(), tmp_path, s3.env)


def test_a_damaged_object_is_named_and_hides_only_what_is_behind_it(tmp_path: Path) -> None:
    archive, data = tmp_path / "archive", tmp_path / "data"
    args = ("to-parquet", "t", str(tmp_path / "a"), "--from-segments", str(archive), "--format", "json")
    with qcli_serve(data, f"--archive={archive}", *FLAGS) as broker:
        until_archived(broker)  # a checkpoint would have what is published before
        for first in (0, 50):
            cli_of(broker).publish("t", numbers(50, first))
            until_archived(broker)
            streams = sorted(archive.glob("@stream/*/*"))
            if not first:
                before = streams[-1]
        damaged = streams[streams.index(before) + 1]
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for count in (50, 0):
            result = run_in_process(OFFLINE, *args)
            assert (result.code, result.records[0]["messages"]) == (ExitCode.DAMAGED, count)
            assert str(damaged) in result.err
            assert str(damaged) in result.records[0]["unread"][0]
        assert exported(tmp_path / "a") == 50
        assert read_by_source(str(archive)) == numbers(50)
        before.unlink()
        result = OFFLINE(*args)  # another process, which has not read it
        assert (result.code, "is missing" in result.err, exported(tmp_path / "a")) == (1, True, 50)
    with qcli_serve(data, f"--archive={archive}", *FLAGS) as broker:
        until_archived(broker)
        result = run_in_process(OFFLINE, *args)
        assert (result.code, result.records[0]["unread"]) == (0, [])
    assert exported(tmp_path / "a") == 100


def test_tasks_read_what_was_planned_although_its_objects_are_removed(tmp_path: Path) -> None:
    """Tasks of another process; meanwhile the messages are archived under the names of segments, or copied again."""
    archive, data = tmp_path / "archive", tmp_path / "data"
    with qcli_serve(data, f"--archive={archive}", *FLAGS) as broker:
        cli_of(broker).publish("t", numbers(700), at_once=7)
        until_archived(broker)
        options = {"topic": "t", "segments": str(archive), "minPartitions": "4", "columns": "body"}
        source = NsqDataSource(CaseInsensitiveDict(options))
        reader = source.reader(source.schema())
        partitions = reader.partitions()
        assert sum(each.span.length for each in partitions) == 700
        task = pickle.dumps((reader, partitions))
        cli_of(broker).publish("t", numbers(100, 700))
    planned = set(archive.glob("@*/*/*"))
    with qcli_serve(data, f"--archive={archive}", *FLAGS) as broker:
        until_archived(broker)
        assert OFFLINE("archive", "prune", str(archive), "--keep", "0s").code == 0
    assert list(archive.glob("t/*/*.seg"))
    assert not planned & set(archive.glob("@*/*/*"))
    done = subprocess.run(
        [sys.executable, "-c", WORKER], input=task, stdout=subprocess.PIPE, check=True, timeout=120
    )
    assert [body.encode() for body in done.stdout.decode().split()] == numbers(700)


@in_soak
def test_a_stream_of_spark_reads_each_message_once(spark: SparkSession, tmp_path: Path) -> None:
    """Over restarts of the broker, and while old states are removed."""
    seen: list[tuple[int, bytes]] = []

    def take(batch: DataFrame, _: int) -> None:
        seen.extend((row.seq, bytes(row.body)) for row in batch.collect())

    archive, count = tmp_path / "archive", 0
    options = {"topic": "t", "segments": str(archive), "columns": "seq,body"}

    def start() -> Any:
        stream = spark.readStream.format("nsq").options(**options).load()
        writer = stream.writeStream.foreachBatch(take).trigger(processingTime="50 milliseconds")
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def has_seen(query: Any, count: int) -> bool:
        return len(seen) >= count or query.exception() is not None

    with ExitStack() as stack:
        query: Any = None
        for _ in range(2):
            with qcli_serve(tmp_path / "data", f"--archive={archive}", *FLAGS) as broker:
                for more in (10, 400):
                    cli_of(broker).publish("t", numbers(more, count))
                    count += more
                    until_archived(broker)
                    if query is None:
                        query = start()
                        stack.callback(query.stop)
                    until(partial(has_seen, query, count))
                    assert seen == list(enumerate(numbers(count)))
                assert OFFLINE("archive", "prune", str(archive), "--keep", "0s").code == 0
                broker.process.kill()
                broker.process.wait()
    batch = spark.read.format("nsq").options(**options).load().orderBy("seq").collect()
    assert [(row.seq, bytes(row.body)) for row in batch] == seen


def test_topics_of_an_archive(tmp_path: Path) -> None:
    """Those without closed segments, too; a topic that was deleted and created again is another log."""
    archive = tmp_path / "archive"
    with qcli_serve(tmp_path / "data", f"--archive={archive}", *FLAGS) as broker:
        for topic, count in (("t", 5), ("u", 3)):
            cli_of(broker).publish(topic, numbers(count))
        until_archived(broker)
        assert topics_in(str(archive)) == ["t", "u"]
        (former,) = parse_places([str(archive)], "t")
        bounds = former.open().bounds()
        assert (bounds.first, bounds.end, bounds.incarnation) == (0, 5, Path(former.folder).name)
        assert parse_places([f"b={former.folder}"], "t")[0].label == "b"
        assert former.open().bounds("-1h").at == 0
        broker.http("POST", "/topic/delete", topic="t")
        cli_of(broker).publish("t", numbers(2))
        until_archived(broker)
        (place,) = parse_places([str(archive)], "t")
        assert (place.open().bounds().end, place.label == former.label) == (2, False)
        assert topics_in(str(archive)) == ["t", "u"]
        with pytest.raises(LogReplaced):
            list(former.named("b", bounds.incarnation).open().read(Span(0, 5)))
        with pytest.raises(TopicNotThere):
            parse_places([f"b={former.folder}"], "t")
