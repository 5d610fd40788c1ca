"""Properties of exports with `--json`: whatever bodies a topic gets, in whichever round, the export goes on.

Each row is in the files or in the table, readers find it by the values of its columns, and each value is in its column,
in `rest`, or in `unparsed`.
"""

import json
import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyiceberg.expressions import EqualTo
from pyiceberg.types import DateType

from soak import examples
from spark.support import FIRST_ID, NOON_NS
from spark.table_support import DELTA, ICEBERG, catalog_environment, iceberg_table
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.layout import BodyFormat, Layout, LayoutError, PartitionBy
from trio_nsq.spark.export.manifest import Manifest, manifest_path
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.spark.schemas.column_types import ColumnType, DecimalType, JsonType
from trio_nsq.spark.segments.places import parse_places
from trio_nsq.spark.tables.target import TableTarget

TYPES: dict[str, ColumnType] = {
    "t": JsonType.TIMESTAMP,
    "d": JsonType.DOUBLE,
    "j": JsonType.JSON,
    "p": DecimalType(20, 2),
    "n": JsonType.INT,
    "s": JsonType.SHORT,
    "b": JsonType.BYTE,
    "f": JsonType.FLOAT,
    "y": JsonType.DATE,
}
GIVEN = list(TYPES.items())
NAMES = [
    *TYPES,
    *[
        "a",
        "A",
        "a.b",
        "a.",
        ".",
        "",
        "first name",
        "first_name",
        "a,b",
        "c=d",
        "{}",
        "(;)",
        "a\tb",
        "`",
    ],
    *[
        "ts",
        "seq",
        "rest",
        "body_rest",
        "date",
        "hour",
        "_file",
        "element",
        "é",
        "\ud800",
        "\u0131",
        "i",
        "x" * 256,
    ],
]
TEXTS = [
    *[
        "1700000000000",
        "-9e12",
        "253402300799.999999",
        "-62135596800",
        "1e400",
        "1.10",
        "12345678901234567.89",
        "-0",
    ],
    *[
        "9007199254740993",
        "18446744073709551616",
        "1e-400",
        "0.1",
        "true",
        "null",
        "[]",
        "{}",
        '"\\ud800"',
        '"\\u0000"',
    ],
    *[
        '"0001-01-01T00:00:00Z"',
        '"0001-01-01T00:00:00+01:00"',
        '"0999-12-31T23:59:59.5Z"',
        '"2026-11-28T06:00:00Z"',
    ],
    *[
        '"0001-01-01"',
        '"2026-11-28"',
        '"9999-12-31T23:59:59-12:00"',
        '"9999-12-31T23:59:59.999999Z"',
        '"' + "\U0010ffff" * 70 + '"',
        '{"a.b":[1.10]}',
    ],
]
values = st.sampled_from(TEXTS) | (
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4)
).map(json.dumps)
objects = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), values, max_size=5)
bodies = objects.map(
    lambda found: (
        "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in found.items()) + "}"
    ).encode()
) | st.sampled_from([b"", b"[1]", b"\xff", b'{"a":NaN}'])
rounds = st.lists(st.lists(bodies, min_size=1, max_size=4), min_size=2, max_size=3)


@pytest.mark.parametrize("target", [None, DELTA, ICEBERG], ids=["files", "delta", "iceberg"])
@pytest.mark.parametrize("fields", [GIVEN, []], ids=["given", "inferred"])
@given(rounds)
@example(
    [
        [
            b"{}",
            *(("{" + ",".join(f'"{name}":{text}' for name in TYPES) + "}").encode() for text in TEXTS),
        ],
        [b'{"t":0}'] * 2,
    ]
)
@example(
    [[b'{"a":1}'], [f"{{{json.dumps(name)}:{n}}}".encode() for n, name in enumerate(NAMES)], [b'{"a.b":1}']]
)
@settings(max_examples=examples(10))
def test_export_goes_on(
    target: TableTarget | None, fields: list[tuple[str, ColumnType]], found: list[list[bytes]]
) -> None:
    with TemporaryDirectory() as folder, patch.dict(os.environ, catalog_environment(Path(folder))):
        try:
            check_rounds(Path(folder), target, fields, found)
        except LayoutError:
            # Without a JSON object in the first round there are no columns to infer.
            assert not fields


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
@given(rounds, rounds, st.lists(st.sampled_from(NAMES).filter(str.isidentifier), max_size=2, unique=True))
@example(
    [[b'{"a":1}'], [b'{"a":2,"i":1,"B":1,"s":1}'], [b'{"i":3,"B":2,"s":2}']],
    [[b'{"a":"x"}'], [b'{"A":"y","i":"z","b":1,"s":3}'], [b'{"a":"x","A":"u","i":"v","b":2,"s":4}']],
    ["i"],
)
@settings(max_examples=examples(5))
def test_two_exports_to_one_table_go_on(
    target: TableTarget, one: list[list[bytes]], other: list[list[bytes]], added: list[str]
) -> None:
    """They find the same new fields with other types, or in another case; another program adds columns."""
    with TemporaryDirectory() as name, patch.dict(os.environ, catalog_environment(Path(name))):
        folder = Path(name)
        found = {"u": [[b'{"n":1}'], *one], "v": [[b'{"n":1}'], *other]}
        for number in range(max(len(one), len(other)) + 1):
            for topic, some in found.items():
                if number < len(some):
                    request = request_of(folder, target, [], topic)
                    before = [body for each in some[:number] for body in each]
                    export_round(folder, request, before, some[number])
            if number == 1:
                add_columns(folder, target, added)
        for topic, some in found.items():
            check_rows(folder, target, topic, [body for each in some for body in each])


