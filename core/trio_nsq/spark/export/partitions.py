"""Partition folders by fields of JSON bodies, and by their own time: rows of a range are grouped, then written.

The names and the rows of a file depend on the messages of its range only: after a kill, the next attempt may find
some of the files. So the rows of a range are collected first, beyond some size in a temporary file, and then written,
one file after the other. Any number of partitions needs the same memory and one open file.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from ..schemas.arrow_types import arrow_type
from ..schemas.column_types import ColumnType, JsonType, TimeType
from .layout import JsonColumn, Layout, LayoutError, PartitionBy

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
        layout: It has levels of fields, or an event time.
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
        """Yield the folder of each partition, and its rows as tables, in the order of the messages."""
        reader: Any = None
        if self._writer is not None:
            self._writer.close()
            self._file.flush()
            reader = pa.ipc.open_file(self._stack.enter_context(pa.memory_map(self._file.name)))
        for values in list(dict.fromkeys([*self._spilled, *self._in_memory])):
            yield _folder(self._names, values), self._rows(values, reader)

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
    levels = [each for level in layout.levels for each in _level_texts(table, layout, level)]
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


def _level_texts(table: Any, layout: Layout, level: str) -> Sequence[Any]:
    """Return the values of the folders of a level, as text: one array, and of `hour` that of the date, too."""
    if level not in (PartitionBy.DATE, PartitionBy.HOUR):
        return [_column(table, layout.column_of(level).name).cast(pa.string())]
    times = _column(table, layout.time_column).cast(pa.timestamp("us"), safe=False)
    dates = times.cast(pa.date32(), safe=False).cast(pa.string())
    if level == PartitionBy.DATE:
        return [dates]
    return [dates, pc.utf8_lpad(pc.hour(times).cast(pa.string()), 2, "0")]


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
    for option, fields in (("--partition-by", layout.partition_fields), ("--key", layout.key)):
        for field in fields:
            column = _column_for(layout, field, JsonType.STRING, option)
            if column.type not in _TYPES:
                raise LayoutError(
                    f"the field {field} has the type {column.type}, and {option} takes {', '.join(sorted(_TYPES))}: "
                    "give its type with --columns, or choose another field"
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
        if column.widens:  # it was inferred, perhaps as a string or a number
            column = replace(column, type=event_time_type)
        if not isinstance(column.type, TimeType) and column.type is not JsonType.TIMESTAMP:
            raise LayoutError(
                f"the field {layout.event_time} has the type {column.type}, and --event-time takes times: timestamp, "
                "or timestamp(ms) for numbers of milliseconds"
            )
        layout = _with_column(layout, column)
    return layout


def _column_for(layout: Layout, field: str, kind: ColumnType, option: str) -> JsonColumn:
    for column in layout.json_columns:
        if column.field == field:
            return column
    if not layout.keep_rest:
        raise LayoutError(f"{option} needs the field {field}, which is not among --columns: add it")
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
    for level in layout.levels or (layout.partition,):
        if level in (PartitionBy.DATE, PartitionBy.HOUR):
            fields.append(pa.field("date", pa.date32()))
        if level == PartitionBy.HOUR:
            fields.append(pa.field("hour", pa.int32()))
        elif level not in (PartitionBy.NONE, PartitionBy.DATE):
            column = layout.column_of(level)
            fields.append(pa.field(column.name, arrow_type(column.type)))
    return pa.schema(fields)


def check_levels(layout: Layout) -> None:
    """Check the names of the columns that name folders. Raises LayoutError."""
    for field in layout.partition_fields:
        name = layout.column_of(field).name
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
