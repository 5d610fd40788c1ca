"""Helpers for the tests of Spark and Parquet.

- brokers and messages: `cli_of`, `numbers`, `write_log`, `bodies_in`, `count_in`, `discard`, `until`
- exports: `export`, `run_in_process`, and their results: `parquet_files`, `rows`, `column`, `leftovers`
- replays: `replay`, `replayed`, `planned`, `jobs_of`, and input files: `write_parquet`, `as_export`
- processes of Spark to kill: `command_of`, `jvm_of`, `workers_of`

The fixtures are in `conftest.py`: one broker, one Spark, and a topic for each test.
"""

import io
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from cli.support import Cli, Result
from interop.peers import Broker
from qcli.app import run
from trio_nsq.client.errors import RequestRefused
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.record_metadata import metadata_for_channel
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.replay.job import ReplayJob, open_job
from trio_nsq.spark.replay.request import ReplayRequest

ToParquet = Callable[..., Result]
"""Runs `to-parquet` with these arguments; the type of the fixture `to_parquet`."""
HOUR_NS = 3600 * 10**9
NOON_NS = 1_795_262_400 * 10**9
"""2026-11-21T12:00:00Z"""
PLAIN_PLANS = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
}
"""Settings of Spark for `--where`: query plans are not optimized, because the tests have few rows."""
FIRST_ID = 7 << 54 | 1000

_DEADLINE_S = 60.0


def until(condition: Callable[[], bool], timeout_s: float = _DEADLINE_S) -> None:
    """Wait until a condition on another process holds. The longer it takes to ask, the less often this asks."""
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if condition():
            return
        assert time.monotonic() < deadline
        time.sleep(max(0.02, 2 * (time.monotonic() - asked)))


def cli_of(broker: Broker) -> Cli:
    """Return a `Cli` for this broker."""
    return Cli(broker.tcp_address, broker.http_address)


def bodies_in(address: str, topic: str) -> list[bytes]:
    """Return all retained bodies of a topic, in order; empty if there is no topic."""
    return Cli("", address).retained(topic)


def count_in(address: str, topic: str) -> int:
    """Return how many messages were published to a topic in total."""
    try:
        return BrokerLog(address, topic).bounds().end
    except RequestRefused:
        return 0


def numbers(count: int, start: int = 0) -> list[bytes]:
    """Return bodies that are all different."""
    return [b"%d" % number for number in range(start, start + count)]


def write_log(
    data_path: Path,
    topic: str,
    records: Sequence[tuple[int, Sequence[bytes]]],
    for_channel: Container[int] = (),
) -> None:
    """Write a topic into the data folder of a stopped broker.

    Args:
        data_path: The data folder.
        topic: The topic's name, which must be new.
        records: Publish times in Unix nanoseconds, each with its bodies.
        for_channel: Indexes of the records that are copies for one channel.
    """
    folder = data_path / "topics" / f"{topic}.topic"
    folder.mkdir(parents=True)
    log = DiskLog(folder, segment_bytes=64 * 1024 * 1024, now_ns=lambda: NOON_NS)
    sequence = 0
    for index, (timestamp_ns, bodies) in enumerate(records):
        due_ns, metadata = (timestamp_ns, metadata_for_channel("c")) if index in for_channel else (0, b"")
        messages = pack_messages(bodies)
        batch = RecordBatch(sequence, FIRST_ID + sequence, timestamp_ns, due_ns, messages, metadata)
        log.append([batch], sync=False)
        sequence += len(bodies)
    log.close()


def discard(broker: Broker, topic: str, start: int) -> tuple[int, int]:
    """Publish 300 messages or more, and let retention delete the first. Returns the new bounds of the log."""
    broker.create(topic, "c")
    for first in range(start, start + 300, 100):
        cli_of(broker).publish(topic, [b"%d" % n + b"x" * 1000 for n in range(first, first + 100)])
    broker.http("POST", "/channel/empty", topic=topic, channel="c")
    log = BrokerLog(broker.http_address, topic)
    until(lambda: log.bounds().first > start)
    return log.bounds().first, log.bounds().end


# ---------------------------------------------------------------------- exports


