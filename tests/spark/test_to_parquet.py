"""Tests for `qcli to-parquet` in one process."""

import json
import os
import pickle
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from broker.state import damage
from cli.support import Cli
from interop.peers import Broker, qcli_lookupd, qcli_serve
from spark.support import (
    HOUR_NS,
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
from trio_nsq.log.gaps import Span
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.export.task import ExportTask
from trio_nsq.spark.hadoop import HadoopStorage
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.storage import LocalStorage, StorageError

# ---------------------------------------------------------------------- content of files


def test_all_retained_messages_unchanged(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [b"\0\xff", b"x" * 70_000, *numbers(500), "ä".encode()]
    qcli.publish(topic, bodies)
    said = export(qcli, topic, tmp_path / "a")
    assert (said["messages"], said["ranges"], said["files"], said["engine"]) == (503, 1, 1, "inline")
    assert said["body_bytes"] == sum(map(len, bodies))
    table = rows(tmp_path / "a")
    assert table["body"].to_pylist() == bodies
    assert table["seq"].to_pylist() == list(range(503))
    records = qcli("tail", topic, "--to", "latest", "--format", "json").records
    for name, key in (("topic", "topic"), ("seq", "sequence"), ("id", "id"), ("ts_ns", "timestamp_ns")):
        assert table[name].to_pylist() == [record[key] for record in records]
    assert table["ts"].cast(pa.int64()).to_pylist() == [record["timestamp_ns"] // 1000 for record in records]
    assert set(table["broker"].to_pylist()) == {qcli.http_address}
    assert table["attempts"].null_count == 503
    (name,) = parquet_files(tmp_path / "a")
    assert said["file_bytes"] == (tmp_path / "a" / name).stat().st_size
    assert name.endswith("-00000000000000000000-00000000000000000503.parquet")


def test_schema(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b"x"])
    export(qcli, topic, tmp_path)
    (name,) = parquet_files(tmp_path)
    assert [str(field) for field in pq.read_schema(tmp_path / name)] == [
        "pyarrow.Field<topic: string not null>",
        "pyarrow.Field<broker: string not null>",
        "pyarrow.Field<seq: int64 not null>",
        "pyarrow.Field<id: string not null>",
        "pyarrow.Field<ts_ns: int64 not null>",
        "pyarrow.Field<ts: timestamp[us, tz=UTC] not null>",
        "pyarrow.Field<attempts: int32>",
        "pyarrow.Field<headers: map<string, string ('headers')>>",
        "pyarrow.Field<body: binary not null>",
    ]
    found = pq.ParquetFile(tmp_path / name).metadata.row_group(0)
    assert {found.column(index).compression for index in range(8)} == {"ZSTD"}


def test_duckdb_reads_exports(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(1000))
    export(qcli, topic, tmp_path, "--partition-by", "hour", "--text")
    relation = duckdb.sql(
        f"SELECT count(*), count(DISTINCT seq), sum(body::BIGINT), min(ts) = min(make_timestamptz(ts_ns // 1000)), "
        f"min(date)::VARCHAR = strftime(min(ts), '%Y-%m-%d') FROM '{tmp_path}/**/*.parquet'"
    )
    assert relation is not None
    assert relation.fetchall() == [(1000, 1000, sum(range(1000)), True, True)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--from", "10", "--to", "20"], range(10, 20)),
        (["--since", "1h", "--until", "now"], range(50)),
        (["--until", "1h"], range(0)),
        (["--from", "40", "--to", "1000"], range(40, 50)),
        (["--from", "latest"], range(0)),
    ],
)
def test_selection(qcli: Cli, topic: str, tmp_path: Path, args: list[str], expected: range) -> None:
    qcli.publish(topic, numbers(50))
    assert export(qcli, topic, tmp_path, *args)["messages"] == len(expected)
    if expected:
        assert column(tmp_path, "seq") == list(expected)
    else:
        assert parquet_files(tmp_path) == []


def test_row_groups_and_target_size(qcli: Cli, topic: str, tmp_path: Path) -> None:
    for start in range(0, 1000, 25):
        qcli.publish(topic, [b"%09d" % n + b"x" * 991 for n in range(start, start + 25)])
    said = export(
        qcli,
        topic,
        tmp_path,
        "--target-file-size",
        "300KiB",
        "--row-group-size",
        "64KiB",
        "--compression",
        "none",
    )
    assert said["ranges"] == said["files"] == 4
    assert rows(tmp_path)["seq"].to_pylist() == list(range(1000))
    metadata = pq.ParquetFile(tmp_path / parquet_files(tmp_path)[0]).metadata
    assert (metadata.num_rows, metadata.num_row_groups) == (250, 4)
    assert metadata.row_group(0).column(7).compression == "UNCOMPRESSED"


@pytest.mark.parametrize("codec", ["snappy", "gzip", "lz4", "brotli"])
def test_compression(qcli: Cli, topic: str, tmp_path: Path, codec: str) -> None:
    qcli.publish(topic, numbers(10))
    export(qcli, topic, tmp_path, "--compression", codec)
    metadata = pq.ParquetFile(tmp_path / parquet_files(tmp_path)[0]).metadata
    assert metadata.row_group(0).column(7).compression == codec.upper()
    assert rows(tmp_path)["body"].to_pylist() == numbers(10)


def test_invalid_text_is_kept(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b"a", b"\xff", "ä".encode()])
    said = export(qcli, topic, tmp_path, "--text")
    assert said["unparsed"] == 1
    assert rows(tmp_path, "body", "unparsed").to_pylist() == [
        {"body": "a", "unparsed": None},
        {"body": None, "unparsed": b"\xff"},
        {"body": "ä", "unparsed": None},
    ]


