"""The public examples of schema evolution of Iceberg and Delta, as tables of changes and rows.

Iceberg's documentation lists the changes of a schema (add, drop, rename, update, reorder), also of nested fields, and
says that none of them changes the values of other columns. Delta's lists cases of merges into tables whose source has
other columns.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyiceberg.types import DoubleType, LongType

from cli.support import Cli
from spark.support import export, run_in_process
from spark.table_support import DELTA, ICEBERG, iceberg_table, table_rows, use_catalog


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_catalog(monkeypatch, tmp_path)


def publish(qcli: Cli, topic: str, rows: Sequence[object]) -> None:
    qcli.publish(topic, [json.dumps(row).encode() for row in rows])


# ---------------------------------------------------------------------- Iceberg


class Change(NamedTuple):
    """A change of an Iceberg table by another program, after one message and before a second one.

    Attributes:
        change: Makes it.
        columns: The columns of the table afterwards, in their order, those of the bodies only.
        rows: The rows of both messages, the newer one last.
    """

    change: Callable[[Any], object]
    columns: list[str]
    rows: list[dict[str, Any]]


FIRST = {"k": 1, "data": "a", "point": {"x": 1.0, "y": 2.0}}
SECOND = {"k": 2, "data": "b", "point": {"x": 3.0, "y": 4.0}}
CHANGES = {
    "add a column": Change(
        lambda update: update.add_column("count", LongType()),
        ["k", "data", "point", "count"],
        [FIRST | {"count": None}, SECOND | {"count": None}],
    ),
    "drop a column, which the export adds again": Change(
        lambda update: update.delete_column("data"),
        ["k", "point", "data"],
        [FIRST, SECOND],
    ),
    "update a type": Change(
        lambda update: update.update_column("k", LongType()), ["k", "data", "point"], [FIRST, SECOND]
    ),
    "reorder columns": Change(
        lambda update: update.move_first("data"), ["data", "k", "point"], [FIRST, SECOND]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_an_iceberg_table(name: str, qcli: Cli, topic: str, tmp_path: Path) -> None:
    change, columns, rows = CHANGES[name]
    types = "k:int,data:string,point:struct<x:double,y:double>"
    arguments = [*str(ICEBERG).split(), "--json", "--columns", types]
    publish(qcli, topic, [FIRST])
    export(qcli, topic, tmp_path / "t", *arguments)
    with iceberg_table().update_schema() as update:
        change(update)
    publish(qcli, topic, [SECOND])
    assert export(qcli, topic, tmp_path / "t", *arguments)["misfits"] == {}
    found = table_rows(ICEBERG, tmp_path)
    assert [each for each in found.column_names if each in columns] == columns
    assert found.select(columns).to_pylist() == rows


NESTED: dict[str, Callable[[Any], object]] = {
    "add a field": lambda update: update.add_column(("point", "z"), DoubleType()),
    "drop a field": lambda update: update.delete_column(("point", "y")),
    "reorder fields": lambda update: update.move_first(("point", "y")),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_changes_of_an_iceberg_table_are_refused(
    name: str, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """A struct of the files has the fields of that of the table, in the same order."""
    arguments = [*str(ICEBERG).split(), "--json", "--columns", "point:struct<x:double,y:double>"]
    publish(qcli, topic, [FIRST])
    export(qcli, topic, tmp_path / "t", *arguments)
    with iceberg_table().update_schema() as update:
        NESTED[name](update)
    publish(qcli, topic, [SECOND])
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "t"), *arguments)
    assert (result.code, "that of the files struct<x: double, y: double>: choose" in result.err) == (1, True)
    assert table_rows(ICEBERG, tmp_path).num_rows == 1


def test_renamed_column_of_an_iceberg_table(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The export does not write to another name, nor to a new column of the old name, whose values would be mixed."""
    arguments = [*str(ICEBERG).split(), "--json"]
    publish(qcli, topic, [FIRST])
    export(qcli, topic, tmp_path / "t", *arguments)
    with iceberg_table().update_schema() as update:
        update.rename_column("data", "text")
    publish(qcli, topic, [SECOND])
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "t"), *arguments)
    assert (result.code, "was renamed to text by another program" in result.err) == (1, True), result.err
    with iceberg_table().update_schema() as update:
        update.rename_column("text", "data")
    export(qcli, topic, tmp_path / "t", *arguments)
    assert table_rows(ICEBERG, tmp_path)["data"].to_pylist() == ["a", "b"]


# ---------------------------------------------------------------------- Delta


class Merge(NamedTuple):
    """Messages that become rows of a Delta table with a key, before and after the source has other columns.

    Attributes:
        rows: The rows by key.
        new_columns: Those that the second export adds.
    """

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    rows: dict[int, dict[str, Any]]
    new_columns: dict[str, str]


MERGES = {
    "source: key, value, new_value": Merge(
        [{"key": 1, "value": "a"}, {"key": 2, "value": "b"}],
        [{"key": 1, "value": "c", "new_value": 9}, {"key": 3, "value": "d", "new_value": 8}],
        {
            1: {"value": "c", "new_value": 9},
            2: {"value": "b", "new_value": None},
            3: {"value": "d", "new_value": 8},
        },
        {"new_value": "long"},
    ),
    "source: key, new_value. A row is its newest message, so old_value is not kept": Merge(
        [{"key": 1, "old_value": "a"}, {"key": 2, "old_value": "b"}],
        [{"key": 1, "new_value": "x"}, {"key": 3, "new_value": "y"}],
        {
            1: {"old_value": None, "new_value": "x"},
            2: {"old_value": "b", "new_value": None},
            3: {"old_value": None, "new_value": "y"},
        },
        {"new_value": "string"},
    ),
    "source: key": Merge(
        [{"key": 1, "value": "a"}, {"key": 2, "value": "b"}],
        [{"key": 1}, {"key": 3}],
        {1: {"value": None}, 2: {"value": "b"}, 3: {"value": None}},
        {},
    ),
}


@pytest.mark.parametrize("name", MERGES)
def test_merges_into_a_delta_table(name: str, qcli: Cli, topic: str, tmp_path: Path) -> None:
    case = MERGES[name]
    arguments = ["--delta", "--json", "--key", "key", "--schema-contract", "evolve"]
    publish(qcli, topic, case.before)
    export(qcli, topic, tmp_path / "t", *arguments)
    publish(qcli, topic, case.after)
    report = export(qcli, topic, tmp_path / "t", *arguments)
    assert (report["new_columns"], report["misfits"]) == (case.new_columns, {})
    publish(qcli, topic, case.after)  # the first values of a new column are in `rest`
    export(qcli, topic, tmp_path / "t", *arguments)
    columns = [*next(iter(case.rows.values()))]
    found = table_rows(DELTA, tmp_path / "t").select(["key", *columns]).to_pylist()
    assert {row.pop("key"): row for row in found} == case.rows
