"""Tests for replays with Spark: the condition of --where is saved, and pieces are tasks."""

from collections import Counter
from pathlib import Path

import pytest

from cli.support import Cli
from spark.support import HOUR_NS, NOON_NS, PLAIN_PLANS, as_export, bodies_in, write_parquet
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.spark.replay.job import open_job
from trio_nsq.spark.replay.request import ReplayRequest
from trio_nsq.spark.replay.spark_filter import select_rows_with_spark
from trio_nsq.spark.runtime.spark_engine import SparkEngine


@pytest.mark.slow
def test_selection_is_saved(engine: SparkEngine, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A resumed job publishes the same rows, even if the condition is random. The pieces are tasks of Spark."""
    for hour in range(4):
        times = [NOON_NS + hour * HOUR_NS + n * HOUR_NS // 2000 for n in range(2000)]
        columns = as_export([b"%d-%d" % (hour, n) for n in range(2000)], times)
        write_parquet(tmp_path / "a" / "date=2026-11-21" / f"hour={12 + hour}" / "a.parquet", columns, 700)
    where = "rand() < 0.5 AND ts < '2026-11-21 15:00:00' AND hour >= 13"
    request = ReplayRequest(str(tmp_path / "a"), topic, qcli.http_address, where=where)
    gone = ReplayRequest(request.source, topic, "127.0.0.1:1", where=where)
    with open_job(tmp_path / "jobs", "j", request) as job:
        job.plan(lambda source, condition: select_rows_with_spark(engine, source, condition, PLAIN_PLANS))
        first = job.tasks(dry_run=True)
    rows = sum(task.messages for task in first)
    assert 1500 < rows < 2500
    with open_job(tmp_path / "jobs", "j", None) as job:
        job.plan(None)
        assert [task.row_groups for task in job.tasks(dry_run=True)] == [task.row_groups for task in first]
        job.run(engine, job.tasks(engine.slots), lambda *_: None)
        assert (job.result.published, job.result.before) == (rows, 0)
        assert job.result.left_out == 8000 - rows
    found = bodies_in(qcli.http_address, topic)
    assert len(set(found)) == len(found) == rows
    assert {body[:2] for body in found} == {b"1-", b"2-"}
    with open_job(tmp_path / "jobs", "gone", gone) as job:
        job.plan(lambda source, condition: select_rows_with_spark(engine, source, condition, PLAIN_PLANS))
        with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1"):
            job.run(engine, job.tasks(engine.slots, patience_s=0), lambda *_: None)


@pytest.mark.slow
def test_many_pieces(engine: SparkEngine, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Several files in one piece, and several pieces of one file."""
    sizes = [1, 3_000_000, 5, 9_000_000, 100]
    for index, size in enumerate(sizes):
        bodies = [b"%d-%d-" % (index, n) + b"x" * (size // 10) for n in range(10)]
        write_parquet(tmp_path / "events" / f"{index}.parquet", {"body": bodies}, row_group_size=3)
    request = ReplayRequest(str(tmp_path / "events"), topic, qcli.http_address)
    with open_job(tmp_path / "jobs", None, request) as job:
        job.plan(None)
        tasks = job.tasks(engine.slots)
        assert len(tasks) > 1
        told: list[int] = []
        job.run(engine, tasks, lambda messages, _: told.append(messages))
        assert (job.result.published, job.result.pieces_done) == (50, len(tasks))
    found = Counter(body[:4] for body in bodies_in(qcli.http_address, topic))
    assert found == Counter(b"%d-%d-" % (index, n) for index in range(5) for n in range(10))