# ---------------------------------------------------------------------- JSON


def test_inferred_json_columns(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [
        b'{"user": "ann", "n": 1, "ts": 2}',
        b'{"user": "bob", "n": 2.5, "tags": ["x"]}',
        b"nonsense",
        b'{"n": "x"}',
    ]
    qcli.publish(topic, bodies[:2])
    said = export(qcli, topic, tmp_path, "--json")
    assert said["unparsed"] == 0
    qcli.publish(topic, [*bodies[2:], b'{"new": 1}'])
    assert export(qcli, topic, tmp_path, "--json")["unparsed"] == 2
    assert rows(tmp_path, "user", "n", "body_ts", "tags", "rest", "unparsed").to_pylist() == [
        {"user": "ann", "n": 1.0, "body_ts": 2, "tags": None, "rest": None, "unparsed": None},
        {"user": "bob", "n": 2.5, "body_ts": None, "tags": '["x"]', "rest": None, "unparsed": None},
        {"user": None, "n": None, "body_ts": None, "tags": None, "rest": None, "unparsed": b"nonsense"},
        {"user": None, "n": None, "body_ts": None, "tags": None, "rest": None, "unparsed": b'{"n": "x"}'},
        {"user": None, "n": None, "body_ts": None, "tags": None, "rest": '{"new":1}', "unparsed": None},
    ]


def test_named_json_columns(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b'{"user": "ann", "ts": "2026-11-21T12:00:00Z", "n": 1, "more": 1}', b"[]"])
    export(qcli, topic, tmp_path, "--json", "--columns", "user,n:double,ts:timestamp")
    table = rows(tmp_path)
    assert table.column_names[8:] == ["user", "n", "body_ts", "unparsed"]
    assert table["body_ts"].cast(pa.int64()).to_pylist() == [NOON_NS // 1000, None]
    assert table["n"].to_pylist() == [1.0, None]
    assert table["unparsed"].to_pylist() == [None, b"[]"]


def test_json_without_objects(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(3))
    result = to_parquet(topic, tmp_path, "--json")
    assert (result.code, result.err) == (
        1,
        "Error: No message of the sample is a JSON object: columns cannot be inferred.\n",
    )


# ---------------------------------------------------------------------- partitions


def test_partitions_if_the_clock_was_set_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    times = [NOON_NS - 1, NOON_NS, NOON_NS + HOUR_NS, NOON_NS + 5, NOON_NS + 12 * HOUR_NS]
    write_log(data, "t", [(time_ns, [b"%d" % index] * 2) for index, time_ns in enumerate(times)])
    with qcli_serve(data) as broker:
        qcli = cli_of(broker)
        said = export(qcli, "t", tmp_path / "hours", "--partition-by", "hour")
        assert (said["messages"], said["ranges"], said["files"]) == (10, 1, 5)
        found = rows(tmp_path / "hours", "seq", "ts_ns", "date", "hour").to_pylist()
        assert [row["ts_ns"] for row in found] == [time_ns for time_ns in times for _ in range(2)]
        assert [row["hour"] for row in found[::2]] == [11, 12, 13, 12, 0]
        assert [row["date"] for row in found[::2]] == ["2026-11-21"] * 4 + ["2026-11-22"]
        assert sum(name.endswith("-2.parquet") for name in parquet_files(tmp_path / "hours")) == 1
        assert export(qcli, "t", tmp_path / "dates", "--partition-by", "date")["files"] == 2
        assert (
            export(qcli, "t", tmp_path / "since", "--since", "2026-11-21T12:00Z", "--to", "8")["messages"]
            == 6
        )


# ---------------------------------------------------------------------- again


def test_exported_messages_are_not_written_again(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(100))
    export(qcli, topic, tmp_path, "--from", "20", "--to", "60")
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in parquet_files(tmp_path)}
    said = export(qcli, topic, tmp_path)
    assert (said["messages"], said["ranges"]) == (60, 2)
    assert said["skipped_messages"] == 40
    qcli.publish(topic, numbers(50, 100))
    assert export(qcli, topic, tmp_path)["messages"] == 50
    assert export(qcli, topic, tmp_path)["messages"] == 0
    assert column(tmp_path, "seq") == list(range(150))
    assert (
        before.items()
        <= {name: (tmp_path / name).stat().st_mtime_ns for name in parquet_files(tmp_path)}.items()
    )
    assert not list((tmp_path / "_nsq" / topic / "done").iterdir())


