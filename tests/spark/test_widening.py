"""Tests for the conversion of columns in finished files."""

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark.support import NOON_NS
from trio_nsq.log.gaps import Span
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.files import RangeFiles
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.export.widening import columns_too_long, convert_file
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.storage import LocalStorage, StorageError


class TakenOver(LocalStorage):
    """A place in which another process converts a file further while this one, without its lease, converts it."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        super().__init__(folder)
        self._layout = layout

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        assert convert_file(LocalStorage(self.folder), name, self._layout)
        return super().replace(name, data, version)


def test_file_of_an_attempt_that_was_considered_dead_is_converted(tmp_path: Path) -> None:
    """It was written before the column became wider, and gets its name before the file of the next attempt."""

    def exported(kind: JsonType) -> list[str]:
        layout = Layout(body=BodyFormat.JSON, json_columns=(JsonColumn("a", kind, "a"),))
        request = ExportRequest("t", str(tmp_path), layout=layout)
        files = RangeFiles(LocalStorage(tmp_path), request, layout, "b", Span(0, 1))
        files.add(RecordBatch(0, 1000, NOON_NS, 0, pack_messages([b'{"a":1}'])))
        files.close()
        files.publish()
        files.discard()
        return files.names

    (name,) = exported(JsonType.LONG)
    assert pq.read_schema(tmp_path / name).field("a").type == pa.int64()
    assert exported(JsonType.DOUBLE) == [name]
    assert pq.read_schema(tmp_path / name).field("a").type == pa.float64()


def test_file_of_another_topic_is_not_taken_for_that_of_a_dead_attempt(tmp_path: Path) -> None:
    """A hyphen separates topic and broker in the name, and both may have hyphens."""
    for topic, broker in (("a-b", "c"), ("a", "b-c")):
        request = ExportRequest(topic, str(tmp_path))
        files = RangeFiles(LocalStorage(tmp_path), request, Layout(), broker, Span(0, 1))
        files.add(RecordBatch(0, 1000, NOON_NS, 0, pack_messages([b"x"])))
        files.close()
        if topic == "a":
            with pytest.raises(StorageError, match="has topic a-b from broker c"):
                files.publish()
        else:
            files.publish()
        files.discard()


def test_what_another_process_has_converted_further_stays(tmp_path: Path) -> None:
    long, double = pa.int64(), pa.float64()
    pq.write_table(pa.table({"p": pa.array([1], long), "q": pa.array([2], long)}), tmp_path / "f.parquet")
    further = Layout(
        json_columns=(JsonColumn("p", JsonType.DOUBLE, "p"), JsonColumn("q", JsonType.DOUBLE, "q"))
    )
    convert_file(TakenOver(tmp_path, further), "f.parquet", further.widened({"q": "long"}))
    assert pq.read_schema(tmp_path / "f.parquet") == pa.schema([("p", double), ("q", double)])
    assert pq.read_table(tmp_path / "f.parquet").to_pylist() == [{"p": 1.0, "q": 2.0}]


COLUMNS_BEFORE = [
    pa.array(["x"]),
    pa.array([b"x"], pa.binary()),
    pa.array([1]),
    pa.array([None], pa.int64()),
    pa.array([0.5]),
    pa.array([True]),
    pa.array([0], pa.timestamp("us", "UTC")),
    pa.array([Decimal("1.5")]),
    pa.array([{"p": 1, "q": "x"}]),
    pa.array([{"b": 1}]),  # in a column `a`, its path is that of the column `a.b`
    pa.array([[("k", "v"), ("l", "w")]], pa.map_(pa.string(), pa.string())),
    pa.array([[1, 2]]),
    pa.array([[{"p": [1], "q": {"r": 1}}]]),
]


@pytest.mark.parametrize("before", COLUMNS_BEFORE, ids=lambda each: str(each.type))
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize(
    ("value", "fits"), [(5, True), (2**53 + 1, False), (-(2**53) - 1, False), (2**60, True)]
)
def test_longs_that_a_double_does_not_represent(
    tmp_path: Path, before: pa.Array, statistics: bool, value: int, fits: bool
) -> None:
    """Whatever the column before has: a struct and a map have several leaves in the file."""
    table = pa.table({"a": before, "a.b": pa.array([value]), "z": before})
    pq.write_table(table, tmp_path / "f.parquet", write_statistics=statistics)
    found = columns_too_long(LocalStorage(tmp_path), ["f.parquet"], ["a.b", "missing"])
    assert found == (set() if fits else {"a.b"})
