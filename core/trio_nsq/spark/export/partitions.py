"""Partition folders by fields of JSON bodies, and by their own time: rows of a range are grouped, sorted, then written.

The names and the rows of a file depend on the messages of its range only: after a kill, the next attempt may find
some of the files. So the rows of a range are collected first, beyond some size in a temporary file, and then written,
one file after the other. Any number of partitions needs the same memory and one open file.
"""

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from ..schemas.arrow_types import arrow_type
from ..schemas.column_types import ColumnType, JsonType, TimeType
from .layout import JsonColumn, Layout, LayoutError, PartitionBy
from .levels import Level, Transform, parse_level
from .sorting import sorted_rows

MAX_PARTITIONS = 10_000
"""The most partitions of a range: each is a file. With more, the values of the field are probably data."""
_TYPES = frozenset(
    (
        JsonType.STRING,
        JsonType.LONG,
        JsonType.INT,
        JsonType.SHORT,
        JsonType.BYTE,
        JsonType.BOOLEAN,
        JsonType.DATE,
    )
)
"""The types of columns whose values can name folders."""
_NOT_TRANSFORMED = {
    Transform.BUCKET: frozenset({JsonType.BOOLEAN}),
    Transform.TRUNCATE: frozenset({JsonType.BOOLEAN, JsonType.DATE}),
}
_KINDS = {
    Transform.BUCKET: pa.int32(),
    Transform.YEAR: pa.int32(),
    Transform.MONTH: pa.string(),
    Transform.DAY: pa.date32(),
    Transform.HOUR: pa.string(),
}
"""The types of the columns that readers take from the names of folders; others have that of the field."""
_DATE_CHARS = {Transform.YEAR: 4, Transform.MONTH: 7, Transform.DAY: 10}
_MAX_INT32 = 2**31 - 1
_OPTION = "--partition-by"
_OF_KEYS = ("--key", "--op")
_SHOWN_FIELDS = 20
_NULL = "__HIVE_DEFAULT_PARTITION__"
_MAX_VALUE_BYTES = 100
_MAX_FOLDER_BYTES = 255
"""The longest name of a folder on common file systems: the column and the value, both escaped."""
_MAX_LEVEL_BYTES = 200
"""The longest name of a level, so that its folders can have each value that is no text, and null."""
_ESCAPED = frozenset("\"#%'*/:=?\\{[]^") | {chr(code) for code in (*range(1, 0x20), 0x7F)}
"""The characters that Spark and Hive escape in the names of folders, as %2F. They do not know others."""
Values = tuple[str | None, ...]
"""The values of the levels of a partition, as text."""