def request_for(qcli: Cli, topic: str, folder: Path, **more: object) -> ExportRequest:
    return ExportRequest(topic, str(folder), **more)  # type: ignore[arg-type]


def test_results_of_a_killed_run_count(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Two of three ranges are done, the third has its file and no result, and a fourth is half written."""
    qcli.publish(topic, [b"%09d" % n for n in range(400)])
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request_for(qcli, topic, tmp_path, min_ranges=4), [place]) as job:
        tasks = job.plan([place])
        assert len(tasks) == 4
        for task in tasks[:3]:
            task.run()
        (tmp_path / "_nsq" / topic / "done" / f"{parquet_files(tmp_path)[2][:-8]}.json").unlink()
        file = LocalStorage(tmp_path).create(f"{parquet_files(tmp_path)[2]}")
        file.write(b"PAR1")
        file.close()
        assert leftovers(tmp_path) != []
    assert column(tmp_path, "seq") == list(range(300))  # readers see complete files only
    said = export(qcli, topic, tmp_path)
    assert (said["ranges"], said["skipped_messages"]) == (2, 200)
    assert column(tmp_path, "seq") == list(range(400))
    assert leftovers(tmp_path) == []


def test_complete_files_are_not_replaced(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The messages of a range without a result may be gone from the broker, so its complete files must stay."""
    qcli.publish(topic, numbers(10))
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request_for(qcli, topic, tmp_path), [place]) as job:
        (task,) = job.plan([place])
        first = task.run()
        path = tmp_path / first.files[0]
        (tmp_path / "_nsq" / topic / "done" / f"{path.stem}.json").unlink()
        written = path.stat().st_mtime_ns
        assert task.run() == first
        assert task.run() == first  # from its saved result
        assert path.stat().st_mtime_ns == written
    assert leftovers(tmp_path) == []


