"""The files of Iceberg tables: the partitions in which exports have written them, and their order.

pyiceberg finds the partition of a file by the bounds of its columns, and so not for buckets: these are in the names of
the folders.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import TableProperties, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.typedef import Record

from ..export import levels
from ..export.layout import Layout
from ..export.levels import Level
from ..export.partitions import values_in
from ..export.sorting import order_columns

_READERS = 16
_BY_TIME: Sequence[tuple[levels.Transform, Transform[Any, Any]]] = (
    (levels.Transform.HOUR, HourTransform()),
    (levels.Transform.DAY, DayTransform()),
    (levels.Transform.MONTH, MonthTransform()),
    (levels.Transform.YEAR, YearTransform()),
)
"""The transforms of times, the finest first: a file of one hour is of one day, too."""


class TableTransform(NamedTuple):
    """A transform of a column that all rows of a file have in common; `folder` is the name of the folders."""

    column: str
    transform: Transform[Any, Any]
    folder: str


def transform_of(level: Level) -> Transform[Any, Any]:
    """Return the transform of a table for a level of folders."""
    match level.transform:
        case levels.Transform.BUCKET:
            return BucketTransform(level.size)
        case levels.Transform.TRUNCATE:
            return TruncateTransform(level.size)
        case levels.Transform.IDENTITY:
            return IdentityTransform()
    return next(found for kind, found in _BY_TIME if kind is level.transform)


def transforms_of(layout: Layout) -> list[TableTransform]:
    """Return the transforms that all rows of a file have in common."""
    return list(_transforms(layout))


def _transforms(layout: Layout) -> Iterator[TableTransform]:
    for level in layout.field_levels:
        column, folder = layout.column_of(level.field).name, layout.level_name(level)
        kinds = [kind for kind, _ in _BY_TIME]
        if level.transform in kinds:
            for _, coarser in _BY_TIME[kinds.index(level.transform) :]:
                yield TableTransform(column, coarser, folder)
        else:
            yield TableTransform(column, transform_of(level), folder)


def sort_order(schema: Schema, layout: Layout) -> SortOrder:
    """Return the order of the rows in each file, for a new table."""
    fields = [
        SortField(
            source_id=schema.find_field(name).field_id,
            transform=IdentityTransform(),
            direction=SortDirection.DESC if is_descending else SortDirection.ASC,
            null_order=NullOrder.NULLS_LAST,
        )
        for name, is_descending in order_columns(layout)
    ]
    return SortOrder(*fields)


def add_files(
    change: Transaction,
    io: FileIO,
    uris: Sequence[str],
    layout: Layout,
    snapshot_properties: Mapping[str, str],
) -> None:
    """Add files in a transaction. It is not checked whether the table has them already."""
    if not _buckets(change.table_metadata, layout):
        change.add_files(list(uris), dict(snapshot_properties), check_duplicate_files=False)
        return
    metadata = change.table_metadata
    if metadata.name_mapping() is None:
        mapping = metadata.schema().name_mapping.model_dump_json()
        change.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
    with ThreadPoolExecutor(_READERS) as readers:
        files = list(readers.map(lambda uri: data_file(io, metadata, uri, layout), uris))
    update = change.update_snapshot(snapshot_properties=dict(snapshot_properties))
    merges = metadata.properties.get(TableProperties.MANIFEST_MERGE_ENABLED, "false") == "true"
    with update.merge_append() if merges else update.fast_append() as append:
        for file in files:
            append.append_data_file(file)


def data_file(io: FileIO, metadata: TableMetadata, uri: str, layout: Layout) -> DataFile:
    """Return the entry of a file for a table, with its partition and the statistics of its columns."""
    if not (buckets := _buckets(metadata, layout)):
        return parquet_file_to_data_file(io, metadata, uri)
    spec = metadata.spec()
    others = PartitionSpec(
        *(field for field in spec.fields if field.field_id not in buckets), spec_id=spec.spec_id
    )
    file = parquet_file_to_data_file(io, metadata.model_copy(update={"partition_specs": [others]}), uri)
    folders, found = values_in(uri), iter([file.partition[at] for at in range(len(others.fields))])
    values: list[Any] = []
    for field in spec.fields:
        if field.field_id in buckets:
            text = folders[buckets[field.field_id]]
            values.append(None if text is None else int(text))
        else:
            values.append(next(found))
    file[3] = Record(*values)
    return file


def _buckets(metadata: TableMetadata, layout: Layout) -> dict[int, str]:
    """Return the partitions of a table that are buckets, each with the name of the folders that have its values."""
    names = {(each.column, str(each.transform)): each.folder for each in transforms_of(layout)}
    return {
        field.field_id: names[str(metadata.schema().find_column_name(field.source_id)), str(field.transform)]
        for field in metadata.spec().fields
        if isinstance(field.transform, BucketTransform)
    }
