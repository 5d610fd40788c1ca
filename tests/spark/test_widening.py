"""Tests for the conversion of columns in finished files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trio_nsq.spark.export.widening import widen_file
from trio_nsq.storage import LocalStorage


class TakenOver(LocalStorage):
    """A place in which another process converts a file further while this one, without its lease, converts it."""

    def __init__(self, folder: Path, schema: Any) -> None:
        super().__init__(folder)
        self._schema = schema

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        assert widen_file(LocalStorage(self.folder), name, self._schema)
        return super().replace(name, data, version)


def test_what_another_process_has_converted_further_stays(tmp_path: Path) -> None:
    long, double = pa.int64(), pa.float64()
    pq.write_table(pa.table({"p": pa.array([1], long), "q": pa.array([2], long)}), tmp_path / "f.parquet")
    further = pa.schema([("p", double), ("q", double)])
    widen_file(TakenOver(tmp_path, further), "f.parquet", pa.schema([("p", double), ("q", long)]))
    assert pq.read_schema(tmp_path / "f.parquet") == further
    assert pq.read_table(tmp_path / "f.parquet").to_pylist() == [{"p": 1.0, "q": 2.0}]