def test_files_without_their_manifest_are_refused(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """It is not known what is in the files: an export that began again would write their messages twice."""
    qcli.publish(topic, numbers(10))
    export(qcli, topic, tmp_path)
    manifest = tmp_path / "_nsq" / topic / "manifest.json"
    kept = manifest.rename(manifest.with_name("kept"))
    qcli.publish(topic, numbers(10, 10))
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path))
    assert result.code == 1
    assert "and no manifest" in result.err
    assert len(result.err.splitlines()) == 1
    assert len(rows(tmp_path)) == 10
    qcli.publish(f"{topic}-b", numbers(1))  # its files are beside those of the other topic
    assert export(qcli, f"{topic}-b", tmp_path)["messages"] == 1
    kept.rename(manifest)
    assert export(qcli, topic, tmp_path)["messages"] == 10


def test_other_layout_is_refused(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b'{"a": 1}'])
    export(qcli, topic, tmp_path / "a")
    for args in (["--text"], ["--json"], ["--partition-by", "date"]):
        result = to_parquet(topic, tmp_path / "a", *args)
        assert result.code == 1
        assert "has files with binary bodies and no partitions" in result.err
    export(qcli, topic, tmp_path / "b", "--json", "--columns", "a")
    for columns in ("b", "a:string", "a,b"):
        result = to_parquet(topic, tmp_path / "b", "--json", "--columns", columns)
        assert (result.code, "has files with --json --columns a:long," in result.err) == (1, True)
    assert to_parquet(topic, tmp_path / "b", "--json", "--columns", "a:long", "-q").code == 0
    assert (
        to_parquet(topic, tmp_path / "b", "--json", "-q").code == 0
    )  # without --columns, the first layout is used


