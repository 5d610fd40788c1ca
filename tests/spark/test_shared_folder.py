"""Tests for exports whose workers have another working directory, or another folder under the same path."""

import pickle
import shutil
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli
from spark.support import column, numbers, parquet_files
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Advance, Done, Task, run_inline
from trio_nsq.storage import StorageError


class OtherMachine:
    """An engine whose workers have another working directory.

    Args:
        begin, end: Called before and after the workers run, to change what they see of the file system.
    """

    def __init__(
        self, cwd: Path, begin: Callable[[], Any] = lambda: None, end: Callable[[], Any] = lambda: None
    ) -> None:
        self._cwd, self._begin, self._end = cwd, begin, end

    def __call__(
        self, tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance, /
    ) -> None:
        self._begin()
        try:
            with chdir(self._cwd):
                done = [pickle.loads(pickle.dumps(task)).run(advance) for task in tasks]
        finally:
            self._end()
        for each in done:
            finish(each)


def exported(job: ExportJob, engine: OtherMachine, place: BrokerPlace) -> None:
    job.run(engine, job.plan([place]), lambda *_: None)


def test_relative_folder_is_that_of_the_driver(
    qcli: Cli, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    qcli.publish(topic, numbers(100))
    place = BrokerPlace(qcli.http_address, topic)
    for folder in ("out/x", "./out/y"):
        request = ExportRequest(topic, folder, min_ranges=2)
        with open_export(request, [place]) as job:
            exported(job, OtherMachine(there), place)
            assert (job.result.messages, job.request) == (100, request)
        assert column(here / folder, "seq") == list(range(100))
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("copied", [False, True], ids=["missing", "another copy"])
def test_folder_that_is_not_shared(qcli: Cli, topic: str, tmp_path: Path, *, copied: bool) -> None:
    """The workers write to another disk. Nothing counts as exported, and the channel stays."""
    folder, ours, theirs = tmp_path / "archive", tmp_path / "ours", tmp_path / "theirs"
    qcli.publish(topic, numbers(100))
    log = BrokerLog(qcli.http_address, topic)
    log.open_channel("c")
    log.move_channel("c", 0)

    def unmount() -> None:
        if copied:
            shutil.copytree(folder, theirs)
        folder.rename(ours)
        if copied:
            theirs.rename(folder)

    def mount() -> None:
        if folder.exists():
            folder.rename(theirs)
        ours.rename(folder)

    place = BrokerPlace(qcli.http_address, topic)
    request = ExportRequest(topic, str(folder), channel="c", min_ranges=2)
    with open_export(request, [place]) as job:
        with pytest.raises(StorageError, match=f"^the folder {folder} is not the same one on this machine"):
            exported(job, OtherMachine(tmp_path, unmount, mount), place)
        assert (job.result.messages, job.exported[place.label].done) == (0, {})
        assert len(job.exported[place.label].pending) == 2
        assert log.open_channel("c") == 0
        assert parquet_files(folder) == []
        job.run(run_inline, job.plan([place]), lambda *_: None)
    assert column(folder, "seq") == list(range(100))
    assert log.open_channel("c") == 100
