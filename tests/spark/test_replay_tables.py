"""Replay of Delta and Iceberg tables: the current version, older ones, and what is refused."""

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from cli.support import Cli
from spark.support import bodies_in, replay, replayed, until
from spark.table_support import (
    COUNT,
    DELTA,
    HOURS,
    ICEBERG,
    delete_delta_rows,
    iceberg_table,
    use_catalog,
    write_range,
)
from trio_nsq.spark.tables.opening import open_table
from trio_nsq.spark.tables.target import TableTarget
from trio_nsq.storage import LocalStorage


@pytest.fixture(params=[DELTA, ICEBERG], ids=["delta", "iceberg"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableTarget:
    """A table with 8 commits of 100 messages, each with its own body; its files were merged in the end."""
    use_catalog(monkeypatch, tmp_path)
    found: TableTarget = request.param
    table = open_table(found, LocalStorage(tmp_path / "f"), "t", "e1")
    for number in range(8):
        table.commit(number + 1, [write_range(tmp_path / "f", number, body=b"%d" % number)], HOURS)
    table.compact(HOURS, ["b"], lambda: None)
    return found


def source_of(target: TableTarget, tmp_path: Path) -> tuple[str, str]:
    """Return the source and the option of a replay."""
    return (str(tmp_path / "f"), "--delta") if target == DELTA else ("local/events.clicks", "--iceberg")


def test_current_version(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    report = replayed(qcli, tmp_path, *source_of(target, tmp_path), topic)
    assert (report["published"], report["files"]) == (8 * COUNT, 1)
    assert sorted(bodies_in(qcli.http_address, topic)) == [b"%d" % n for n in range(8) for _ in range(COUNT)]


def test_files_of_other_writers(
    qcli: Cli, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes URIs of local files with one slash, and other names of folders."""
    use_catalog(monkeypatch, tmp_path)
    table = open_table(ICEBERG, LocalStorage(tmp_path / "f"), "t", "e1")
    table.commit(1, [write_range(tmp_path / "f", 0)], HOURS)
    (name,) = write_range(tmp_path / "f" / "data", 1).files
    iceberg_table().add_files([f"file:{tmp_path}/f/data/{name}"])
    report = replayed(qcli, tmp_path, "local/events.clicks", "--iceberg", topic, "--dry-run")
    assert (report["published"], report["files"]) == (2 * COUNT, 2)


def test_older_version_of_a_copy(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The times of the copied files are those of the copy."""
    folder, copy = tmp_path / "f", tmp_path / "copy"
    table = open_table(DELTA, LocalStorage(folder), "t", "e1")
    table.commit(1, [write_range(folder, 0)], HOURS)
    first_ms = deltalake.DeltaTable(folder).history()[0]["timestamp"]
    until(lambda: time.time() * 1000 > first_ms + 2)
    table.commit(2, [write_range(folder, 1)], HOURS)
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    second_ms = deltalake.DeltaTable(copy).history(1)[0]["timestamp"]
    for time_ms, messages in ((first_ms + 1, COUNT), (second_ms + 1, 2 * COUNT)):
        as_of = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
        report = replayed(qcli, tmp_path, str(copy), "--delta", topic, "--dry-run", "--as-of", as_of)
        assert report["published"] == messages


def test_older_version(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    if target == DELTA:
        history = deltalake.DeltaTable(tmp_path / "f").history()
        number, time_ms = next(
            (each["version"], each["timestamp"]) for each in history if each["version"] == 2
        )
    else:
        third = iceberg_table().history()[2]
        number, time_ms = third.snapshot_id, third.timestamp_ms
    report = replayed(qcli, tmp_path, *source_of(target, tmp_path), topic, "--table-version", str(number))
    assert (report["published"], report["files"]) == (3 * COUNT, 3)
    as_of = datetime.fromtimestamp((time_ms + 1) / 1000, UTC).isoformat()
    report = replayed(qcli, tmp_path, *source_of(target, tmp_path), topic, "--dry-run", "--as-of", as_of)
    assert 3 * COUNT <= report["published"] <= 4 * COUNT  # the next version may be of the same millisecond
    condition = ("--where", "seq >= 150 AND hour = 12")
    report = replayed(
        qcli,
        tmp_path,
        *source_of(target, tmp_path),
        topic,
        "--dry-run",
        "--table-version",
        str(number),
        *condition,
    )
    assert report["published"] == 150


def test_version_that_does_not_exist(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    result = replay(qcli, tmp_path, *source_of(target, tmp_path), topic, "--table-version", "77")
    assert result.code == 1
    assert "has no version 77: the newest one is " in result.err or "has no snapshot 77" in result.err
    assert len(result.err.splitlines()) == 1
    result = replay(qcli, tmp_path, *source_of(target, tmp_path), topic, "--as-of", "2020-01-01T00:00:00Z")
    assert result.code == 1
    assert "of 2020-01-01T00:00:00Z" in result.err
    assert len(result.err.splitlines()) == 1


def test_version_whose_files_were_removed(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    for path in (tmp_path / "f").rglob("t-b-*.parquet"):
        path.unlink()
    number = 0 if target == DELTA else iceberg_table().history()[0].snapshot_id
    result = replay(qcli, tmp_path, *source_of(target, tmp_path), topic, "--table-version", str(number))
    assert result.code == 1
    assert "does not exist any more: the table keeps old versions for a limited time" in result.err


def test_folder_of_a_table_is_refused(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Its merged files have the messages of others again."""
    result = replay(qcli, tmp_path, str(tmp_path / "f"), topic)
    assert result.code == 1
    assert f"replay the table, with {source_of(target, tmp_path)[1]}" in result.err


def test_deleted_rows_are_refused(qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    rows = pa.table({"body": [b"%d" % number for number in range(30)]})
    deltalake.write_deltalake(folder, rows, configuration={"delta.enableDeletionVectors": "true"})
    assert replayed(qcli, tmp_path, str(folder), topic, "--delta")["published"] == 30
    delete_delta_rows(folder, [3, 4, 7, 11, 18, 29])
    result = replay(qcli, tmp_path, str(folder), topic, "--delta")
    assert result.code == 1
    assert "has deleted rows (deletion vectors), which are not supported" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./f", "--delta"], "is not a Delta table"),
        (["prod/a.b", "--iceberg"], "the Iceberg catalog prod is not configured"),
        (["local/a.b", "--iceberg"], "Error: there is no Iceberg table local/a.b"),
        (["local/b", "--iceberg"], "'local/b' is not CATALOG/NAMESPACE.TABLE"),
        (["./f", "--as-of", "2h"], "--as-of is for tables"),
        (["./f", "--delta", "--as-of", "17"], "--as-of 17 is not a time"),
    ],
)
def test_refused(
    arguments: list[str], message: str, qcli: Cli, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_catalog(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").mkdir()
    result = replay(qcli, tmp_path, arguments[0], topic, *arguments[1:])
    assert result.code != 0
    assert message.lower() in result.err.lower()