def add_columns(folder: Path, target: TableTarget, names: list[str]) -> None:
    """Add columns as another program does, unless the table has them."""
    if target == DELTA:
        table = deltalake.DeltaTable(folder / "f")
        there = {field.name.casefold() for field in table.schema().fields}
        fields = [
            deltalake.Field(name, deltalake.schema.PrimitiveType("date"))
            for name in names
            if name.casefold() not in there
        ]
        if fields:
            table.alter.add_columns(fields)
        return
    with iceberg_table().update_schema() as update:
        there = {name.casefold() for name in iceberg_table().schema().column_names}
        for name in names:
            if name.casefold() not in there:
                update.add_column((name,), DateType())


def check_rounds(
    folder: Path,
    target: TableTarget | None,
    fields: Sequence[tuple[str, ColumnType]],
    found: list[list[bytes]],
) -> None:
    """Export in rounds, and check the rows that readers find."""
    request = request_of(folder, target, fields, "u")
    before: list[bytes] = []
    for some in found:
        export_round(folder, request, before, some)
        before += some
    check_rows(folder, target, "u", before)


def request_of(
    folder: Path, target: TableTarget | None, fields: Sequence[tuple[str, ColumnType]], topic: str
) -> ExportRequest:
    """Return the request of an export; those of several topics have one table."""
    partition = PartitionBy.HOUR if target == ICEBERG else PartitionBy.NONE
    layout = Layout(partition, BodyFormat.JSON)
    place = folder / (topic if target == ICEBERG and topic != "u" else "f")
    return ExportRequest(topic, str(place), layout=layout, json_fields=fields, table=target)


def export_round(folder: Path, request: ExportRequest, before: list[bytes], some: list[bytes]) -> None:
    """Publish messages after those before, and export them."""
    place = folder / "data" / "topics" / f"{request.topic}.topic"
    place.mkdir(parents=True, exist_ok=True)
    sequence = len(before)
    log = DiskLog(place, segment_bytes=1 << 20, now_ns=lambda: NOON_NS)
    batch = RecordBatch(sequence, FIRST_ID + sequence, NOON_NS + sequence, 0, pack_messages(some), b"")
    log.append([batch], sync=False)
    log.close()
    places = parse_places([f"b={folder}/data"], request.topic)
    with open_export(request, places) as job:
        job.run(run_inline, job.plan(places), lambda messages, size: None)


def check_rows(folder: Path, target: TableTarget | None, topic: str, found: list[bytes]) -> None:
    """Check that the rows of a topic have the values of its bodies, and that readers find them by these values."""

    def of_topic(rows: pa.Table) -> pa.Table:
        return rows.filter(pc.field("topic") == topic)

    rows = of_topic(read(folder, target, None, None)).sort_by("seq")
    place = Path(request_of(folder, target, [], topic).place)
    manifest = Manifest.from_bytes((place / manifest_path(topic)).read_bytes())
    names = {column.field: (column.name, column.type) for column in manifest.layout.json_columns}
    assert rows["seq"].to_pylist() == list(range(len(found)))
    for index, body in enumerate(found):
        row = {name: rows[name][index] for name in rows.column_names}
        if row["unparsed"].is_valid:
            assert row["unparsed"].as_py() == body
            continue
        rest = decoded(row["rest"].as_py() or "{}") if "rest" in row else None
        for field, value in decoded(body).items():
            name, kind = names.get(field, ("", None))
            if name and name in row and row[name].is_valid:
                assert is_same(row[name], kind, value)
                if target != ICEBERG or "." not in name:  # pyiceberg's filters cannot name such columns
                    assert index in of_topic(read(folder, target, name, row[name]))["seq"].to_pylist()
            elif rest is not None and value is not None:
                assert rest[field] == value


def decoded(text: str | bytes) -> Any:
    """Decode JSON with all digits of its numbers."""
    return json.loads(text, parse_float=Decimal)


def is_same(cell: Any, kind: ColumnType | None, value: Any) -> bool:
    """Whether a value of a column is that of the body."""
    if kind is JsonType.JSON:
        return bool(decoded(cell.as_py()) == value)
    if kind is JsonType.TIMESTAMP:
        return bool(1 <= cell.as_py().year <= 9999)
    if isinstance(kind, DecimalType):
        return bool(cell.as_py() == Decimal(value))
    if kind is JsonType.DATE:
        return bool(cell.as_py().isoformat() == value)
    if kind is JsonType.FLOAT:
        return bool(cell.as_py() == pa.scalar(float(value), pa.float32()).as_py())
    if kind is JsonType.DOUBLE:
        # Digits that no double has would make it another number.
        found = cell.as_py()
        return bool(found == value or Decimal(repr(found)) == value)
    return bool(cell.as_py() == value)


def read(folder: Path, target: TableTarget | None, name: str | None, value: Any) -> pa.Table:
    """Read the rows, or those with a value in a column."""
    if target == ICEBERG:
        if name is None:
            return iceberg_table().scan().to_arrow()
        literal = value.as_py().isoformat() if pa.types.is_temporal(value.type) else value.as_py()
        equal: Any = EqualTo
        return iceberg_table().scan(equal(name, literal)).to_arrow()
    dataset: Any = (
        ds.dataset(folder / "f", partitioning="hive")
        if target is None
        else deltalake.DeltaTable(folder / "f").to_pyarrow_dataset()
    )
    found: pa.Table = dataset.to_table(filter=None if name is None else pc.field(name) == value)
    return found