class PartitionSorter:
    """Collects the rows of a range, and returns them by partition. Call `close` at the end.

    Args:
        layout: It has levels of fields, an event time, or an order of rows.
        memory_bytes: Keep about this many bytes of rows in memory, and others in a temporary file.
    """

    def __init__(self, layout: Layout, memory_bytes: int) -> None:
        self._layout = layout
        self._memory_bytes = memory_bytes
        self._dropped = layout.dropped_columns
        self._names = partition_columns(layout).names
        self._in_memory: dict[Values, list[Any]] = {}
        self._bytes = 0
        self._spilled: dict[Values, list[int]] = {}  # numbers of batches
        self._batches = 0
        self._stack = ExitStack()
        self._file: Any = None
        self._writer: Any = None

    def add(self, table: Any) -> None:
        """Add rows.

        Raises:
            LayoutError: There are too many partitions.
            OSError: The temporary file cannot be written.
        """
        for values, rows in split(table, self._layout):
            self._in_memory.setdefault(values, []).append(rows.drop_columns(self._dropped))
        if len(self._in_memory.keys() | self._spilled.keys()) > MAX_PARTITIONS:
            raise LayoutError(
                f"a range has more than {MAX_PARTITIONS:,} partitions by {', '.join(self._names)}, and each is a file: "
                "choose fields with fewer values for --partition-by, and another folder"
            )
        self._bytes += table.nbytes
        if self._bytes > self._memory_bytes:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            temporary = tempfile.NamedTemporaryFile(prefix="trio-nsq-partitions-")  # noqa: SIM115 (closed by `close`)
            self._file = self._stack.enter_context(temporary)
        for values, tables in self._in_memory.items():
            (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
            if self._writer is None:
                self._writer = pa.ipc.new_file(self._file, batch.schema)
            self._writer.write_batch(batch)
            self._spilled.setdefault(values, []).append(self._batches)
            self._batches += 1
        self._in_memory, self._bytes = {}, 0

    def parts(self) -> Iterator[tuple[str, Iterator[Any]]]:
        """Yield the folder of each partition, and its rows as tables, in the order of the layout or of the messages."""
        reader: Any = None
        if self._writer is not None:
            self._writer.close()
            self._file.flush()
            reader = pa.ipc.open_file(self._stack.enter_context(pa.memory_map(self._file.name)))
        for values in list(dict.fromkeys([*self._spilled, *self._in_memory])):
            rows = self._rows(values, reader)
            yield (
                _folder(self._names, values),
                sorted_rows(rows, self._layout) if self._layout.sort_by else rows,
            )

    def _rows(self, values: Values, reader: Any) -> Iterator[Any]:
        for number in self._spilled.get(values, ()):
            yield pa.Table.from_batches([reader.get_batch(number)])
        yield from self._in_memory.get(values, ())

    def close(self) -> None:
        """Remove the temporary file."""
        if self._writer is not None:
            self._writer.close()
        self._in_memory.clear()
        self._stack.close()


def split(table: Any, layout: Layout) -> Iterator[tuple[Values, Any]]:
    """Yield the values of each partition of a table, and its rows, in their order."""
    if not len(table):
        return
    levels = [each for level in _levels_of(layout) for each in _level_texts(table, layout, level)]
    if not levels:
        yield (), table
        return
    codes: Any = None
    for texts in levels:
        encoded = texts.dictionary_encode()
        others = len(encoded.dictionary)
        indices = pc.fill_null(encoded.indices.cast(pa.int64()), others)
        codes = indices if codes is None else pc.add(pc.multiply(codes, others + 1), indices)
    order = pc.sort_indices(codes)  # stable
    rows, start = table.take(order), 0
    for run in pc.value_counts(codes.take(order)).to_pylist():
        first = order[start].as_py()
        yield tuple(texts[first].as_py() for texts in levels), rows.slice(start, run["counts"])
        start += run["counts"]


def _levels_of(layout: Layout) -> Sequence[str]:
    if layout.levels or layout.partition is PartitionBy.NONE:
        return layout.levels
    return [layout.partition]


def _level_texts(table: Any, layout: Layout, level: str) -> Sequence[Any]:
    """Return the values of the folders of a level, as text: one array, and of `hour` that of the date, too."""
    if level == layout.partition:
        times = _times(_column(table, layout.time_column))
        dates = times.cast(pa.date32(), safe=False).cast(pa.string())
        if level == PartitionBy.DATE:
            return [dates]
        return [dates, pc.utf8_lpad(pc.hour(times).cast(pa.string()), 2, "0")]
    found = parse_level(level)
    return [transformed(_column(table, layout.column_of(found.field).name), found)]


def _times(values: Any) -> Any:
    if pa.types.is_timestamp(values.type) and values.type.unit == "ns":
        values = pc.floor_temporal(values, unit="microsecond")  # a cast rounds times before 1970 up
    return values.cast(pa.timestamp("us"), safe=False)


def transformed(values: Any, level: Level) -> Any:
    """Return the values of the folders of a level for those of its column, as an Arrow array of text.

    Each kind of transform is Iceberg's. For `bucket`, the package mmh3 must be installed, see `check_levels`.
    """
    match level.transform:
        case Transform.BUCKET:
            encoded = values.dictionary_encode()
            buckets = [_bucket(value, level.size) for value in encoded.dictionary.to_pylist()]
            return pa.array(buckets, pa.string()).take(encoded.indices)
        case Transform.TRUNCATE if pa.types.is_string(values.type):
            return pc.utf8_slice_codeunits(values, 0, level.size)
        case Transform.TRUNCATE:
            encoded = values.dictionary_encode()
            rounded = [str(value - value % level.size) for value in encoded.dictionary.to_pylist()]
            return pa.array(rounded, pa.string()).take(encoded.indices)
        case Transform.YEAR | Transform.MONTH | Transform.DAY | Transform.HOUR:
            days = _times(values).cast(pa.date32(), safe=False).cast(pa.string())
            if level.transform is Transform.HOUR:
                hours = pc.utf8_lpad(pc.hour(_times(values)).cast(pa.string()), 2, "0")
                return pc.binary_join_element_wise(days, hours, "-")
            return pc.utf8_slice_codeunits(days, 0, _DATE_CHARS[level.transform])
    return values.cast(pa.string())


def _bucket(value: Any, buckets: int) -> str:
    import mmh3

    if isinstance(value, date):
        value = (value - date(1970, 1, 1)).days
    data = value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True)
    return str((mmh3.hash(data) & _MAX_INT32) % buckets)


