"""A run is killed after the files of a range were published, and the next one has another contract."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark.kills import Killed
from spark.support import NOON_NS, parquet_files, write_log
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.layout import BodyFormat, Layout
from trio_nsq.spark.export.request import ExportRequest, ExportResult
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.spark.schemas.contracts import SchemaContract
from trio_nsq.spark.segments.places import parse_places
from trio_nsq.storage import LocalStorage, Storage

BODIES = [{"k": "a", "n": 1}, {"k": "b", "n": "x"}, {"k": "a", "n": 2, "new": 1}, {"k": 1, "n": 3}]
CONTRACTS = [None, SchemaContract.EVOLVE, SchemaContract.DISCARD_ROW, SchemaContract.DISCARD_VALUE]


class WithoutResults(LocalStorage):
    """A folder in which the process is killed before it writes the result of a range."""

    def put_new(self, name: str, data: bytes) -> bool:
        if "/done/" in name:
            raise Killed
        return super().put_new(name, data)


def export(request: ExportRequest, data: Path, storage: Storage | None = None) -> ExportResult:
    def engine(tasks: Iterable[Any], collect: Callable[[Any], None], advance: Any) -> None:
        for each in tasks:
            collect(each.task.run(advance, storage))

    places = parse_places([f"b={data}"], request.topic)
    with open_export(request, places) as job:
        job.run(engine, job.plan(places), lambda messages, size: None)
        return job.result


def files_in(folder: Path) -> dict[str, Any]:
    return {name: pq.read_table(folder / name, partitioning=None) for name in parquet_files(folder)}


@pytest.mark.parametrize("levels", [(), ("k",)])
@pytest.mark.parametrize("second", CONTRACTS)
@pytest.mark.parametrize("first", CONTRACTS)
def test_range_has_the_rows_of_the_run_that_counts_them(
    tmp_path: Path, first: SchemaContract | None, second: SchemaContract | None, levels: tuple[str, ...]
) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS, [json.dumps(each).encode() for each in BODIES])])
    request = ExportRequest(
        "t",
        str(tmp_path / "out"),
        layout=Layout(body=BodyFormat.JSON, keep_rest=True, levels=levels),
        json_fields=(("k", JsonType.STRING), ("n", JsonType.LONG)),
        contract=second,
    )
    with pytest.raises(Killed):
        export(replace(request, contract=first), tmp_path / "data", WithoutResults(tmp_path / "out"))
    assert parquet_files(tmp_path / "out")
    found = export(request, tmp_path / "data")
    alone = export(replace(request, place=str(tmp_path / "alone")), tmp_path / "data")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "alone")
    assert found == alone
    assert found.messages + found.discarded_rows == len(BODIES)
    assert found.messages == sum(map(len, files_in(tmp_path / "out").values()))


def test_files_with_the_same_rows_stay(tmp_path: Path) -> None:
    """Readers may have them open, and object stores would get them twice."""
    write_log(tmp_path / "data", "t", [(NOON_NS, [b"a"] * 10)])
    request = ExportRequest("t", str(tmp_path / "out"))
    with pytest.raises(Killed):
        export(request, tmp_path / "data", WithoutResults(tmp_path / "out"))
    (name,) = parquet_files(tmp_path / "out")
    before = (tmp_path / "out" / name).stat()
    assert export(request, tmp_path / "data").messages == 10
    assert (tmp_path / "out" / name).stat().st_ino == before.st_ino
