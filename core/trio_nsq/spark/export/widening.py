"""Widen columns of JSON fields in finished files: longs become doubles.

All files of a folder need the same types: Spark and others refuse a folder with both. So when a field that had whole
numbers has its first fraction, the files that are there are rewritten. Each is replaced at once, under the same name,
and a file that has the new type already is left alone: the work can be interrupted and repeated. See
docs/decisions/0024-types-of-json-columns.md.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..storage import Storage, StorageError
from .columns import DICTIONARY_COLUMNS
from .json_columns import doubles_of
from .layout import BODY, safe_name

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
        write_statistics=[name for name in schema.names if name != BODY],
    )


def exported_files(storage: Storage, topic: str, labels: Iterable[str]) -> list[str]:
    """List the files of messages of a topic from these brokers."""
    prefixes = tuple(f"{safe_name(topic)}-{safe_name(label)}-" for label in labels)
    found = storage.files()
    files = found if isinstance(found, list) else []
    names = (file.name for file in files)
    return sorted(
        name for name in names if name.endswith(".parquet") and name.rpartition("/")[2].startswith(prefixes)
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


def widen_file(storage: Storage, name: str, schema: Any) -> bool:
    """Convert the columns of a file that are longs, and doubles in an Arrow schema.

    Returns:
        Whether the file was rewritten; False if it has no such columns.

    Raises:
        StorageError, OSError: The file cannot be read or written.
    """
    with _opened(storage, name) as parquet:
        there = parquet.schema_arrow
        wider = [
            index
            for index, field in enumerate(there)
            if pa.types.is_int64(field.type)
            and (at := schema.get_field_index(field.name)) >= 0
            and pa.types.is_float64(schema.field(at).type)
        ]
        if not wider or not parquet.num_row_groups:
            return False
        for index in wider:
            there = there.set(index, there.field(index).with_type(pa.float64()))
        codec = parquet.metadata.row_group(0).column(0).compression
        data = pa.BufferOutputStream()
        with parquet_writer(data, there, "none" if codec == "UNCOMPRESSED" else codec) as writer:
            for number in range(parquet.num_row_groups):
                group = parquet.read_row_group(number)
                for index in wider:
                    group = group.set_column(index, there.field(index), doubles_of(group.column(index)))
                writer.write_table(group, row_group_size=max(1, len(group)))
    storage.put(name, data.getvalue().to_pybytes())
    return True


@contextmanager
def _opened(storage: Storage, name: str) -> Iterator[Any]:
    try:
        with storage.open_input(name) as file, pq.ParquetFile(file) as parquet:
            yield parquet
    except (pa.ArrowException, ValueError) as exc:
        raise StorageError(f"the file {storage.url_of(name)} cannot be widened: {exc}") from exc
