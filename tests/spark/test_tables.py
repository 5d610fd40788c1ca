"""The tables of exports: numbered commits, columns, compaction, expiry, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier

import deltalake
import pyarrow.parquet as pq
import pytest

from spark.support import NOON_NS
from spark.table_support import (
    COUNT,
    DELTA,
    HOURS,
    ICEBERG,
    duckdb_counts,
    files_of,
    iceberg_table,
    table_rows,
    use_catalog,
    write_range,
)
from trio_nsq.spark.export.layout import (
    BodyFormat,
    JsonColumn,
    JsonType,
    Layout,
    PartitionBy,
)
from trio_nsq.spark.export.manifest import RangeResult
from trio_nsq.spark.storage import LocalStorage
from trio_nsq.spark.tables.opening import open_table
from trio_nsq.spark.tables.table import Compacted, Table
from trio_nsq.spark.tables.target import TableError, TableTarget

DEADLINE_S = 60.0
BROKERS = ["b"]


@pytest.fixture(params=[DELTA, ICEBERG], ids=["delta", "iceberg"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableTarget:
    use_catalog(monkeypatch, tmp_path)
    found: TableTarget = request.param
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "f"


def opened(target: TableTarget, folder: Path, export_id: str = "e1", topic: str = "t") -> Table:
    return open_table(target, LocalStorage(folder), topic, export_id)


def nothing() -> None:
    pass


@pytest.mark.parametrize("partition", PartitionBy)
def test_commit_is_applied_once(target: TableTarget, folder: Path, partition: PartitionBy) -> None:
    layout = Layout(partition)
    results = [write_range(folder, 0, layout), write_range(folder, 1, layout)]
    table = opened(target, folder)
    table.commit(1, results, layout)
    table.commit(1, results, layout)
    opened(target, folder).commit(1, results, layout)
    assert table_rows(target, folder)["seq"].to_pylist() == list(range(2 * COUNT))
    table.commit(2, [write_range(folder, 2, layout)], layout)
    assert duckdb_counts(target, folder) == (3 * COUNT, 3 * COUNT, sum(range(3 * COUNT)))


def test_commits_of_two_processes_with_the_same_number(target: TableTarget, folder: Path) -> None:
    """Two processes believe that they export to the folder; each round is in the table once."""
    tables = [opened(target, folder), opened(target, folder)]
    begin = Barrier(2)

    def commit(table: Table, number: int, result: RangeResult) -> None:
        begin.wait(DEADLINE_S)
        table.commit(number, [result], HOURS)

    with ThreadPoolExecutor(2) as threads:
        for number in range(10):
            result = write_range(folder, number)
            for done in [threads.submit(commit, table, number + 1, result) for table in tables]:
                done.result(DEADLINE_S)
            assert duckdb_counts(target, folder)[0] == (number + 1) * COUNT


def test_two_exports_share_a_table(target: TableTarget, folder: Path) -> None:
    one, other = opened(target, folder), opened(target, folder, "e2", "u")
    for number in range(1, 5):
        one.commit(number, [write_range(folder, number)], HOURS)
        other.commit(number, [write_range(folder, number, topic="u")], HOURS)
    assert table_rows(target, folder).num_rows == 8 * COUNT


def test_number_that_does_not_follow_is_refused(target: TableTarget, folder: Path) -> None:
    table = opened(target, folder)
    with pytest.raises(TableError, match=r"commit 2 .* does not follow commit 0"):
        table.commit(2, [write_range(folder, 0)], HOURS)
    table.commit(1, [write_range(folder, 0)], HOURS)
    table.check(1, unfinished=False, layout=HOURS)
    table.check(2, unfinished=True, layout=HOURS)
    with pytest.raises(TableError, match=r"has no commit 2 .* restored to an older version"):
        table.check(2, unfinished=False, layout=HOURS)
    with pytest.raises(TableError, match=r"has commit 1 .* the manifest is an old copy"):
        table.check(0, unfinished=False, layout=HOURS)


def test_new_columns_are_added(target: TableTarget, folder: Path) -> None:
    columns = [JsonColumn("a", JsonType.LONG, "a"), JsonColumn("b", JsonType.DOUBLE, "b")]
    old = Layout(PartitionBy.HOUR, BodyFormat.JSON, tuple(columns[:1]), True)
    new = Layout(PartitionBy.HOUR, BodyFormat.JSON, tuple(columns), True)
    table = opened(target, folder)
    table.commit(1, [write_range(folder, 0, old, body=b'{"a":1}')], old)
    table.commit(
        2, [write_range(folder, 1, old, body=b'{"a":1}'), write_range(folder, 2, new, body=b'{"b":0.5}')], new
    )
    assert table_rows(target, folder)["b"].to_pylist() == [None] * 2 * COUNT + [0.5] * COUNT
    for number in range(3, 10):
        table.commit(number, [write_range(folder, number, new, body=b'{"a":1}')], new)
    assert opened(target, folder).compact(new, BROKERS, nothing) == Compacted(10, 1)
    assert table_rows(target, folder)["b"].to_pylist()[2 * COUNT : 3 * COUNT] == [0.5] * COUNT
    assert duckdb_counts(target, folder) == (10 * COUNT, 10 * COUNT, sum(range(10 * COUNT)))


def test_another_table_is_refused(target: TableTarget, folder: Path) -> None:
    table = opened(target, folder)
    table.commit(1, [write_range(folder, 0)], HOURS)
    with pytest.raises(TableError, match=r"column body .* has type binary, and that of the files string"):
        table.check(1, unfinished=False, layout=Layout(PartitionBy.HOUR, BodyFormat.TEXT))
    with pytest.raises(TableError, match=r"is partitioned by .* choose another --partition-by"):
        table.check(1, unfinished=False, layout=Layout(PartitionBy.DATE))
    assert table_rows(target, folder).num_rows == COUNT


def test_table_of_another_program_is_refused(folder: Path) -> None:
    deltalake.write_deltalake(folder, pq.ParquetFile(_foreign_file(folder.parent)).read())
    with pytest.raises(TableError, match="has no column topic: it is not a table of exports"):
        opened(DELTA, folder).check(0, unfinished=False, layout=Layout())


def _foreign_file(folder: Path) -> Path:
    import pyarrow as pa

    pq.write_table(pa.table({"n": [1]}), folder / "foreign.parquet")
    return folder / "foreign.parquet"


def test_unknown_catalog_is_refused(folder: Path) -> None:
    with pytest.raises(
        TableError, match=r"the Iceberg catalog prod is not configured: .*PYICEBERG_CATALOG__PROD__URI"
    ):
        opened(TableTarget.iceberg("prod/a.b"), folder)


# ---------------------------------------------------------------------- compaction


def test_small_files_are_merged(target: TableTarget, folder: Path) -> None:
    table = opened(target, folder)
    for number in range(1, 8):
        table.commit(number, [write_range(folder, number)], HOURS)
    assert opened(target, folder).compact(HOURS, BROKERS, nothing) == Compacted()
    table.commit(8, [write_range(folder, 0)], HOURS)
    before = table_rows(target, folder)
    assert opened(target, folder).compact(HOURS, BROKERS, nothing) == Compacted(8, 1)
    assert len(files_of(target, folder)) == 1
    assert table_rows(target, folder).equals(before)
    # The numbers still count: a repeated commit adds nothing, also to another process.
    opened(target, folder).commit(8, [write_range(folder, 0)], HOURS)
    assert duckdb_counts(target, folder)[:2] == (8 * COUNT, 8 * COUNT)
    table.commit(9, [write_range(folder, 9)], HOURS)
    assert duckdb_counts(target, folder)[:2] == (9 * COUNT, 9 * COUNT)


def test_merged_file_of_a_killed_run_is_used(target: TableTarget, folder: Path) -> None:
    table = opened(target, folder)
    table.commit(1, [write_range(folder, number) for number in range(8)], HOURS)

    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed):
        table.compact(HOURS, BROKERS, kill)
    assert duckdb_counts(target, folder)[:2] == (8 * COUNT, 8 * COUNT)
    (merged,) = folder.rglob("*merged*.parquet")
    inode = merged.stat().st_ino
    assert opened(target, folder).compact(HOURS, BROKERS, nothing) == Compacted(8, 1)
    assert files_of(target, folder) == [str(merged)]
    assert merged.stat().st_ino == inode


def test_files_of_others_are_not_merged(target: TableTarget, folder: Path) -> None:
    opened(target, folder, "e2", "u").commit(1, [write_range(folder, n, topic="u") for n in range(8)], HOURS)
    assert opened(target, folder).compact(HOURS, BROKERS, nothing) == Compacted()
    assert len(files_of(target, folder)) == 8


def test_files_of_a_topic_with_a_similar_name_are_not_merged(target: TableTarget, folder: Path) -> None:
    for topic in ("t", "t-u"):
        results = [write_range(folder, number, topic=topic) for number in range(8)]
        opened(target, folder, f"e-{topic}", topic).commit(1, results, HOURS)
    assert opened(target, folder).compact(HOURS, BROKERS, nothing) == Compacted(8, 1)
    assert len(files_of(target, folder)) == 9
    assert opened(target, folder, "e-t-u", "t-u").compact(HOURS, BROKERS, nothing) == Compacted(8, 1)
    for name in files_of(target, folder):
        assert len(pq.read_table(name).column("topic").unique()) == 1


def test_replaced_files_are_removed_after_the_retention_time(target: TableTarget, folder: Path) -> None:
    table = opened(target, folder)
    table.commit(1, [write_range(folder, number) for number in range(8)], HOURS)
    opened(target, folder).compact(HOURS, BROKERS, nothing)
    opened(target, folder).compact(HOURS, BROKERS, nothing)
    assert len(list(folder.rglob("*.parquet"))) == 9  # readers of the older version still need them
    if target is DELTA:
        properties = {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
        deltalake.DeltaTable(folder).alter.set_table_properties(properties)
    else:
        with iceberg_table().transaction() as change:
            change.set_properties({"history.expire.max-snapshot-age-ms": "0"})
    opened(target, folder).compact(HOURS, BROKERS, nothing)
    assert [str(path) for path in folder.rglob("*.parquet")] == files_of(target, folder)
    assert duckdb_counts(target, folder)[:2] == (8 * COUNT, 8 * COUNT)
    table.commit(2, [write_range(folder, 8)], HOURS)
    opened(target, folder).check(2, unfinished=False, layout=HOURS)
    assert table_rows(target, folder).num_rows == 9 * COUNT


# ---------------------------------------------------------------------- what readers use


def test_readers_skip_files_by_the_statistics(target: TableTarget, folder: Path) -> None:
    opened(target, folder).commit(1, [write_range(folder, number) for number in range(5)], HOURS)
    if target is DELTA:
        log = (folder / "_delta_log" / f"{0:020d}.json").read_text().splitlines()
        adds = [json.loads(line)["add"] for line in log if '"add"' in line]
        stats = [json.loads(add["stats"]) for add in adds]
        assert sorted(each["minValues"]["seq"] for each in stats) == [0, 100, 200, 300, 400]
        assert {each["numRecords"] for each in stats} == {COUNT}
        assert {each["maxValues"]["ts"] for each in stats} == {"2026-11-21T12:00:00.000000Z"}
        assert {each["nullCount"]["attempts"] for each in stats} == {COUNT}
        assert {tuple(sorted(add["partitionValues"].items())) for add in adds} == {
            (("date", "2026-11-21"), ("hour", "12"))
        }
    else:
        found = list(iceberg_table().scan(row_filter="seq >= 150 AND seq < 250").plan_files())
        assert len(found) == 2
        hour = NOON_NS // timedelta(hours=1).total_seconds() // 10**9
        assert {each.file.partition[0] for each in found} == {hour}