def export(qcli: Cli, topic: str, folder: Path, *args: str) -> dict[str, Any]:
    """Run `to-parquet`, check that it succeeds, and return its JSON report."""
    result = run_in_process(qcli, "to-parquet", topic, str(folder), "--format", "json", *args)
    assert result.code == 0, result.err
    (record,) = result.records
    return record


def run_in_process(qcli: Cli, *args: str) -> Result:
    """Run a command in this process, in a tenth of the time of a new process."""
    has_source = args[0] == "log" or {"--nsqd-http-address", "--from-segments"} & set(args)
    address = [] if has_source else ["--nsqd-http-address", qcli.http_address]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run([*args, *address])
    return Result(code, out.getvalue().encode(), err.getvalue())


def parquet_files(folder: Path) -> list[str]:
    """Return the paths of all Parquet files below the folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet"))


def leftovers(folder: Path) -> list[Path]:
    """Return the unfinished files."""
    return [path for path in folder.rglob("*") if ".tmp-" in path.name]


def rows(folder: Path, *columns: str) -> pa.Table:
    """Read the folder as any Parquet reader does; rows are sorted by broker and sequence."""
    table = ds.dataset(folder, format="parquet", partitioning="hive").to_table()
    found = table.sort_by([("broker", "ascending"), ("seq", "ascending")])
    return found.select(list(columns)) if columns else found


def column(folder: Path, name: str) -> list[Any]:
    """Return one column of `rows`."""
    found: list[Any] = rows(folder, name)[name].to_pylist()
    return found


# ---------------------------------------------------------------------- replays


def jobs_of(folder: Path) -> dict[str, str]:
    """Return the environment that sets the folder of jobs."""
    return {"QCLI_JOBS_FOLDER": str(folder / "jobs")}


def replay(qcli: Cli, folder: Path, *args: str) -> Result:
    """Run `replay` in this process."""
    addresses = {
        "QCLI_NSQD_HTTP_ADDRESS": qcli.http_address,
        "QCLI_NSQD_TCP_ADDRESS": qcli.tcp_address,
        "COLUMNS": "200",
    }
    environment = patch.dict(os.environ, addresses | jobs_of(folder))
    with environment, redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(["replay", *args])
    return Result(code, out.getvalue().encode(), err.getvalue())


def replayed(qcli: Cli, folder: Path, *args: str) -> dict[str, Any]:
    """Run `replay`, check that it succeeds, and return its JSON report."""
    result = replay(qcli, folder, *args, "--format", "json")
    assert result.code == 0, result.err
    (record,) = result.records
    return record


def write_parquet(path: Path, columns: dict[str, Any], row_group_size: int | None = None) -> Path:
    """Write a Parquet file that is not an export of qcli."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def as_export(bodies: Sequence[bytes], times_ns: Sequence[int], broker: str = "b") -> dict[str, Any]:
    """Add the columns that identify an export of qcli."""
    count = len(bodies)
    return {
        "topic": ["t"] * count,
        "broker": [broker] * count,
        "seq": list(range(count)),
        "id": ["0" * 16] * count,
        "ts_ns": list(times_ns),
        "ts": pa.array([time_ns // 1000 for time_ns in times_ns], pa.timestamp("us", "UTC")),
        "body": pa.array(bodies, pa.binary()),
    }


def planned(request: ReplayRequest, jobs: Path, name: str = "j") -> ReplayJob:
    """Plan a job without Spark. Only one process may open it."""
    with open_job(jobs, name, request) as job:
        job.plan(None)
        return job


# ---------------------------------------------------------------------- processes


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def below(pid: int) -> Iterator[int]:
    """Return all running descendants of a process."""
    for child in children(pid):
        yield child
        yield from below(child)


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def jvm_of(pid: int) -> int:
    """Return the JVM below a process."""
    return next(child for child in children(pid) if "SparkSubmit" in command_of(child))


def workers_of(pid: int) -> list[int]:
    """Return the Python workers of Spark, without their daemon."""
    daemons = [each for each in below(jvm_of(pid)) if "pyspark.daemon" in command_of(each)]
    return [each for daemon in daemons for each in children(daemon)]
