"""The tables of exports: numbered commits, columns, compaction, expiry, and what is refused."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import DateType

from spark.support import NOON_NS
from spark.table_support import (
    COUNT,
    DELTA,
    HOURS,
    ICEBERG,
    delete_delta_rows,
    duckdb_counts,
    files_of,
    iceberg_table,
    table_rows,
    use_catalog,
    write_range,
)
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout, PartitionBy
from trio_nsq.spark.export.manifest import RangeResult
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.spark.tables.iceberg_expiry import history
from trio_nsq.spark.tables.opening import open_table
from trio_nsq.spark.tables.table import Compacted, Table
from trio_nsq.spark.tables.target import TableError, TableTarget
from trio_nsq.storage import LocalStorage

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


@pytest.mark.parametrize("version", [0, 1, 2], ids=["before the first", "the first", "the last"])
def test_table_that_was_restored_is_refused(target: TableTarget, folder: Path, version: int) -> None:
    """Its properties and transactions still have the number of the last commit."""
    opened(target, folder, "e2", "u").commit(1, [write_range(folder, 0, topic="u")], HOURS)
    following = opened(target, folder)
    for number in (1, 2):
        following.commit(number, [write_range(folder, number)], HOURS)
    opened(target, folder, "e3", "v").commit(1, [write_range(folder, 0, topic="v")], HOURS)
    restore(target, folder, version)
    opened(target, folder, "e2", "u").commit(2, [write_range(folder, 3, topic="u")], HOURS)
    third = [write_range(folder, 3)]
    if version == 2:
        opened(target, folder).check(2, unfinished=False, layout=HOURS)
        following.commit(3, third, HOURS)
        return
    with pytest.raises(TableError, match="restored to an older version"):
        following.commit(3, third, HOURS)
    with pytest.raises(TableError, match="restored to an older version"):
        opened(target, folder).check(2, unfinished=False, layout=HOURS)
    if target is ICEBERG:
        # A nightly job removes what was undone.
        table = iceberg_table()
        kept = {each.snapshot_id for each in history(table)}
        undone = [each.snapshot_id for each in table.metadata.snapshots if each.snapshot_id not in kept]
        table.maintenance.expire_snapshots().by_ids(undone).commit()
        with pytest.raises(TableError, match="restored to an older version"):
            opened(target, folder).check(2, unfinished=False, layout=HOURS)
    if target is DELTA:
        restore(target, folder, 2)  # as the error says
        opened(target, folder).check(2, unfinished=False, layout=HOURS)


def restore(target: TableTarget, folder: Path, version: int) -> None:
    """Restore a version, as other programs do: 0 is the first one."""
    if target is DELTA:
        deltalake.DeltaTable(folder).restore(version)
        return
    table = iceberg_table()
    snapshots = sorted(table.metadata.snapshots, key=lambda each: each.sequence_number)
    with table.manage_snapshots() as change:
        change.set_current_snapshot(snapshots[version].snapshot_id)


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


def layout_of(*columns: tuple[str, JsonType]) -> Layout:
    found = tuple(JsonColumn(name, kind, name) for name, kind in columns)
    return Layout(PartitionBy.NONE, BodyFormat.JSON, found, True)


A = layout_of(("a", JsonType.LONG))
AB = layout_of(("a", JsonType.LONG), ("b", JsonType.LONG))


@pytest.mark.parametrize("name", ["b", "B"], ids=["other type", "other case"])
def test_new_field_whose_column_another_program_has_added(
    target: TableTarget, folder: Path, name: str
) -> None:
    """Also if the same commit is repeated: the next files have the column that the table has."""
    table = opened(target, folder)
    table.commit(1, [write_range(folder, 0, A, body=b'{"a":1}')], A)
    add_date(target, folder, name)
    found = replace(write_range(folder, 1, A, body=b'{"a":1,"b":2}'), new_fields={"b": "long"})
    after = table.commit(2, [found], A)
    assert [column.name for column in after.json_columns] == ["a", "b_2"]
    assert opened(target, folder).commit(2, [found], A) == after
    table.commit(3, [write_range(folder, 2, after, body=b'{"a":1,"b":2}')], after)
    rows = table_rows(target, folder)
    assert rows["b_2"].to_pylist() == [None] * 2 * COUNT + [2] * COUNT
    assert rows[name].null_count == 3 * COUNT
    with pytest.raises(TableError, match=r"column b |has the column B, and the files b"):
        opened(target, folder).check(3, unfinished=False, layout=AB)


def test_new_export_to_a_table_with_other_columns(target: TableTarget, folder: Path) -> None:
    """Inferred columns get other names, and are in the table before files have them; given ones are refused."""
    opened(target, folder).commit(1, [write_range(folder, 0, A, body=b'{"a":1}')], A)
    texts = layout_of(("a", JsonType.STRING))
    other = opened(target, folder, "e2", "u")
    fitting = other.check(0, unfinished=False, layout=texts, is_new=True)
    assert [column.name for column in fitting.json_columns] == ["a_2"]
    assert other.reserve(fitting) == fitting
    assert table_rows(target, folder)["a_2"].null_count == COUNT
    with pytest.raises(TableError, match=r"column a .* has type long, and that of the files string"):
        other.check(0, unfinished=False, layout=replace(texts, keep_rest=False), is_new=True)


def test_column_that_another_program_removed(target: TableTarget, folder: Path) -> None:
    """It is added again. Without a column that every export has, the error says what to do."""
    table = opened(target, folder)
    table.commit(1, [write_range(folder, 0, AB, body=b'{"a":1,"b":2}')], AB)
    remove_column(target, folder, "b")
    table.commit(2, [write_range(folder, 1, AB, body=b'{"a":3,"b":4}')], AB)
    rows = table_rows(target, folder)
    assert (rows["a"].to_pylist(), rows["b"].to_pylist()[COUNT:]) == ([1] * COUNT + [3] * COUNT, [4] * COUNT)
    remove_column(target, folder, "attempts")
    with pytest.raises(TableError, match=r"no column attempts: .* has removed the column. Choose another"):
        table.commit(3, [write_range(folder, 2, AB, body=b"{}")], AB)


def test_column_that_another_program_renamed(target: TableTarget, folder: Path) -> None:
    """Its old name would take the values of earlier files. The export ends until it has its name again."""
    table = opened(target, folder)
    table.commit(1, [write_range(folder, 0, AB, body=b'{"a":1,"b":2}')], AB)
    result = replace(write_range(folder, 1, AB, body=b'{"a":3,"b":4,"c":5}'), new_fields={"c": "long"})
    rename_columns(target, folder, {"a": "z"})
    for _ in range(2):
        with pytest.raises(
            TableError, match=r"column a .* was renamed to z by another program.*: rename it back"
        ):
            table.commit(2, [result], AB)
    rename_columns(target, folder, {"z": "a"})
    after = table.commit(2, [result], AB)
    # deltalake adds no column to a table whose columns can be renamed: the field stays in `rest`.
    assert [column.name for column in after.json_columns] == ["a", "b", *(["c"] if target is ICEBERG else [])]
    if target is ICEBERG:
        assert table_rows(target, folder)["a"].to_pylist() == [1] * COUNT + [3] * COUNT
        return
    assert len(files_of(target, folder)) == 2
    remove_column(target, folder, "b")
    with pytest.raises(TableError, match=r"has no column b, and none can be added .* choose another folder"):
        table.commit(3, [write_range(folder, 2, AB, body=b"{}")], AB)


def test_delta_table_with_a_constraint_is_refused(folder: Path) -> None:
    table = opened(DELTA, folder)
    table.commit(1, [write_range(folder, 0)], HOURS)
    version = deltalake.DeltaTable(folder)
    version.alter.add_constraint({"few": f"seq < {COUNT}"})
    result = write_range(folder, 1)
    refused = rf"has the CHECK constraint few \(seq < {COUNT}\), .* remove it, or choose another folder"
    with pytest.raises(TableError, match=refused):
        table.commit(2, [result], HOURS)
    with pytest.raises(TableError, match=refused):
        opened(DELTA, folder).check(1, unfinished=False, layout=HOURS)
    assert table_rows(DELTA, folder).num_rows == COUNT
    version.alter.drop_constraint("few")
    table.commit(2, [result], HOURS)
    assert table_rows(DELTA, folder).num_rows == 2 * COUNT


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"delta.generationExpression": "seq + 1"}, "is generated"),
        ({"delta.identity.start": 1, "delta.identity.step": 1}, "is an identity column"),
        ({"delta.invariants": '{"expression": {"expression": "x > 3"}}'}, "has an invariant"),
    ],
)
def test_delta_table_whose_writers_have_to_compute_is_refused(
    folder: Path, metadata: dict[str, Any], what: str
) -> None:
    table = opened(DELTA, folder)
    table.commit(1, [write_range(folder, 0)], HOURS)
    field = {"name": "x", "type": "long", "nullable": True, "metadata": metadata}
    change_fields(folder, lambda fields: [*fields, field])
    with pytest.raises(TableError, match=f"the column x of .* {what}, .* choose another folder"):
        table.commit(2, [write_range(folder, 1)], HOURS)


def add_date(target: TableTarget, folder: Path, name: str) -> None:
    if target is DELTA:
        field = deltalake.Field(name, deltalake.schema.PrimitiveType("date"))
        deltalake.DeltaTable(folder).alter.add_columns([field])
        return
    with iceberg_table().update_schema() as update:
        update.add_column((name,), DateType())


def remove_column(target: TableTarget, folder: Path, name: str) -> None:
    if target is DELTA:
        change_fields(folder, lambda fields: [each for each in fields if each["name"] != name])
        return
    with iceberg_table().update_schema() as update:
        update.delete_column(name)


def rename_columns(target: TableTarget, folder: Path, names: dict[str, str]) -> None:
    """Rename columns; of a Delta table with column mapping, as Spark does."""

    def renamed(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, field in enumerate(fields, 1):
            mapping = {
                "delta.columnMapping.id": number,
                "delta.columnMapping.physicalName": field["name"],
            } | field["metadata"]
            field |= {"name": names.get(field["name"], field["name"]), "metadata": mapping}
        return fields

    if target is DELTA:
        mapped = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "99"}
        change_fields(folder, renamed, mapped)
        return
    with iceberg_table().update_schema() as update:
        for old, new in names.items():
            update.rename_column(old, new)


def change_fields(
    folder: Path,
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    configuration: dict[str, str] | None = None,
) -> None:
    """Write a version of a Delta table with other columns. deltalake itself neither removes nor renames any."""
    actions = [
        json.loads(line)
        for file in sorted((folder / "_delta_log").glob("*.json"))
        for line in file.read_text().splitlines()
    ]
    metadata = [action["metaData"] for action in actions if "metaData" in action][-1]
    schema = json.loads(metadata["schemaString"])
    schema["fields"] = change(schema["fields"])
    metadata |= {"schemaString": json.dumps(schema)}
    metadata["configuration"] |= configuration or {}
    more: list[Any] = [{"metaData": metadata}]
    if configuration:
        more.append({"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}})
    version = deltalake.DeltaTable(folder).version() + 1
    (folder / "_delta_log" / f"{version:020d}.json").write_text("\n".join(map(json.dumps, more)))


def test_times_that_older_versions_exported(target: TableTarget, folder: Path) -> None:
    """A file with the year 55840 is added to the table, and merged."""
    layout = Layout(PartitionBy.HOUR, BodyFormat.JSON, (JsonColumn("t", JsonType.LONG, "t"),), True)
    times = Layout(PartitionBy.HOUR, BodyFormat.JSON, (JsonColumn("t", JsonType.TIMESTAMP, "t"),), True)
    table = opened(target, folder)
    for number in range(8):
        result = write_range(folder, number, layout, body=b'{"t":1700000000000000000}')
        path = folder / result.files[0]
        found = pq.ParquetFile(path).read()
        pq.write_table(found.set_column(7, "t", found["t"].cast(pa.timestamp("us", tz="UTC"))), path)
        table.commit(number + 1, [result], times)
    assert opened(target, folder).compact(times, BROKERS, nothing) == Compacted(8, 1)
    found = table_rows(target, folder)
    assert (found.num_rows, found["t"].cast("int64")[0].as_py()) == (8 * COUNT, 1_700_000_000_000_000_000)


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
    pq.write_table(pa.table({"n": [1]}), folder / "foreign.parquet")
    return folder / "foreign.parquet"


def test_unknown_catalog_is_refused(folder: Path) -> None:
    with pytest.raises(
        TableError, match=r"the Iceberg catalog prod is not configured: .*PYICEBERG_CATALOG__PROD__URI"
    ):
        opened(TableTarget.iceberg("prod/a.b"), folder)


@pytest.mark.parametrize(
    "name",
    ["a#b", "b?", "a%20b", "%2F", "a%2520b", "a\\b", "a\nb", "50 %", "a[b]{c}*", "é;,:&=+@!$`'\"^|~<>()"],
)
def test_any_folder_has_its_table_or_is_refused(target: TableTarget, tmp_path: Path, name: str) -> None:
    """Nothing is written beside the folder, and readers find the table in it."""
    parent = tmp_path / "parent"
    result = write_range(parent / name, 0)
    refusal = ""
    try:
        opened(target, parent / name).commit(1, [result], HOURS)
    except TableError as error:
        refusal = str(error)
    if refusal:
        assert "would use another folder than" in refusal
        assert [each.name for each in parent.rglob("*") if each.is_file()] == [Path(result.files[0]).name]
    else:
        assert table_rows(target, parent / name).num_rows == COUNT
        assert (parent / name / ("_delta_log" if target == DELTA else "metadata")).is_dir()
    assert [each.name for each in parent.iterdir()] == [name]


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


def test_files_with_deleted_rows_are_not_merged(folder: Path) -> None:
    table = opened(DELTA, folder)
    table.commit(1, [write_range(folder, number) for number in range(9)], HOURS)
    deltalake.DeltaTable(folder).alter.add_feature(
        deltalake.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    delete_delta_rows(folder, [1, 2, 3, 5])
    before = deltalake_rows(folder)
    assert len(before) == 9 * COUNT - 4
    assert opened(DELTA, folder).compact(HOURS, BROKERS, nothing) == Compacted(8, 1)
    assert deltalake_rows(folder) == before


def deltalake_rows(folder: Path) -> list[int]:
    """Return the sequences of a Delta table, without deleted rows."""
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(folder))
    return sorted(pa.table(query.execute("SELECT seq FROM t").read_all()).column("seq").to_pylist())


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


@pytest.mark.parametrize("undone", ["rollback", "added again"])
def test_files_that_another_program_has_deleted_and_brought_back_stay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undone: str
) -> None:
    use_catalog(monkeypatch, tmp_path)
    table = opened(ICEBERG, folder)
    table.commit(1, [write_range(folder, number) for number in range(2)], HOURS)
    other = iceberg_table()
    good, files = other.current_snapshot().snapshot_id, files_of(ICEBERG, folder)
    other.delete()
    if undone == "rollback":
        other.manage_snapshots().rollback_to_snapshot(good).commit()
    else:
        other.add_files([f"file://{path}" for path in files])
    with iceberg_table().transaction() as change:
        change.set_properties({"history.expire.max-snapshot-age-ms": "0"})
    for number in (2, 3):
        opened(ICEBERG, folder).commit(number, [write_range(folder, number)], HOURS)
        opened(ICEBERG, folder).compact(HOURS, BROKERS, nothing)
    assert duckdb_counts(ICEBERG, folder)[:2] == (4 * COUNT, 4 * COUNT)


def test_snapshots_that_another_program_expires(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the export expires them, too: that is no reason to end."""
    use_catalog(monkeypatch, tmp_path)
    table = opened(ICEBERG, folder)
    for number in range(1, 9):
        table.commit(number, [write_range(folder, number)], HOURS)
    with iceberg_table().transaction() as change:
        change.set_properties({"history.expire.max-snapshot-age-ms": "0"})

    def expire_all() -> None:
        other = iceberg_table()
        current = other.metadata.current_snapshot_id
        old = [each.snapshot_id for each in other.metadata.snapshots if each.snapshot_id != current]
        if old:
            other.maintenance.expire_snapshots().by_ids(old).commit()

    assert table.compact(HOURS, BROKERS, expire_all) == Compacted(8, 1)
    table.commit(9, [write_range(folder, 9)], HOURS)
    assert len(table_rows(ICEBERG, folder)) == 9 * COUNT


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
