"""Tests for `to-parquet --from-segments`: the same rows as through the broker, from copies of its data folder."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

from broker.state import damage
from cli.support import Cli
from interop.peers import Broker, qcli_serve
from log.support import HastyFiles, append_each, numbered
from spark.support import (
    NOON_NS,
    ToParquet,
    cli_of,
    column,
    export,
    leftovers,
    numbers,
    parquet_files,
    rows,
    run_in_process,
    write_log,
)
from trio_nsq.log import DiskLog
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.runtime.engine import Engine
from trio_nsq.spark.segments.places import parse_places
from trio_nsq.spark.segments.writer import TopicArchiver
from trio_nsq.spark.source.batch import NsqReader
from trio_nsq.spark.source.options import SourceError
from trio_nsq.storage import LocalStorage

BODIES = [b"%06d" % number + b"x" * (number % 300) for number in range(5000)]
OFFLINE = Cli("", "")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "data"


@pytest.fixture(scope="module")
def serve(data: Path) -> Iterator[Broker]:
    """A broker with small segments, and the topic `t` with messages of several publishes."""
    with qcli_serve(data, "--max-bytes-per-file=100000", "--sync=interval") as broker:
        cli_of(broker).publish("t", BODIES, at_once=137)
        yield broker


@pytest.fixture(scope="module")
def through_broker(serve: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export through the broker."""
    folder = tmp_path_factory.mktemp("through") / "a"
    export(cli_of(serve), "t", folder)
    return folder


@pytest.fixture(scope="module")
def backup(serve: Broker, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of the running broker, as docs/how-to/back-up-and-upgrade.md describes it."""
    folder = tmp_path_factory.mktemp("backup")
    os.kill(serve.process.pid, signal.SIGSTOP)
    try:
        shutil.copytree(data, folder / "data")
    finally:
        os.kill(serve.process.pid, signal.SIGCONT)
    return folder / "data"


def archived(folder: Path, to: Path) -> Path:
    """Copy the topic `t` of a data folder into an archive."""
    topic = folder / "topics" / "t.topic"
    TopicArchiver("t", topic, lambda name: LocalStorage(to / "t" / name), tail=True).archive()
    return to


def test_a_backup_has_the_rows_of_the_broker(
    serve: Broker, through_broker: Path, backup: Path, tmp_path: Path
) -> None:
    said = export(OFFLINE, "t", tmp_path, "--from-segments", f"{serve.http_address}={backup}")
    assert (said["messages"], said["missing"], said["damaged"]) == (len(BODIES), 0, False)
    assert rows(tmp_path).equals(rows(through_broker))
    assert leftovers(tmp_path) == []


def test_the_folder_of_a_running_broker(
    serve: Broker, data: Path, through_broker: Path, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*.log")}
    export(OFFLINE, "t", tmp_path / "b", "--from-segments", f"{serve.http_address}={data}")
    assert rows(tmp_path / "b").equals(rows(through_broker))
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*.log")} == before


def test_an_archive_has_the_rows_of_the_broker(
    serve: Broker, through_broker: Path, backup: Path, tmp_path: Path
) -> None:
    folder = archived(backup, tmp_path / "archive")
    export(OFFLINE, "t", tmp_path / "a", "--from-segments", str(folder))
    found, expected = rows(tmp_path / "a"), rows(through_broker)
    assert set(found["broker"].to_pylist()) == {f"archive-{next((folder / 't').iterdir()).name[:8]}"}
    assert found.drop_columns("broker").equals(expected.drop_columns("broker"))
    (incarnation,) = (folder / "t").iterdir()
    export(OFFLINE, "t", tmp_path / "b", "--from-segments", f"{serve.http_address}={incarnation}")
    assert rows(tmp_path / "b").equals(expected)


def test_a_file_for_each_segment(backup: Path, tmp_path: Path) -> None:
    args = ("--from-segments", str(backup), "--target-file-size", "256KiB")
    assert export(OFFLINE, "t", tmp_path, *args)["missing"] == 0
    starts = sorted(int(path.stem) for path in (backup / "topics" / "t.topic").glob("*.log"))
    assert [int(name.split("-")[-2]) for name in parquet_files(tmp_path)] == starts
    assert len(starts) > 5


def test_topics_and_brokers_whose_files_have_the_same_names(tmp_path: Path) -> None:
    """A file of the same name is another topic's, whatever its manifest says: nothing counts as written."""
    args = {}
    for name, topic in (("1", "a"), ("2", "a-b"), ("3", "a-b")):
        write_log(tmp_path / name, topic, [(NOON_NS, [f"{name} {number}".encode() for number in range(10)])])
        args[name] = str(tmp_path / name)
    folder = tmp_path / "f"
    export(OFFLINE, "a-b", folder, "--from-segments", f"d={args['2']}")
    export(OFFLINE, "a", folder, "--from-segments", f"b-c={args['1']}")
    both = ["to-parquet", "a-b", str(folder), "--from-segments", f"d={args['2']},c={args['3']}"]
    refused = run_in_process(OFFLINE, *both)
    assert refused.code == 1
    assert "has topic a from broker b-c, and the files of a-b from c would have the same names" in refused.err
    (folder / "_nsq" / "a").rename(folder / "_nsq" / "other")
    refused = run_in_process(OFFLINE, *both)
    assert refused.code == 1
    assert "has topic a from broker b-c, and that of a-b from c would have the same name" in refused.err
    assert len(rows(folder)) == 20


def test_an_export_is_continued_from_a_backup(serve: Broker, backup: Path, tmp_path: Path) -> None:
    assert export(cli_of(serve), "t", tmp_path, "--to", "2000")["messages"] == 2000
    said = export(OFFLINE, "t", tmp_path, "--from-segments", f"{serve.http_address}={backup}")
    assert (said["messages"], said["skipped_messages"]) == (3000, 2000)
    assert column(tmp_path, "seq") == list(range(5000))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--from", "10", "--to", "20"], range(10, 20)),
        (["--since", "1h", "--until", "now"], range(5000)),
        (["--until", "1h"], range(0)),
        (["--from", "4990", "--to", "9999"], range(4990, 5000)),
    ],
)
def test_positions(backup: Path, tmp_path: Path, args: list[str], expected: range) -> None:
    assert export(OFFLINE, "t", tmp_path, "--from-segments", str(backup), *args)["messages"] == len(expected)
    if expected:
        assert column(tmp_path, "seq") == list(expected)


