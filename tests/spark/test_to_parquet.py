"""`qcli to-parquet` in one process."""

import json
import pickle
import random
import resource
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from broker.state import damage
from cli.support import DEADLINE_S, Cli, Result
from interop.peers import Broker, nsqd, qcli_lookupd, qcli_serve
from spark.support import (
    HOUR_NS,
    NOON_NS,
    cli_of,
    column,
    export,
    fill,
    leftovers,
    numbers,
    parquet_files,
    rows,
    run_in_process,
    until,
    write_log,
)
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.extras import install_hint
from trio_nsq.spark.broker_log import BrokerLog
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.export.request import ExportRequest, FileOptions
from trio_nsq.spark.export.task import ExportTask, export_range
from trio_nsq.spark.ranges import Span
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.spark.storage import ArrowStorage, LocalStorage, Storage, StorageError, storage_at

ToParquet = Callable[..., Result]


@pytest.fixture
def to_parquet(qcli: Cli) -> ToParquet:
    """Runs the command in this process."""
    return lambda *args, cli=qcli: run_in_process(cli, "to-parquet", *map(str, args))


# ---------------------------------------------------------------------- what is written


def test_all_that_is_kept_exactly_as_it_is(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [b"\0\xff", b"x" * 70_000, *numbers(500), "ä".encode()]
    fill(qcli, topic, bodies)
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


def test_the_schema(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, [b"x"])
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
        "pyarrow.Field<body: binary not null>",
    ]
    found = pq.ParquetFile(tmp_path / name).metadata.row_group(0)
    assert {found.column(index).compression for index in range(8)} == {"ZSTD"}


def test_duckdb_reads_it(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(1000))
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
def test_which_messages(qcli: Cli, topic: str, tmp_path: Path, args: list[str], expected: range) -> None:
    fill(qcli, topic, numbers(50))
    assert export(qcli, topic, tmp_path, *args)["messages"] == len(expected)
    if expected:
        assert column(tmp_path, "seq") == list(expected)
    else:
        assert parquet_files(tmp_path) == []


def test_row_groups_and_target_size(qcli: Cli, topic: str, tmp_path: Path) -> None:
    for start in range(0, 1000, 25):
        fill(qcli, topic, [b"%09d" % n + b"x" * 991 for n in range(start, start + 25)])
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
    fill(qcli, topic, numbers(10))
    export(qcli, topic, tmp_path, "--compression", codec)
    metadata = pq.ParquetFile(tmp_path / parquet_files(tmp_path)[0]).metadata
    assert metadata.row_group(0).column(7).compression == codec.upper()
    assert rows(tmp_path)["body"].to_pylist() == numbers(10)


def test_text_is_kept_as_it_is_where_it_is_none(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, [b"a", b"\xff", "ä".encode()])
    said = export(qcli, topic, tmp_path, "--text")
    assert said["unparsed"] == 1
    assert rows(tmp_path, "body", "unparsed").to_pylist() == [
        {"body": "a", "unparsed": None},
        {"body": None, "unparsed": b"\xff"},
        {"body": "ä", "unparsed": None},
    ]


# ---------------------------------------------------------------------- JSON


