"""Widen columns of JSON fields in finished files: longs become doubles.

All files of a folder need the same types: Spark and others refuse a folder with both. So when a field that had whole
numbers has its first fraction, the files that are there are rewritten. Each is replaced at once, under the same name,
and a file that has the new type already is left alone: the work can be interrupted and repeated. See
docs/decisions/0024-types-of-json-columns.md.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...storage import ChangedMeanwhile, Storage, StorageError
from .columns import DICTIONARY_COLUMNS
from .json_values import doubles_of
from .layout import BODY, HEADERS, span_of_file

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
        with _opened(storage, name) as parquet:
            for column in set(columns) - found:
                index = parquet.schema_arrow.get_field_index(column)
                if index >= 0 and pa.types.is_int64(parquet.schema_arrow.field(index).type):
                    groups = range(parquet.num_row_groups)
                    if not all(_fits(parquet, number, index, column) for number in groups):
                        found.add(column)
    return found


def _fits(parquet: Any, group: int, index: int, column: str) -> bool:
    statistics = parquet.metadata.row_group(group).column(index).statistics
    if statistics is not None and statistics.has_min_max and max(-statistics.min, statistics.max) <= _EXACT:
        return True
    try:
        doubles_of(parquet.read_row_group(group, [column]).column(0))
    except ValueError:
        return False
    return True


def check_owner(storage: Storage, name: str, topic: str, broker: str) -> None:
    """Check that a finished file has messages of this topic and broker.

    Raises:
        StorageError, OSError: It has not, or cannot be read.
    """
    with _opened(storage, name) as parquet:
        found = parquet.read_row_group(0, ["topic", "broker"]).slice(0, 1).to_pylist()
    if found != [{"topic": topic, "broker": broker}]:
        there = f"topic {found[0]['topic']} from broker {found[0]['broker']}" if found else "no messages"
        raise StorageError(
            f"the file {storage.url_of(name)} has {there}, and that of {topic} from {broker} would have the same "
            "name: choose another folder"
        )


def widen_file(storage: Storage, name: str, schema: Any) -> bool:
    """Convert the columns of a file that are longs, and doubles in an Arrow schema.

    Another process that has taken over the lease of this one may have converted it further: that stays.

    Returns:
        Whether the file was rewritten; False if it has no such columns.

    Raises:
        StorageError, OSError: The file cannot be read or written.
    """
    while True:
        with _opened(storage, name) as parquet:
            if not _longs_to_widen(parquet, schema):
                return False
        if (found := storage.read(name)) is None:
            raise StorageError(f"the file {storage.url_of(name)} was removed by another process")
        with _reading(storage, name), pq.ParquetFile(pa.BufferReader(found.data)) as parquet:
            data = _widened(parquet, _longs_to_widen(parquet, schema))
        with suppress(ChangedMeanwhile):
            storage.replace(name, data, found.version)
            return True


def _longs_to_widen(parquet: Any, schema: Any) -> list[int]:
    """Return the indexes of the columns of a file that are longs, and doubles in an Arrow schema."""
    if not parquet.num_row_groups:
        return []
    return [
        index
        for index, field in enumerate(parquet.schema_arrow)
        if pa.types.is_int64(field.type)
        and (at := schema.get_field_index(field.name)) >= 0
        and pa.types.is_float64(schema.field(at).type)
    ]


def _widened(parquet: Any, columns: Sequence[int]) -> bytes:
    """Return a file whose columns of these indexes are doubles."""
    there = parquet.schema_arrow
    for index in columns:
        there = there.set(index, there.field(index).with_type(pa.float64()))
    codec = parquet.metadata.row_group(0).column(0).compression
    data = pa.BufferOutputStream()
    with parquet_writer(data, there, "none" if codec == "UNCOMPRESSED" else codec) as writer:
        for number in range(parquet.num_row_groups):
            group = parquet.read_row_group(number)
            for index in columns:
                group = group.set_column(index, there.field(index), doubles_of(group.column(index)))
            writer.write_table(group, row_group_size=max(1, len(group)))
    return bytes(data.getvalue().to_pybytes())


@contextmanager
def _opened(storage: Storage, name: str) -> Iterator[Any]:
    with _reading(storage, name), storage.open_input(name) as file, pq.ParquetFile(file) as parquet:
        yield parquet


@contextmanager
def _reading(storage: Storage, name: str) -> Iterator[None]:
    """Convert errors of pyarrow."""
    try:
        yield
    except (pa.ArrowException, ValueError) as exc:
        raise StorageError(f"the file {storage.url_of(name)} cannot be read: {exc}") from exc
