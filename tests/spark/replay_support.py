"""What the tests of replays share."""

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from cli.support import Cli, Result
from qcli.app import run
from trio_nsq.client.errors import RequestRefused
from trio_nsq.log import RecordBatch
from trio_nsq.spark.broker_log import BrokerLog
from trio_nsq.spark.ranges import Span
from trio_nsq.spark.replay.job import ReplayJob, open_job
from trio_nsq.spark.replay.request import ReplayRequest


def stored(qcli: Cli, topic: str) -> list[bytes]:
    """All that was ever published to a topic, in order: a ledger that no replay has kept."""
    log = BrokerLog(qcli.http_address, topic)
    try:
        end = log.bounds().end
    except RequestRefused:
        return []  # there is no such topic yet
    found: list[bytes] = []
    for each in log.read(Span(0, end)) if end else ():
        assert isinstance(each, RecordBatch)
        found += each.messages.bodies()
    return found


def count_stored(qcli: Cli, topic: str) -> int:
    """How many these are."""
    try:
        return BrokerLog(qcli.http_address, topic).bounds().end
    except RequestRefused:
        return 0


def jobs_of(folder: Path) -> dict[str, str]:
    """The environment of commands whose jobs are there."""
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
    """The same, as it should go; returns what it says."""
    result = replay(qcli, folder, *args, "--format", "json")
    assert result.code == 0, result.err
    (record,) = result.records
    return record


def write_parquet(path: Path, columns: dict[str, Any], row_group_size: int | None = None) -> Path:
    """Others' file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def as_export(bodies: Sequence[bytes], times_ns: Sequence[int], broker: str = "b") -> dict[str, Any]:
    """The columns by which our own exports are known."""
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
    """A job, planned without Spark; nobody else is to open it."""
    with open_job(jobs, name, request) as job:
        job.plan(None)
        return job