def test_times_between_publishes(tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS + n * 10**9, numbers(10, n * 10)) for n in range(10)])
    args = (
        "--from-segments",
        str(tmp_path / "data"),
        "--from",
        "2026-11-21T12:00:03Z",
        "--to",
        "2026-11-21T12:00:05Z",
    )
    assert export(OFFLINE, "t", tmp_path / "a", *args)["messages"] == 20
    assert column(tmp_path / "a", "seq") == list(range(30, 50))


def test_damage_is_skipped_and_reported(to_parquet: ToParquet, tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS, [b"body%03d" % n]) for n in range(30)])
    damage(tmp_path / "data" / "topics" / "t.topic", b"body007")
    result = to_parquet("t", tmp_path / "a", "--from-segments", tmp_path / "data")
    assert result.code == 5
    assert "message 7 is damaged" in result.err
    assert column(tmp_path / "a", "seq") == [n for n in range(30) if n != 7]


def test_deleted_segments_are_missing(to_parquet: ToParquet, backup: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "topics" / "t.topic"
    shutil.copytree(backup / "topics" / "t.topic", folder)
    first, second, *_ = sorted(folder.glob("*.log"))
    first.unlink()
    result = to_parquet(
        "t", tmp_path / "a", "--from-segments", tmp_path / "data", "--from", "0", "--format", "json"
    )
    assert (result.code, result.records[0]["missing"]) == (6, int(second.stem))


def test_copies_for_one_channel_are_left_out(tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS, [b"%d" % n] * 3) for n in range(4)], for_channel={2})
    said = export(OFFLINE, "t", tmp_path / "a", "--from-segments", str(tmp_path / "data"))
    assert (said["messages"], said["for_one_channel"]) == (9, 3)


def test_another_log_is_refused(to_parquet: ToParquet, backup: Path, tmp_path: Path) -> None:
    export(OFFLINE, "t", tmp_path / "a", "--from-segments", f"b={backup}")
    write_log(tmp_path / "data", "t", [(NOON_NS, numbers(6000))])
    result = to_parquet("t", tmp_path / "a", "--from-segments", f"b={tmp_path / 'data'}")
    assert result.code == 1
    assert "is not the one that was exported" in result.err


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--from-segments", "{tmp}"], 1, "There is no topic t in {tmp}: it has neither topics/t.topic"),
        (["--from-segments", "{tmp}/none"], 1, "There is no topic t in {tmp}/none"),
        (
            ["--from-segments", "{data}", "--channel", "c"],
            2,
            "--from-segments and --channel exclude each other",
        ),
        (
            ["--from-segments", "{data}", "--nsqd-http-address", "127.0.0.1:1"],
            2,
            "--from-segments and --nsqd-http-address exclude each other",
        ),
    ],
)
def test_refusals(
    to_parquet: ToParquet, backup: Path, tmp_path: Path, args: list[str], code: int, said: str
) -> None:
    words = [arg.format(tmp=tmp_path, data=backup) for arg in args]
    result = to_parquet("t", tmp_path / "a", *words)
    assert (result.code, said.format(tmp=tmp_path) in result.err) == (code, True), result.err
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_spark_reads_segments(
    engine: Engine, serve: Broker, through_broker: Path, backup: Path, tmp_path: Path
) -> None:
    places = parse_places([f"{serve.http_address}={backup}"], "t")
    request = ExportRequest("t", str(tmp_path), target_bytes=100_000, layout=Layout(headers=True))
    with open_export(request, places) as job:
        tasks = job.plan(places)
        assert len(tasks) > 5
        job.run(engine, tasks, lambda *_: None)
    assert rows(tmp_path).equals(rows(through_broker))