def _column(table: Any, name: str) -> Any:
    found = table[name].combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) and found.num_chunks == 1 else found


# ---------------------------------------------------------------------- columns and names of folders


def with_partition_columns(layout: Layout, event_time_type: ColumnType) -> Layout:
    """Return the layout with columns for the fields of its partitions and its key, before its columns have names.

    Args:
        event_time_type: The type of the event time, unless it was given with the columns.

    Raises:
        LayoutError: A field is not among the columns that were given, or has a type that cannot be used.
    """
    for level in layout.field_levels:
        is_time = level.transform.is_of_time
        column = _column_for(layout, level.field, JsonType.TIMESTAMP if is_time else JsonType.STRING, _OPTION)
        if is_time:
            column = _time_column(column, JsonType.TIMESTAMP, str(level), level.transform)
        elif column.type not in (types := _TYPES - _NOT_TRANSFORMED.get(level.transform, frozenset())):
            raise LayoutError(
                f"the field {level.field} has the type {column.type}, and {_OPTION} {_shown(level)}takes "
                f"{', '.join(sorted(types))}: give its type with --columns, or choose another field"
            )
        layout = _with_column(layout, column)
    for field in layout.key:
        column = _column_for(layout, field, JsonType.STRING, "--key")
        if column.type not in _TYPES:
            raise LayoutError(
                f"the field {field} has the type {column.type}, and --key takes {', '.join(sorted(_TYPES))}: give its "
                "type with --columns, or choose another field"
            )
        layout = _with_column(layout, column)
    if layout.operation:
        column = _column_for(layout, layout.operation, JsonType.STRING, "--op")
        if column.type is not JsonType.STRING:
            raise LayoutError(
                f"the field {layout.operation} has the type {column.type}, and --op takes a string: choose "
                "another field"
            )
        layout = _with_column(layout, column)
    if layout.event_time:
        column = _column_for(layout, layout.event_time, event_time_type, "--event-time")
        layout = _with_column(layout, _time_column(column, event_time_type, "--event-time"))
    return layout


def _shown(level: Level) -> str:
    return f"{level} " if level.suffix else ""


def _time_column(
    column: JsonColumn, kind: ColumnType, what: str, transform: Transform = Transform.HOUR
) -> JsonColumn:
    """Return the column of times; `kind` is its type if it was inferred. Raises LayoutError: it has no times."""
    if column.widens:  # it was inferred, perhaps as a string or a number
        column = replace(column, type=kind)
    is_date = column.type is JsonType.DATE and transform is not Transform.HOUR
    if not isinstance(column.type, TimeType) and column.type is not JsonType.TIMESTAMP and not is_date:
        raise LayoutError(
            f"the field {column.field} has the type {column.type}, and {what} takes times: timestamp, or timestamp(ms) "
            "for numbers of milliseconds"
        )
    return column


