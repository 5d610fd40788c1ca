"""Helpers for the tests of Delta and Iceberg tables: a catalog, and the rows of a table as other programs see them."""

from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

from trio_nsq.spark.tables.target import TableKind, TableTarget

DELTA, ICEBERG = TableTarget(TableKind.DELTA), TableTarget.iceberg("local/events.clicks")


def use_catalog(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Configure the Iceberg catalog `local`, in a database in a folder."""
    for name, value in catalog_environment(folder).items():
        monkeypatch.setenv(name, value)


def catalog_environment(folder: Path) -> dict[str, str]:
    """Return the environment that configures the Iceberg catalog `local`, in a database in a folder."""
    return {
        "PYICEBERG_CATALOG__LOCAL__TYPE": "sql",
        "PYICEBERG_CATALOG__LOCAL__URI": f"sqlite:///{folder}/catalog.db",
    }


def iceberg_table(target: TableTarget = ICEBERG) -> Any:
    """Load the Iceberg table."""
    # pyiceberg itself reads the environment once, when it is imported.
    properties: Any = Config().get_catalog_config(target.catalog) or {}
    return load_catalog(target.catalog, **properties).load_table(target.name)


def files_of(target: TableTarget, folder: Path) -> list[str]:
    """Return the paths of the files in the current version of a table."""
    if target.kind is TableKind.DELTA:
        return sorted(deltalake.DeltaTable(folder).file_uris())
    found = iceberg_table(target).scan().plan_files()
    return sorted(each.file.file_path.removeprefix("file://") for each in found)


def table_rows(target: TableTarget, folder: Path) -> pa.Table:
    """Read a table through its library; rows are sorted by broker and sequence."""
    if target.kind is TableKind.DELTA:
        found = deltalake.DeltaTable(folder).to_pyarrow_table()
    else:
        found = iceberg_table(target).scan().to_arrow()
    return found.sort_by([("broker", "ascending"), ("seq", "ascending")])


def duckdb_counts(target: TableTarget, folder: Path) -> tuple[int, int, int]:
    """Have DuckDB read the files of a table: the number of rows, of different sequences, and the sum of sequences."""
    query = "SELECT count(*), count(DISTINCT (broker, seq)), sum(seq)::BIGINT FROM read_parquet(?, union_by_name=true)"
    files = files_of(target, folder)
    found = duckdb.execute(query, [files]).fetchone() if files else (0, 0, 0)
    assert found is not None
    return found[0], found[1], found[2]
