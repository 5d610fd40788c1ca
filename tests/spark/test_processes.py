"""Tests for work in other processes: exports and replays with `--jobs`, and conditions of replays."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.support import Cli, Running
from interop.peers import Broker, qcli_serve
from spark.support import (
    bodies_in,
    cli_of,
    column,
    export,
    leftovers,
    numbers,
    parquet_files,
    replayed,
    run_in_process,
    until,
    write_parquet,
)
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.log.gaps import Span
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.export.task import ExportTask
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.replay.files import open_files
from trio_nsq.spark.replay.filter import FilterTask
from trio_nsq.spark.runtime.processes import ProcessDied, ProcessEngine
from trio_nsq.spark.sql_conditions import FilterError

SMALL_RANGES = ("--target-file-size", "64KiB", "--jobs", "2")


def children(pid: int) -> list[int]:
    """Return the processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if parent == str(pid) and state != "Z":
            found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def waiting_export(tmp_path: Path) -> Iterator[tuple[Broker, Running]]:
    """An export with two processes, after its first files; the broker has been stopped, so that they wait for it."""
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        for _ in range(40):
            cli_of(broker).publish("t", [b"x" * 1000] * 1000)
        arguments = ("to-parquet", "t", str(tmp_path / "a"), "--target-file-size", "1MiB", "--jobs", "2")
        with cli_of(broker).running(*arguments) as running:
            until(lambda: bool(parquet_files(tmp_path / "a")))
            broker.process.send_signal(signal.SIGSTOP)
            try:
                yield broker, running
            finally:
                broker.process.send_signal(signal.SIGCONT)


def finish(broker: Broker, tmp_path: Path) -> None:
    """Continue an export that was interrupted."""
    broker.process.send_signal(signal.SIGCONT)
    export(cli_of(broker), "t", tmp_path / "a")
    assert column(tmp_path / "a", "seq") == list(range(40_000))
    assert leftovers(tmp_path) == []


def test_export_in_two_processes(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [b"%06d" % n * 100 for n in range(2000)]
    qcli.publish(topic, bodies)
    said = export(qcli, topic, tmp_path / "a", *SMALL_RANGES)
    assert (said["messages"], said["engine"]) == (2000, "inline")
    assert said["ranges"] > 10
    assert column(tmp_path / "a", "body") == bodies
    assert export(qcli, topic, tmp_path / "a", *SMALL_RANGES)["skipped_messages"] == 2000


def test_replay_in_two_processes(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(2000))
    export(qcli, topic, tmp_path / "a", "--target-file-size", "64KiB", "--row-group-size", "64KiB")
    said = replayed(qcli, tmp_path, str(tmp_path / "a"), f"{topic}.copy", "--jobs", "2")
    assert said["published"] == 2000
    assert sorted(bodies_in(qcli.http_address, f"{topic}.copy")) == sorted(numbers(2000))


def test_processes_end_with_a_killed_command(tmp_path: Path) -> None:
    with waiting_export(tmp_path) as (broker, running):
        started = children(running.process.pid)
        assert len(started) == 2
        running.process.kill()
        running.process.wait()
        until(lambda: not any(map(is_running, started)))
        finish(broker, tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with waiting_export(tmp_path) as (broker, running):
        started = children(running.process.pid)
        begun_s = time.monotonic()
        running.process.send_signal(number)
        result = running.end()
        assert time.monotonic() - begun_s < 20  # the patience for the broker is longer
        assert (result.code, "Traceback" in result.err) == (code, False)
        assert not any(map(is_running, started))
        assert leftovers(tmp_path) == []
        finish(broker, tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_condition_that_never_ends_is_interrupted(
    qcli: Cli, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """DuckDB does not look at signals while it evaluates this one."""
    write_parquet(tmp_path / "a.parquet", {"body": ["a"]})
    where = (
        "len(list_filter(range(3000), lambda x: len(list_filter(range(3000000), lambda y: x = -y)) > x)) = 5"
    )
    with qcli.running("replay", str(tmp_path), "t", "--dry-run", "--where", where) as running:
        until(lambda: bool(children(running.process.pid)))
        started = children(running.process.pid)
        until(lambda: Path(f"/proc/{started[0]}/maps").read_text().count("_duckdb") > 0)
        begun_s = time.monotonic()
        running.process.send_signal(number)
        result = running.end()
        assert time.monotonic() - begun_s < 20
        assert (result.code, "Traceback" in result.err) == (code, False)
        assert not any(map(is_running, started))


def test_a_condition_cannot_take_all_memory(tmp_path: Path) -> None:
    """The values of a list, here a gigabyte, are memory that DuckDB does not count.

    DuckDB raises an error, or crashes where it does not check an allocation.
    """
    write_parquet(tmp_path / "a.parquet", {"body": ["a"]})
    condition = "len(list_transform(range(1000000), lambda x: repeat('a', 1000))) = 5"
    task = FilterTask(open_files(str(tmp_path)), condition, memory_bytes=768 * 1024 * 1024)
    refused, crashed = "--where cannot be used: ", "ended with signal 1?[16], perhaps because memory is short"
    with (
        ProcessEngine(1) as engine,
        pytest.raises((FilterError, ProcessDied), match=f"{refused}|{crashed}"),
    ):
        engine([task], lambda _: None, lambda *_: None)


def test_killed_process_is_reported(tmp_path: Path) -> None:
    with waiting_export(tmp_path) as (broker, running):
        started = children(running.process.pid)
        os.kill(started[0], signal.SIGKILL)
        result = running.end()
        assert result.code == 4
        assert "A process of this command ended with signal 9" in result.err
        assert not any(map(is_running, started))
        finish(broker, tmp_path)


def test_killed_process_may_have_written_a_file(tmp_path: Path) -> None:
    """Also if it was killed before it told of one, the command does not say that nothing was written."""
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        cli_of(broker).publish("t", [b"x" * 1000] * 1000)
        arguments = ("to-parquet", "t", str(tmp_path / "a"), *SMALL_RANGES)
        with cli_of(broker).running(*arguments) as running:
            until(lambda: bool(children(running.process.pid)))
            os.kill(children(running.process.pid)[0], signal.SIGKILL)
            result = running.end()
        assert result.code == 4
        assert "ended with signal 9" in result.err
        assert "same command again" in result.err


def test_errors_keep_their_type(topic: str, tmp_path: Path) -> None:
    place = BrokerPlace("127.0.0.1:1", topic, patience_s=0)
    task = ExportTask(ExportRequest(topic, str(tmp_path)), Layout(), place, Span(0, 5))
    with ProcessEngine(2) as engine, pytest.raises(BrokerUnreachable) as raised:
        engine([task], lambda _: None, lambda *_: None)
    assert raised.value.address == "127.0.0.1:1"


@pytest.mark.parametrize("more", [("--engine", "spark"), ("--master", "local[2]")])
def test_jobs_are_not_for_spark(qcli: Cli, tmp_path: Path, more: tuple[str, str]) -> None:
    result = run_in_process(qcli, "to-parquet", "t", str(tmp_path), "--jobs", "2", *more)
    assert (result.code, "--jobs is for work without Spark" in result.err) == (2, True)