def _column_for(layout: Layout, field: str, kind: ColumnType, option: str) -> JsonColumn:
    for column in layout.json_columns:
        if column.field == field:
            return column
    names = ", ".join(each.field for each in layout.json_columns[:_SHOWN_FIELDS])
    if layout.body_schema is not None and field not in dict(layout.body_schema.columns()):
        raise LayoutError(f"{option} needs the field {field}, which the schema lacks; its fields are {names}")
    if not layout.keep_rest:
        raise LayoutError(f"{option} needs the field {field}, which is not among --columns: add it")
    if option in _OF_KEYS:  # no message would have a key
        raise LayoutError(
            f"{option} needs the field {field}, which neither the schema nor a message of the sample has; there are "
            f"{names}. Correct the name, or add the field to --columns or to the schema"
        )
    return JsonColumn(field, kind, "")


def _with_column(layout: Layout, column: JsonColumn) -> Layout:
    """Return the layout with a column that does not widen: folders that are there could not follow."""
    column = replace(column, widens=False)
    if all(each.field != column.field for each in layout.json_columns):
        return replace(layout, json_columns=(*layout.json_columns, column))
    columns = (column if each.field == column.field else each for each in layout.json_columns)
    return replace(layout, json_columns=tuple(columns))


def partition_columns(layout: Layout) -> Any:
    """Return the columns of the partition folders, outermost first, as an Arrow schema."""
    fields = []
    for text in _levels_of(layout):
        if text == layout.partition:
            fields.append(pa.field("date", pa.date32()))
            fields += [pa.field("hour", pa.int32())] if text == PartitionBy.HOUR else []
            continue
        level = parse_level(text)
        kind = _KINDS.get(level.transform) or arrow_type(layout.column_of(level.field).type)
        fields.append(pa.field(layout.level_name(level), kind))
    return pa.schema(fields)


def check_levels(layout: Layout) -> None:
    """Check the names of the columns that name folders. Raises LayoutError."""
    names: set[str] = set()
    for level in layout.field_levels:
        name, field = layout.level_name(level), level.field
        if name.casefold() in names:
            raise LayoutError(
                f"--partition-by has two levels with the folders {name}=, for readers that ignore case: leave out one "
                "of them"
            )
        names.add(name.casefold())
        if level.transform is Transform.BUCKET and importlib.util.find_spec("mmh3") is None:
            raise LayoutError(f"--partition-by {level} needs mmh3, which is not installed: pip install mmh3")
        if name[:1] in ("_", "."):
            raise LayoutError(
                f"--partition-by cannot have the field {field}: Spark and pyarrow ignore folders whose names begin "
                f"with {name[0]}, so they would not see the rows. Choose another field"
            )
        if _size_of(_escape(name)) > _MAX_LEVEL_BYTES:
            raise LayoutError(
                f"--partition-by cannot have the field {field[:50]}...: its name is too long for folders. Choose "
                "another field"
            )


def fits_folder(name: str, text: str) -> bool:
    """Whether a folder can have the name of a column and this value, so that readers see it again.

    Otherwise the value does not fit its column.
    """
    return (
        0 < _size_of(text) <= _MAX_VALUE_BYTES
        and _size_of(f"{_escape(name)}={_escape(text)}") <= _MAX_FOLDER_BYTES
        and text != _NULL
        and "\0" not in text
    )


def values_in(name: str) -> dict[str, str | None]:
    """Return the values in the names of the folders of a file, by column; None for null."""
    parts = (part.partition("=") for part in name.split("/")[:-1])
    return {
        unquote(column): None if value == _NULL else unquote(value)
        for column, equals, value in parts
        if equals
    }


def _folder(names: Sequence[str], values: Values) -> str:
    return "".join(
        f"{_escape(name)}={_NULL if value is None else _escape(value)}/"
        for name, value in zip(names, values, strict=True)
    )


def _size_of(text: str) -> int:
    """Return the length in bytes; of a lone surrogate too, which its column refuses later."""
    return len(text.encode(errors="surrogatepass"))


def _escape(text: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in text)
