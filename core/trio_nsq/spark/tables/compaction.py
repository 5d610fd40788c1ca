"""Merge the small files of a table: choose them, and write their rows to a larger file.

Only files of about the same size are merged, so each row is rewritten a few times at most, however many rounds an
export has.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ...storage import Storage, StorageError
from ..export.columns import DICTIONARY_COLUMNS
from ..export.layout import merged_name
from .target import TableOptions

LARGE_BYTES = 64 * 1024 * 1024
"""Files of this size and larger ones are not merged."""
_SMALLEST_BYTES = 64 * 1024
"""Smaller files count as files of this size."""
AT_ONCE = 8
"""How many files of about the same size are merged at least; each of their sizes is within this factor."""


class TableFile(NamedTuple):
    """A file of a table.

    Attributes:
        name: The name, relative to the export folder.
        partition: Files with different partitions are not merged.
        entry: What the kind of table needs to remove it.
    """

    name: str
    size_bytes: int
    rows: int
    partition: str
    entry: Any = None


def small_files(files: Sequence[TableFile]) -> Iterator[list[TableFile]]:
    """Choose files to merge: groups of one partition and of about the same size.

    Groups are limited to about the size of a large file. Files are in the order of their names: by broker and sequence.
    """
    groups: dict[tuple[str, int], list[TableFile]] = {}
    for file in sorted(files):
        tier, size = 0, _SMALLEST_BYTES
        while size < file.size_bytes:
            tier, size = tier + 1, size * AT_ONCE
        if file.size_bytes < LARGE_BYTES:
            groups.setdefault((file.partition, tier), []).append(file)
    for group in groups.values():
        if len(group) < AT_ONCE:
            continue
        part: list[TableFile] = []
        for file in group:
            if part and sum(each.size_bytes for each in part) + file.size_bytes > 2 * LARGE_BYTES:
                yield part
                part = []
            part.append(file)
        if len(part) > 1:
            yield part


def merge_files(
    storage: Storage, topic: str, files: Sequence[TableFile], schema: Any, options: TableOptions
) -> str | None:
    """Write the rows of several files to a new file, whose name is determined by theirs.

    A killed run may have written the file before; it is then used.

    Args:
        schema: The columns of the new file; those that a file lacks are null.

    Returns:
        The name of the new file; None: a file has a column that the schema lacks, so they cannot be merged.

    Raises:
        StorageError, OSError: The files cannot be read or written.
    """
    key = hashlib.sha256("\n".join(file.name for file in files).encode()).hexdigest()[:20]
    folder = files[0].name.rpartition("/")[0]
    name = f"{folder}/{merged_name(topic, key)}".lstrip("/")
    rows = sum(file.rows for file in files)
    if storage.size(name) is not None:
        if _rows_in(storage, name) != rows:
            raise StorageError(
                f"the file {storage.url_of(name)} does not have the rows of {files[0].name} and others"
            )
        return name
    new = storage.create(name)
    try:
        with pq.ParquetWriter(
            new,
            schema,
            compression=options.compression,
            compression_level=options.compression_level,
            use_dictionary=DICTIONARY_COLUMNS,
        ) as writer:
            group: list[Any] = []
            for file in files:
                for table in tables_of(storage, file.name, schema):
                    if table is None:
                        new.discard()
                        return None
                    rows -= len(table)
                    group.append(table)
                    if sum(each.nbytes for each in group) >= options.row_group_bytes:
                        write_group(writer, group)
            write_group(writer, group)
        if rows:
            raise StorageError(f"{files[0].name} and others have other numbers of rows than the table says")
        new.publish()
    except BaseException:
        new.discard()
        raise
    return name


def write_group(writer: Any, group: list[Any]) -> None:
    """Write these tables as one row group, and forget them."""
    if group:
        table = pa.concat_tables(group)
        writer.write_table(table, row_group_size=len(table))
        group.clear()


def _rows_in(storage: Storage, name: str) -> int:
    with storage.open_input(name) as file:
        return int(pq.read_metadata(file).num_rows)


def tables_of(storage: Storage, name: str, schema: Any) -> Iterator[Any]:
    """Yield the row groups of a file as tables with this schema; None if the file has other columns."""
    with storage.open_input(name) as file, pq.ParquetFile(file) as parquet:
        there = parquet.schema_arrow
        if any(field.name not in schema.names for field in there):
            yield None
            return
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            columns = [
                table[field.name].cast(field.type)
                if field.name in there.names
                else pa.nulls(len(table), field.type)
                for field in schema
            ]
            yield pa.Table.from_arrays(columns, schema=schema)
