"""Helpers for the tests of Delta and Iceberg tables: a catalog, and the rows of a table as other programs see them."""

import json
import string
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

from spark.support import NOON_NS
from trio_nsq.log.gaps import Span
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.files import RangeFiles
from trio_nsq.spark.export.layout import Layout, PartitionBy, partition_folder, partition_key
from trio_nsq.spark.export.manifest import RangeResult
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.tables.target import TableKind, TableTarget
from trio_nsq.storage import LocalStorage

HOURS = Layout(PartitionBy.HOUR)
COUNT = 100
"""Messages of a range."""
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


def write_range(
    folder: Path, number: int, layout: Layout = HOURS, topic: str = "t", body: bytes = b"x"
) -> RangeResult:
    """Write the file of a range as an export does."""
    first, time_ns = number * COUNT, NOON_NS + number
    builder = TableBuilder(topic, "b", layout)
    builder.add(RecordBatch(first, 1000 + first, time_ns, 0, pack_messages([body] * COUNT), b""))
    place = partition_folder(layout.partition, partition_key(layout.partition, time_ns))
    name = f"{place}{topic}-b-{first:020d}-{first + COUNT:020d}.parquet"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(builder.table(), folder / name)
    return RangeResult("b", first, first + COUNT, COUNT, files=[name])


def write_changes(
    folder: Path,
    layout: Layout,
    broker: str,
    first: int,
    messages: Sequence[tuple[int, object]],
    topic: str = "t",
) -> RangeResult:
    """Write the files of a range as an export to a table with a key does; messages are their times and their JSON."""
    end = first + len(messages)
    request = ExportRequest(topic, str(folder), layout=layout)
    files = RangeFiles(LocalStorage(folder), request, layout, broker, Span(first, end))
    for sequence, (time_ns, body) in enumerate(messages, first):
        packed = pack_messages([json.dumps(body).encode()])
        files.add(RecordBatch(sequence, 1000 + sequence, time_ns, 0, packed, b""))
    files.close()
    files.publish()
    return RangeResult(broker, first, end, len(messages), files=files.names)


_Z85 = string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#"


def _z85(data: bytes) -> str:
    """Encode bytes as text, as Delta tables do."""
    numbers = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(_Z85[number // 85**power % 85] for number in numbers for power in (4, 3, 2, 1, 0))


def _deletion_vector(rows: list[int]) -> bytes:
    """Return the bitmap of the numbers of rows, an even number of them, in the format of Delta tables."""
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + struct.pack(f"<{len(rows)}H", *rows)
    return struct.pack("<IQI", 1681511377, 1, 0) + bitmap


def delete_delta_rows(folder: Path, rows: list[int]) -> None:
    """Delete an even number of rows of the first file of a Delta table, as programs do that write deletion vectors."""
    log = folder / "_delta_log"
    lines = [line for path in sorted(log.glob("*.json")) for line in path.read_text().splitlines()]
    add = next(action["add"] for action in map(json.loads, lines) if "add" in action)
    bitmap = _deletion_vector(rows)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": _z85(bitmap),
        "sizeInBytes": len(bitmap),
        "cardinality": len(rows),
    }
    old = {"path": add["path"], "size": add["size"], "partitionValues": add["partitionValues"]}
    changes = [
        {"remove": old | {"deletionTimestamp": 0, "dataChange": True, "extendedFileMetadata": True}},
        {"add": add | {"deletionVector": vector}},
    ]
    version = len(list(log.glob("*.json")))
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, changes)))