def test_json_columns_that_were_inferred(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [
        b'{"user": "ann", "n": 1, "ts": 2}',
        b'{"user": "bob", "n": 2.5, "tags": ["x"]}',
        b"nonsense",
        b'{"n": "x"}',
    ]
    fill(qcli, topic, bodies[:2])
    said = export(qcli, topic, tmp_path, "--json")
    assert said["unparsed"] == 0
    fill(qcli, topic, [*bodies[2:], b'{"new": 1}'])
    assert export(qcli, topic, tmp_path, "--json")["unparsed"] == 2
    assert rows(tmp_path, "user", "n", "body_ts", "tags", "rest", "unparsed").to_pylist() == [
        {"user": "ann", "n": 1.0, "body_ts": 2, "tags": None, "rest": None, "unparsed": None},
        {"user": "bob", "n": 2.5, "body_ts": None, "tags": '["x"]', "rest": None, "unparsed": None},
        {"user": None, "n": None, "body_ts": None, "tags": None, "rest": None, "unparsed": b"nonsense"},
        {"user": None, "n": None, "body_ts": None, "tags": None, "rest": None, "unparsed": b'{"n": "x"}'},
        {"user": None, "n": None, "body_ts": None, "tags": None, "rest": '{"new":1}', "unparsed": None},
    ]


def test_json_columns_that_were_named(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, [b'{"user": "ann", "ts": "2026-11-21T12:00:00Z", "n": 1, "more": 1}', b"[]"])
    export(qcli, topic, tmp_path, "--json", "--columns", "user,n:double,ts:timestamp")
    table = rows(tmp_path)
    assert table.column_names[7:] == ["user", "n", "body_ts", "unparsed"]
    assert table["body_ts"].cast(pa.int64()).to_pylist() == [NOON_NS // 1000, None]
    assert table["n"].to_pylist() == [1.0, None]
    assert table["unparsed"].to_pylist() == [None, b"[]"]


def test_json_without_any_object(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(3))
    result = to_parquet(topic, tmp_path, "--json")
    assert (result.code, result.err) == (
        1,
        "Error: None of the messages looked at is a JSON object: there are no columns to be inferred.\n",
    )


# ---------------------------------------------------------------------- partitions


def test_partitions_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
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


def test_what_is_there_is_not_written_again(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(100))
    export(qcli, topic, tmp_path, "--from", "20", "--to", "60")
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in parquet_files(tmp_path)}
    said = export(qcli, topic, tmp_path)
    assert (said["messages"], said["ranges"]) == (60, 2)
    assert (said["skipped_messages"], said["skipped_ranges"]) == (40, 1)
    fill(qcli, topic, numbers(50, 100))
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


def test_what_a_run_that_was_killed_has_done_counts(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Two of three ranges are done, of the third the file is there and not noted; a fourth is half written."""
    fill(qcli, topic, [b"%09d" % n for n in range(400)])
    with open_export(request_for(qcli, topic, tmp_path, min_ranges=4), [qcli.http_address]) as job:
        tasks = job.plan([qcli.http_address])
        assert len(tasks) == 4
        for task in tasks[:3]:
            task.run()
        (tmp_path / "_nsq" / topic / "done" / f"{parquet_files(tmp_path)[2][:-8]}.json").unlink()
        temporary, file = LocalStorage(tmp_path).create(f"{parquet_files(tmp_path)[2]}")
        file.write(b"PAR1")
        file.close()
    assert column(tmp_path, "seq") == list(range(300))  # which is what a reader sees meanwhile
    said = export(qcli, topic, tmp_path)
    assert (said["ranges"], said["skipped_ranges"]) == (2, 2)
    assert column(tmp_path, "seq") == list(range(400))
    assert leftovers(tmp_path) == []
    assert not (tmp_path / temporary).exists()


def test_a_file_that_has_its_name_stays(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A range whose task was killed between its files' names and its note may be half gone on the broker by now."""
    fill(qcli, topic, numbers(10))
    with open_export(request_for(qcli, topic, tmp_path), [qcli.http_address]) as job:
        (task,) = job.plan([qcli.http_address])
        first = task.run()
        path = tmp_path / first.files[0]
        (tmp_path / "_nsq" / topic / "done" / f"{path.stem}.json").unlink()
        written = path.stat().st_mtime_ns
        assert task.run() == first
        assert task.run() == first  # as noted
        assert path.stat().st_mtime_ns == written
    assert leftovers(tmp_path) == []


def test_another_layout_is_refused(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, [b'{"a": 1}'])
    export(qcli, topic, tmp_path / "a")
    for args in (["--text"], ["--json"], ["--partition-by", "date"]):
        result = to_parquet(topic, tmp_path / "a", *args)
        assert result.code == 1
        assert "was begun with bodies as they are and no partitions" in result.err
    export(qcli, topic, tmp_path / "b", "--json", "--columns", "a")
    for columns in ("b", "a:string", "a,b"):
        result = to_parquet(topic, tmp_path / "b", "--json", "--columns", columns)
        assert (result.code, "was begun with --json --columns a:long," in result.err) == (1, True)
    assert to_parquet(topic, tmp_path / "b", "--json", "--columns", "a:long", "-q").code == 0
    assert to_parquet(topic, tmp_path / "b", "--json", "-q").code == 0  # as it was begun


def test_a_topic_that_was_made_again_is_another(
    to_parquet: ToParquet, broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    fill(qcli, topic, numbers(10))
    export(qcli, topic, tmp_path)
    for count in (5, 20):  # fewer than before, and more
        broker.http("POST", "/topic/delete", topic=topic)
        fill(qcli, topic, numbers(count))
        result = to_parquet(topic, tmp_path)
        assert result.code == 1
        assert "it was deleted and made again, or lost its end. Name another folder." in result.err
    assert column(tmp_path, "seq") == list(range(10))


def test_a_manifest_that_cannot_be_read(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(10))
    export(qcli, topic, tmp_path)
    (tmp_path / "_nsq" / topic / "manifest.json").write_bytes(b"{")
    result = to_parquet(topic, tmp_path)
    assert (result.code, "is of no use: it cannot be read" in result.err) == (1, True)


def test_one_export_at_a_time(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(10))
    with open_export(request_for(qcli, topic, tmp_path), [qcli.http_address]):
        result = to_parquet(topic, tmp_path)
    assert (result.code, result.err) == (1, f"Error: Another export of topic {topic} writes to {tmp_path}.\n")


# ---------------------------------------------------------------------- several brokers


def test_all_brokers_that_a_discovery_service_names(tmp_path: Path) -> None:
    with qcli_lookupd() as lookupd:
        tcp = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "1", tcp) as one, qcli_serve(tmp_path / "2", tcp) as two:
            fill(cli_of(one), "t", numbers(30))
            fill(cli_of(two), "t", numbers(20, 100))
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
                assert "name has topic" in result.err  # they have yet to register it
            again = export(qcli, "t", tmp_path / "b", *service)
            assert result.records[0]["messages"] + again["messages"] == 50
            assert rows(tmp_path / "b").equals(rows(tmp_path / "a"))


# ---------------------------------------------------------------------- what is missing


def test_damage_is_told_and_passed_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_log(data, "t", [(NOON_NS, [b"body%03d" % n]) for n in range(30)])
    damage(data / "topics" / "t.topic", b"body007")
    with qcli_serve(data) as broker:
        result = cli_of(broker)("to-parquet", "t", str(tmp_path / "a"))
        assert result.code == 5
        assert f"Damage: t on {broker.http_address}: message 7 is damaged on the broker's disk" in result.err
        assert result.err.rstrip().endswith("; 1 missing")
        assert column(tmp_path / "a", "seq") == [n for n in range(30) if n != 7]
        assert export(cli_of(broker), "t", tmp_path / "a")["messages"] == 0


def test_what_came_back_for_one_channel_is_not_written_twice(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_log(data, "t", [(NOON_NS, [b"%d" % n] * 3) for n in range(4)], for_channel={2})
    with qcli_serve(data) as broker:
        said = export(cli_of(broker), "t", tmp_path / "a")
    assert (said["messages"], said["for_one_channel"], said["missing"]) == (9, 3, 0)
    assert column(tmp_path / "a", "seq") == [0, 1, 2, 3, 4, 5, 9, 10, 11]


# ---------------------------------------------------------------------- what goes wrong


def test_what_is_wrong_with_a_command_line(to_parquet: ToParquet, topic: str, tmp_path: Path) -> None:
    for args, text in (
        (["--text", "--json"], "exclude each other"),
        (["--columns", "a"], "say --json"),
        (["--json", "--columns", "a:int"], "is not one of string, long"),
        (["--json", "--columns", "a,a"], "is there twice"),
        (["--json", "--columns", "a,"], "empty name"),
        (["--channel", "c", "--from", "1"], "the channel says where to begin"),
        (["--channel", "c d"], "is not a channel name"),
        (["--follow", "--to", "5"], "until it is interrupted"),
        (["--engine", "inline", "--master", "local"], "exclude each other"),
        (["--compression", "snappy", "--compression-level", "2"], "means nothing to snappy"),
        (["--target-file-size", "1kB"], "less than 64KiB"),
        (["--nsqd-http-address", "a:1,a:1"], "it names a:1 twice"),
        (["--from", "9", "--to", "3"], "nothing between them"),
        (["--every", "5s"], "--every is for --follow"),
    ):
        result = to_parquet(topic, tmp_path, *args)
        assert (result.code, text in result.err) == (2, True), result.err


def test_no_topic_no_broker_and_no_log(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    result = to_parquet(topic, folder)
    assert (result.code, result.err) == (1, f"Error: There is no topic {topic} on {qcli.http_address}.\n")
    result = to_parquet(topic, folder, cli=Cli("127.0.0.1:1", "127.0.0.1:1"))
    assert (result.code, "No broker answers at 127.0.0.1:1: connection refused." in result.err) == (3, True)
    result = to_parquet(topic, folder, "--lookupd-http-address", "127.0.0.1:1")
    assert (result.code, "No nsqlookupd answers at 127.0.0.1:1: " in result.err) == (3, True)
    assert "Start one with 'qcli lookupd', or name another address with --lookupd-http-address." in result.err
    with nsqd(tmp_path / "data") as other:
        other.create("t")
        result = to_parquet("t", folder, cli=cli_of(other))
        assert (result.code, "cannot be read by sequence" in result.err) == (1, True)
    assert not folder.exists()


def test_a_folder_that_cannot_be_used(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(3))
    (tmp_path / "file").write_text("")
    result = to_parquet(topic, tmp_path / "file")
    assert (result.code, result.err) == (1, f"Error: {tmp_path}/file: Not a directory\n")
    result = to_parquet(topic, "nonsense://bucket/folder")
    assert (result.code, "nonsense://bucket/folder cannot be used" in result.err) == (1, True)


@pytest.mark.parametrize(("limit_bytes", "file"), [(100, "_nsq/{0}/manifest.json"), (20_000, "{0}-")])
def test_a_disk_that_takes_no_more_is_named(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, limit_bytes: int, file: str
) -> None:
    fill(qcli, topic, [random.Random(1).randbytes(100_000)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        result = to_parquet(topic, tmp_path / "a", "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.code == 1
    assert result.err.startswith(f"Error: {tmp_path}/a/{file.format(topic)}")
    assert result.err.endswith(": File too large\n")


def test_without_the_extra_the_command_says_so(qcli: Cli, topic: str, tmp_path: Path) -> None:
    consuming = ["--nsqd-tcp-address", "127.0.0.1:1", "--channel", "c"]
    for module, args in (("pyarrow", []), ("pyarrow", consuming), ("pyspark", ["--engine", "spark"])):
        fill(qcli, topic, numbers(1))
        program = f"import sys; sys.modules[{module!r}] = None; from qcli.app import run; sys.exit(run(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", program, "to-parquet", topic, str(tmp_path / module), *args],
            env=qcli.environment(),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1
        assert install_hint("spark") in done.stderr
        assert "Traceback" not in done.stderr
        assert parquet_files(tmp_path / module) == []


class StalledAnswers(socketserver.ThreadingTCPServer):
    """A proxy before a broker: until it is told otherwise, three mebibytes of an answer go through and no more."""

    block_on_close = False

    def __init__(self, broker_address: str) -> None:
        host, _, port = broker_address.rpartition(":")
        self._broker = (host, int(port))
        self.stalled, self.goes_on = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.address = "%s:%d" % self.socket.getsockname()

    def finish_request(self, request: Any, client_address: object) -> None:
        """Pass on what one client and the broker say, until either of them ends it."""
        passed = 0
        with socket.create_connection(self._broker) as broker, suppress(OSError):
            while True:
                for source in select.select([request, broker], [], [])[0]:
                    if not (data := source.recv(65536)):
                        return
                    if source is request:
                        broker.sendall(data)
                        continue
                    passed += len(data)
                    if passed > 3 << 20 and not self.goes_on.is_set():
                        self.stalled.set()
                        self.goes_on.wait(DEADLINE_S)
                    request.sendall(data)


@contextmanager
def stalled_answers(broker_address: str) -> Iterator[StalledAnswers]:
    with StalledAnswers(broker_address) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.goes_on.set()
            proxy.shutdown()
            thread.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_half(
    qcli: Cli, topic: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The broker says nothing more in the middle of a range, so that the signal comes there."""
    fill(qcli, topic, [b"x" * 1000] * 6000)
    with stalled_answers(qcli.http_address) as proxy:
        slow = Cli(qcli.tcp_address, proxy.address)
        with slow.running("to-parquet", topic, str(tmp_path / "a"), "--row-group-size", "1MiB") as running:
            assert proxy.stalled.wait(DEADLINE_S)
            until(lambda: any(".parquet" in path.name for path in leftovers(tmp_path / "a")))
            running.process.send_signal(number)
            result = running.end()
        assert result.code == code
        assert result.err.rstrip().endswith("The same command goes on from there.")
        assert (parquet_files(tmp_path / "a"), leftovers(tmp_path / "a")) == ([], [])
        proxy.goes_on.set()
        export(slow, topic, tmp_path / "a")
        assert column(tmp_path / "a", "seq") == list(range(6000))


def test_on_a_terminal_a_bar_shows_how_far_it_is(topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = cli_of(broker)
        fill(qcli, topic, [b"x" * 1000] * 30_000)
        arguments = ["--target-file-size", "1MiB", "--compression", "none"]
        with qcli.on_terminal("to-parquet", topic, str(tmp_path / "a"), *arguments) as terminal:
            terminal.expect(b"/30000")
            terminal.expect(b"messages/s")
            assert terminal.end() == 0
    assert b"30,000 messages (28.6 MiB) of" in terminal.shown


# ---------------------------------------------------------------------- where to


def storages(tmp_path: Path) -> list[Storage]:
    system = pyarrow.fs.LocalFileSystem()
    return [LocalStorage(tmp_path / "local"), ArrowStorage(system, str(tmp_path / "arrow"))]


@pytest.mark.parametrize("index", [0, 1])
def test_storages_keep_their_promises(tmp_path: Path, index: int) -> None:
    storage = storages(tmp_path)[index]
    assert (storage.read("a/b"), storage.names("a"), storage.exists("a/b")) == (None, [], False)
    storage.write("a/b", b"one")
    storage.write("a/b", b"two")
    assert (storage.read("a/b"), storage.names("a"), storage.exists("a/b")) == (b"two", ["a/b"], True)
    temporary, file = storage.create("c.parquet")
    file.write(b"three")
    assert storage.complete(temporary, file) == 5
    assert (storage.temporary_names(), storage.exists("d/c.parquet")) == ([temporary], False)
    storage.publish([(temporary, "d/e/c.parquet")])
    assert (storage.temporary_names(), storage.read("d/e/c.parquet")) == ([], b"three")
    storage.discard("d/e/c.parquet")
    storage.discard("d/e/c.parquet")
    assert not storage.exists("d/e/c.parquet")


def test_an_export_to_a_file_system_of_pyarrow(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(100))
    arrow = ArrowStorage(pyarrow.fs.LocalFileSystem(), str(tmp_path / "a"))
    for _ in range(2):
        job = ExportJob(request_for(qcli, topic, tmp_path / "a", min_ranges=3), arrow)
        for task in job.plan([qcli.http_address]):
            export_range(task, arrow)
        job.run(run_inline, [], lambda *_: None)
    assert job.result.skipped_ranges == 3
    assert column(tmp_path / "a", "seq") == list(range(100))
    assert leftovers(tmp_path) == []


def test_places() -> None:
    assert isinstance(storage_at("file:///tmp/x"), LocalStorage)
    assert isinstance(storage_at("x/y"), LocalStorage)
    assert isinstance(storage_at("s3a://key:secret@bucket/x?region=eu-west-1"), ArrowStorage)
    with pytest.raises(StorageError):
        storage_at("what://x/y")


# ---------------------------------------------------------------------- reading


def test_a_broker_that_goes_away_is_waited_for(topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        fill(cli_of(broker), topic, [b"%09d" % n * 20 for n in range(20_000)])
        port = broker.http_address.rpartition(":")[2]
        log = BrokerLog(broker.http_address, topic)
        reading = log.read(Span(0, 20_000))
        sequences: list[int] = []
        found = next(reading)
        sequences += range(found.base_sequence, found.next_sequence)  # type: ignore[union-attr]
        broker.process.kill()
        broker.process.wait()
        with qcli_serve(tmp_path / "data", f"--http-address=127.0.0.1:{port}"):
            for found in reading:
                sequences += range(found.base_sequence, found.next_sequence)  # type: ignore[union-attr]
    assert sequences == list(range(20_000))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX-NSQ-End-Sequence: 5\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n\x89NSQ",
        b"HTTP/1.1 200 OK\r\nX-NSQ-End-Sequence: 5\r\nTransfer-Encoding: chunked\r\n\r\n2",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nwhat",
        b"220 smtp ready\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        log = BrokerLog(f"127.0.0.1:{listener.getsockname()[1]}", "t", patience_s=0)
        with pytest.raises(BrokerUnreachable):
            log.bounds()
        with pytest.raises(BrokerUnreachable):
            list(log.read(Span(0, 5)))
        server.join()


def test_tasks_can_be_sent_to_others(qcli: Cli, topic: str, tmp_path: Path) -> None:
    fill(qcli, topic, numbers(5))
    task = ExportTask(str(tmp_path), topic, qcli.http_address, "b", Span(0, 5), Layout(), FileOptions())
    done = pickle.loads(pickle.dumps(task)).run()
    assert pickle.loads(pickle.dumps(done)) == done
    assert (done.messages, json.loads(done.to_bytes())["broker"]) == (5, "b")
