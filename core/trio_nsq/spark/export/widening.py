"""Convert finished files to a later layout: columns get wider types, and new ones get their values from `rest`.

All files of a folder need the same columns: Spark and others refuse a folder with two types of one column, or take the
columns of any of its files for those of all. So when a field that had whole numbers has its first fraction, or a new
field is to have a column, the files that are there are rewritten. Each is replaced at once, under the same name, and a
file that has the layout already is left alone: the work can be interrupted and repeated. See
docs/decisions/0024-types-of-json-columns.md and 0050-schemas-and-contracts.md.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...storage import ChangedMeanwhile, Storage, StorageError
from .columns import DICTIONARY_COLUMNS, schema_of
from .json_values import doubles_of
from .layout import BODY, HEADERS, REST, UNPARSED, JsonColumn, Layout, span_of_file
from .rest_columns import columns_from_rest

_ROWS_AT_ONCE = 20_000
_EXACT = 2**53
"""Doubles have all whole numbers up to this one."""


def parquet_writer(file: Any, schema: Any, codec: str, level: int | None = None) -> Any:
    """Return a writer of a Parquet file with messages. `level` None: the default of the codec."""
    return pq.ParquetWriter(
        file,
        schema,
        compression=codec,
        compression_level=level,
        use_dictionary=DICTIONARY_COLUMNS,
        # Comparing bodies takes 5 % of the time, and queries do not skip row groups by them.
        write_statistics=[name for name in schema.names if name not in (BODY, HEADERS)],
    )


def exported_files(storage: Storage, topic: str, labels: Iterable[str]) -> list[str]:
    """List the files of messages of a topic from these brokers."""
    found, labels = storage.files(), list(labels)
    names = [file.name for file in found] if isinstance(found, list) else []
    return sorted(
        name for name in names if any(span_of_file(name, topic, label) is not None for label in labels)
    )


def columns_too_long(storage: Storage, names: Iterable[str], columns: Collection[str]) -> set[str]:
    """Return those of these columns that have longs in some file that a double does not represent exactly.

    Raises:
        StorageError, OSError: A file cannot be read.
    """
    found: set[str] = set()
    for name in names:
        with opened_parquet(storage, name) as parquet:
            for column in set(columns) - found:
                schema = parquet.schema_arrow
                if column in schema.names and pa.types.is_int64(schema.field(column).type):
                    groups = range(parquet.num_row_groups)
                    if not all(_fits(parquet, number, column) for number in groups):
                        found.add(column)
    return found


def _fits(parquet: Any, group: int, column: str) -> bool:
    """Whether a double represents each long of a column exactly."""
    row_group = parquet.metadata.row_group(group)
    # Statistics are those of leaves: a struct and a map have several, and `a.b` may also be a field of `a`.
    leaves = [row_group.column(number) for number in range(row_group.num_columns)]
    found = [leaf.statistics for leaf in leaves if leaf.path_in_schema == column]
    statistics = found[0] if len(found) == 1 else None
    if statistics is not None and statistics.has_min_max and max(-statistics.min, statistics.max) <= _EXACT:
        return True
    try:
        doubles_of(parquet.read_row_group(group, [column]).column(column))
    except ValueError:
        return False
    return True


def check_owner(storage: Storage, name: str, topic: str, broker: str) -> None:
    """Check that a finished file has messages of this topic and broker.

    Raises:
        StorageError, OSError: It has not, or cannot be read.
    """
    with opened_parquet(storage, name) as parquet:
        found = parquet.read_row_group(0, ["topic", "broker"]).slice(0, 1).to_pylist()
    if found != [{"topic": topic, "broker": broker}]:
        there = f"topic {found[0]['topic']} from broker {found[0]['broker']}" if found else "no messages"
        raise StorageError(
            f"the file {storage.url_of(name)} has {there}, and that of {topic} from {broker} would have the same "
            "name: choose another folder"
        )


def footer_of(storage: Storage, name: str) -> Any:
    """Return the footer of a finished file; equal footers: the same rows. Raises StorageError, OSError."""
    with opened_parquet(storage, name) as parquet:
        return parquet.metadata


def convert_file(storage: Storage, name: str, layout: Layout) -> bool:
    """Give a file the columns of a layout that it lacks, and the wider types.

    Another process that has taken over the lease of this one may have converted it further: that stays.

    Returns:
        Whether the file was rewritten; False if it has all of them.

    Raises:
        StorageError, OSError: The file cannot be read or written.
    """
    while True:
        with opened_parquet(storage, name) as parquet:
            if not parquet.num_row_groups or parquet.schema_arrow == _converted(parquet.schema_arrow, layout):
                return False
        if (found := storage.read(name)) is None:
            raise StorageError(f"the file {storage.url_of(name)} was removed by another process")
        with _reading(storage, name), pq.ParquetFile(pa.BufferReader(found.data)) as parquet:
            data = _rewritten(parquet, layout)
        with suppress(ChangedMeanwhile):
            storage.replace(name, data, found.version)
            return True


def _converted(there: Any, layout: Layout) -> Any:
    """Return the Arrow schema of a file after the conversion."""
    wanted = schema_of(layout)
    for index, field in enumerate(there):
        at = wanted.get_field_index(field.name)
        if at >= 0 and _is_wider(field.type, wanted.field(at).type):
            there = there.set(index, field.with_type(wanted.field(at).type))
    new = [wanted.field(each.name) for each in _lacking(there, layout)]
    place = next((there.names.index(name) for name in (REST, UNPARSED) if name in there.names), len(there))
    for number, field in enumerate(new):
        there = there.insert(place + number, field)
    return there


def _lacking(there: Any, layout: Layout) -> list[JsonColumn]:
    """Return the columns that a file with this Arrow schema should have."""
    dropped = layout.dropped_columns
    return [each for each in layout.json_columns if each.name not in there.names and each.name not in dropped]


def _is_wider(one: Any, other: Any) -> bool:
    """Whether a column of the first Arrow type is converted to the second one."""
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        return bool(one != other and other.scale >= one.scale and other.precision > one.precision)
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        return bool(other.bit_width > one.bit_width)
    return bool(pa.types.is_float64(other) and (pa.types.is_integer(one) or pa.types.is_float32(one)))


def _cast(column: Any, kind: Any) -> Any:
    if pa.types.is_int64(column.type) and pa.types.is_float64(kind):
        return doubles_of(column)
    if pa.types.is_float32(column.type) and pa.types.is_float64(kind):
        column = column.cast(pa.string())  # 0.1 and not 0.10000000149011612
    return column.cast(kind)


def _rewritten(parquet: Any, layout: Layout) -> bytes:
    """Return a file with the columns of a layout."""
    there, wanted = parquet.schema_arrow, _converted(parquet.schema_arrow, layout)
    new = _lacking(there, layout)
    codec = parquet.metadata.row_group(0).column(0).compression
    data = pa.BufferOutputStream()
    with parquet_writer(data, wanted, "none" if codec == "UNCOMPRESSED" else codec) as writer:
        for number in range(parquet.num_row_groups):
            group = parquet.read_row_group(number)
            found = {
                field.name: _cast(group.column(field.name), field.type) if field.name in there.names else None
                for field in wanted
            }
            if new:
                found |= _columns_from_rest(group, new)
                if REST not in there.names:
                    del found[REST]
            columns = [found[name] for name in wanted.names]
            writer.write_table(
                pa.Table.from_arrays(columns, schema=wanted), row_group_size=max(1, len(group))
            )
    return bytes(data.getvalue().to_pybytes())


def _columns_from_rest(group: Any, new: Sequence[JsonColumn]) -> dict[str, Any]:
    """Return new columns of a row group, and its column `rest`; some rows at a time, as JSON needs much memory."""
    parts = []
    for first in range(0, max(1, len(group)), _ROWS_AT_ONCE):
        part = group.slice(first, _ROWS_AT_ONCE)
        rest = part.column(REST).to_pylist() if REST in group.column_names else [None] * len(part)
        parts.append(columns_from_rest(rest, new))
    return {name: pa.chunked_array([part[name] for part in parts]) for name in parts[0]}


@contextmanager
def opened_parquet(storage: Storage, name: str) -> Iterator[Any]:
    """Open a Parquet file. Raises StorageError, OSError: it cannot be read."""
    with _reading(storage, name), storage.open_input(name) as file, pq.ParquetFile(file) as parquet:
        yield parquet


@contextmanager
def _reading(storage: Storage, name: str) -> Iterator[None]:
    """Convert errors of pyarrow."""
    try:
        yield
    except (pa.ArrowException, ValueError) as exc:
        raise StorageError(f"the file {storage.url_of(name)} cannot be read: {exc}") from exc