# ---------------------------------------------------------------------- the data source


def reader(**options: str) -> NsqReader:
    source = NsqDataSource(CaseInsensitiveDict(options))
    return source.reader(source.schema())


@pytest.mark.slow
def test_the_data_source_reads_segments(
    spark: SparkSession, serve: Broker, through_broker: Path, backup: Path, tmp_path: Path
) -> None:
    names = ["broker", "seq", "id", "ts_ns", "body"]
    source = spark.read.format("nsq").options(topic="t", columns=",".join(names), minPartitions="5")
    expected = rows(through_broker, *names)
    frame = source.option("segments", f"{serve.http_address}={backup}").load()
    assert frame.toArrow().sort_by("seq").cast(expected.schema).equals(expected)
    archive = archived(backup, tmp_path / "archive")
    in_archive = source.option("segments", str(archive)).load().toArrow().sort_by("seq")
    assert in_archive.cast(expected.schema).drop_columns("broker").equals(expected.drop_columns("broker"))
    late = source.options(segments=str(backup), startingOffsets="4990", endingOffsets="4995").load()
    assert sorted(row.seq for row in late.collect()) == list(range(4990, 4995))


@pytest.mark.slow
def test_a_stream_reads_an_archive_that_grows(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "topics" / "t.topic"
    folder.mkdir(parents=True)
    source = spark.readStream.format("nsq").options(
        topic="t", segments=str(tmp_path / "a"), columns="seq,body"
    )

    def run() -> list[tuple[int, bytes]]:
        """Append messages, archive them, and run the stream to the end of the archive; return what it has written."""
        log = DiskLog(folder, segment_bytes=500, files=HastyFiles())
        append_each(log, numbered(log.next_sequence, 60))
        log.rotate_unless_empty()
        log.close()
        archived(tmp_path / "data", tmp_path / "a")
        query = (
            source.load()
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(120)
        found = spark.read.parquet(str(tmp_path / "out")).collect()
        return sorted((row.seq, bytes(row.body)) for row in found)

    for end in (120, 240):
        expected = [b"%010d" % number for number in range(end)]
        assert run() == list(enumerate(expected))


def test_topics_of_folders(backup: Path, tmp_path: Path) -> None:
    for number, topic in enumerate(["a1", "a2", "b"]):
        write_log(tmp_path / "data", topic, [(NOON_NS, numbers(number + 1))])
    folders = f"{tmp_path / 'data'},other={backup}"
    found: Counter[tuple[str, str]] = Counter()
    for each in reader(subscribePattern="a.|t", segments=folders, minPartitions="1").partitions():
        found[each.key] += each.span.length
    assert found == {("a1", "data"): 1, ("a2", "data"): 2, ("t", "other"): 5000}
    with pytest.raises(SourceError, match=r"there is no topic c on .*: correct the name"):
        reader(subscribe="a1,c", segments=folders).partitions()


def test_partitions_begin_at_segments(backup: Path) -> None:
    starts = sorted(int(path.stem) for path in (backup / "topics" / "t.topic").glob("*.log"))
    found = reader(topic="t", segments=str(backup), minPartitions="4").partitions()
    assert {each.span.first for each in found} <= set(starts)
    assert len(found) >= 4


def test_options_that_segments_exclude(tmp_path: Path) -> None:
    for options, text in (
        ({"nsqdHttpAddress": "127.0.0.1:1"}, "segments and nsqdHttpAddress exclude each other"),
        ({"segments": "s3://KEY:SECRET@bucket/a"}, "must not have keys or secrets"),
    ):
        with pytest.raises(OptionError, match=text) as caught:
            reader(**{"topic": "t", "segments": str(tmp_path), **options})
        assert "SECRET" not in str(caught.value)
