"""Tests for Delta and Iceberg tables that are partitioned by fields of JSON bodies, and by their own time."""

import json
from pathlib import Path

import deltalake
import pyarrow.compute as pc
import pytest

from cli.support import Cli
from spark.support import ToParquet, bodies_in, export, replayed
from spark.table_support import (
    DELTA,
    ICEBERG,
    duckdb_counts,
    files_of,
    iceberg_table,
    table_rows,
    use_catalog,
)
from trio_nsq.spark.tables.target import TableKind, TableTarget

ROUNDS = 9
"""Enough small files in each partition to be merged."""
VALUES = [
    {"region": "a/b %25", "n": 5, "at": "2026-11-21T04:59:59Z"},
    {"region": "grün", "n": 5, "at": "2026-11-21T05:00:00Z"},
    {"region": "grün", "n": 6, "at": None},
    {"region": None, "at": "1969-12-31T23:59:59.999999Z"},
    {"region": "", "n": "no number", "at": "2026-11-21T04:00:00Z"},
]
LAYOUT = (
    "--json",
    "--keep-body",
    "--columns",
    "region,n:int,at:timestamp",
    "--partition-by",
    "region,n,hour",
    "--event-time",
    "at",
)


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_catalog(monkeypatch, tmp_path)


def options(target: TableTarget) -> list[str]:
    return str(target).split()


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_partitions_of_tables(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Each message is in the table once, before and after small files are merged, and filters read few files."""
    bodies = [json.dumps(each).encode() for each in VALUES]
    for _ in range(ROUNDS):
        qcli.publish(topic, bodies)
        export(qcli, topic, tmp_path / "t", *LAYOUT, *options(target))
    files = files_of(target, tmp_path / "t")
    assert len(files) == 5 * ROUNDS
    count = len(bodies) * ROUNDS
    for compact in ([], ["--compact"]):
        said = export(qcli, topic, tmp_path / "t", *LAYOUT, *options(target), *compact)
        assert said["compacted"] == (len(files) if compact else 0)
        assert duckdb_counts(target, tmp_path / "t") == (count, count, count * (count - 1) // 2)
        found = table_rows(target, tmp_path / "t")
        assert found["seq"].to_pylist() == list(range(count))
        assert found["region"].to_pylist() == ["a/b %25", "grün", "grün", None, None] * ROUNDS
        assert found["n"].to_pylist() == [5, 5, 6, None, None] * ROUNDS
        assert found["at"].cast("int64").to_pylist()[3] == -1
    assert len(files_of(target, tmp_path / "t")) == 5
    source = (str(tmp_path / "t"), "--delta") if target == DELTA else ("local/events.clicks", "--iceberg")
    where = ("--where", "region = 'grün' AND n = 5")
    assert replayed(qcli, tmp_path, *source, f"{topic}.again", *where)["published"] == ROUNDS
    assert bodies_in(qcli.http_address, f"{topic}.again") == [bodies[1]] * ROUNDS
    if target.kind is TableKind.DELTA:
        table = deltalake.DeltaTable(tmp_path / "t")
        assert table.metadata().partition_columns == ["region", "n", "date", "hour"]
        wanted = (pc.field("region") == "grün") & (pc.field("n") == 5)
        assert len(list(table.to_pyarrow_dataset().get_fragments(wanted))) == 1
    else:
        loaded = iceberg_table()
        assert [(each.name, str(each.transform)) for each in loaded.spec().fields] == [
            ("region", "identity"),
            ("n", "identity"),
            ("at_hour", "hour"),
        ]
        filtered = loaded.scan("region = 'grün' AND at >= '2026-11-21T05:00:00+00:00'")
        assert len(list(filtered.plan_files())) == 1
        assert filtered.to_arrow()["n"].to_pylist() == [5] * ROUNDS
        assert len(list(loaded.scan("at IS NULL").plan_files())) == 1


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_tables_with_other_partitions(
    target: TableTarget, to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """A table is not joined with files of other partitions, and a folder without the columns is no Iceberg table."""
    qcli.publish(topic, [json.dumps(each).encode() for each in VALUES])
    export(qcli, topic, tmp_path / "t", *LAYOUT, *options(target))
    other = tmp_path / ("u" if target is ICEBERG else "t")
    result = to_parquet(topic, other, "--json", "--partition-by", "region", *options(target))
    assert result.code == 1
    assert "is partitioned by" in result.err or "all files need the same layout" in result.err
    export(qcli, topic, tmp_path / "files", *LAYOUT)
    result = to_parquet(topic, tmp_path / "files", *LAYOUT, "--iceberg", "local/events.others")
    assert (result.code, "all files need the same layout" in result.err) == (1, True), result.err