def test_recreated_topic_is_refused(
    to_parquet: ToParquet, broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    qcli.publish(topic, numbers(10))
    export(qcli, topic, tmp_path)
    for count in (5, 20):  # fewer messages than before, and more
        broker.http("POST", "/topic/delete", topic=topic)
        qcli.publish(topic, numbers(count))
        result = to_parquet(topic, tmp_path)
        assert result.code == 1
        assert (
            "it was deleted and recreated, or lost its last messages, or another "
            "broker has this address now. Choose another folder." in result.err
        )
    assert column(tmp_path, "seq") == list(range(10))


def test_unreadable_manifest(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    export(qcli, topic, tmp_path)
    (tmp_path / "_nsq" / topic / "manifest.json").write_bytes(b"{")
    result = to_parquet(topic, tmp_path)
    assert (result.code, "cannot be used: it cannot be read" in result.err) == (1, True)


def test_spark_that_is_missing_is_named(
    to_parquet: ToParquet, qcli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if there is nothing to export."""
    qcli.publish(topic, [b"1"])
    monkeypatch.setitem(sys.modules, "pyspark", None)
    first = to_parquet(topic, tmp_path / "out")
    assert (first.code, first.err.count("\n")) == (0, 1)  # nothing about Spark, which the user does not have
    for options in (["--engine", "spark"], ["--master", "spark://127.0.0.1:1"]):
        result = to_parquet(topic, tmp_path / "out", *options)
        assert result.code == 1
        assert result.err.startswith("Error: The extra 'spark' is not installed (")
        assert result.err.endswith("): pip install 'trio-nsq[spark]'.\n")


def test_one_export_at_a_time(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request_for(qcli, topic, tmp_path), [place]):
        result = to_parquet(topic, tmp_path)
    expected = f"Error: Another export of topic {topic} writes to {tmp_path}: process {os.getpid()} on "
    assert (result.code, result.err[: len(expected)]) == (1, expected)


# ---------------------------------------------------------------------- several brokers


def test_brokers_of_a_discovery_service(tmp_path: Path) -> None:
    with qcli_lookupd() as lookupd:
        tcp = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "1", tcp) as one, qcli_serve(tmp_path / "2", tcp) as two:
            cli_of(one).publish("t", numbers(30))
            cli_of(two).publish("t", numbers(20, 100))
            named = f"{one.http_address},{two.http_address}"
            assert export(cli_of(one), "t", tmp_path / "a", "--nsqd-http-address", named)["messages"] == 50
            found = rows(tmp_path / "a", "broker", "seq", "body").to_pylist()
            assert {(row["broker"], row["seq"]) for row in found} == {
                *((one.http_address, n) for n in range(30)),
                *((two.http_address, n) for n in range(20)),
            }
            assert {row["body"] for row in found} == {*numbers(30), *numbers(20, 100)}
            qcli = Cli("127.0.0.1:1", "127.0.0.1:1")
            service = ["--lookupd-http-address", lookupd.http_address]
            while (
                result := qcli("to-parquet", "t", str(tmp_path / "b"), "--format", "json", *service)
            ).code != 0:
                assert "know no broker with topic" in result.err  # the brokers have not registered yet
            again = export(qcli, "t", tmp_path / "b", *service)
            assert result.records[0]["messages"] + again["messages"] == 50
            assert rows(tmp_path / "b").equals(rows(tmp_path / "a"))


# ---------------------------------------------------------------------- missing messages


def test_damage_is_skipped_and_reported(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_log(data, "t", [(NOON_NS, [b"body%03d" % n]) for n in range(30)])
    damage(data / "topics" / "t.topic", b"body007")
    with qcli_serve(data) as broker:
        result = cli_of(broker)("to-parquet", "t", str(tmp_path / "a"))
        assert result.code == 5
        assert f"Damage: t on {broker.http_address}: message 7 is damaged or missing in the log" in result.err
        assert result.err.rstrip().endswith("; 1 missing")
        assert column(tmp_path / "a", "seq") == [n for n in range(30) if n != 7]
        assert export(cli_of(broker), "t", tmp_path / "a")["messages"] == 0


def test_copies_for_one_channel_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_log(data, "t", [(NOON_NS, [b"%d" % n] * 3) for n in range(4)], for_channel={2})
    with qcli_serve(data) as broker:
        said = export(cli_of(broker), "t", tmp_path / "a")
    assert (said["messages"], said["for_one_channel"], said["missing"]) == (9, 3, 0)
    assert column(tmp_path / "a", "seq") == [0, 1, 2, 3, 4, 5, 9, 10, 11]


def test_export_to_a_file_system_of_pyarrow(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(100))
    arrow = HadoopStorage(f"file://{tmp_path / 'a'}")
    for _ in range(2):
        with arrow.hold("lock", StorageError) as lease:
            job = ExportJob(request_for(qcli, topic, tmp_path / "a", min_ranges=3), arrow, lease)
            for task in job.plan([BrokerPlace(qcli.http_address, topic)]):
                task.run(storage=arrow)
            job.run(run_inline, [], lambda *_: None)
    assert job.result.skipped_messages == 100
    assert column(tmp_path / "a", "seq") == list(range(100))
    assert leftovers(tmp_path) == []


def test_tasks_can_be_pickled(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(5))
    task = ExportTask(
        ExportRequest(topic, str(tmp_path)), Layout(), BrokerPlace(qcli.http_address, topic), Span(0, 5)
    )
    done = pickle.loads(pickle.dumps(task)).run()
    assert pickle.loads(pickle.dumps(done)) == done
    assert (done.messages, json.loads(done.to_bytes())["broker"]) == (5, qcli.http_address)


def test_unfinished_merged_file_is_removed(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Of a run with --compact that was killed."""
    qcli.publish(topic, numbers(1))
    killed = tmp_path / f".{topic}-merged-0123456789abcdef0123.parquet.tmp-1-a"
    killed.write_bytes(b"")
    others = tmp_path / f".{topic}x-merged-0123456789abcdef0123.parquet.tmp-1-a"
    others.write_bytes(b"")
    assert to_parquet(topic, tmp_path).code == 0
    assert (killed.exists(), others.exists()) == (False, True)
