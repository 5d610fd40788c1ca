"""Iceberg tables of exports: files are added where the export wrote them.

The number of the last commit of an export is a property of the table, which is set in the transaction that adds the
files: snapshots, which have it too, expire. A transaction is based on a snapshot that was read before, and fails if
another writer has added one: a repetition reads the number again.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyiceberg import exceptions, types
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import BooleanExpression
from pyiceberg.expressions.parser import parse
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table as LoadedTable
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
)

from ..export.columns import schema_of
from ..export.layout import MESSAGE_COLUMNS, Layout, PartitionBy
from ..storage import Storage
from .catalogs import explained, file_options, load, location_of
from .compaction import TableFile
from .iceberg_expiry import expire
from .table import Table
from .target import TableError, TableOptions, TableTarget

_TYPES: dict[Any, types.PrimitiveType] = {
    pa.string(): types.StringType(),
    pa.binary(): types.BinaryType(),
    pa.int32(): types.IntegerType(),
    pa.int64(): types.LongType(),
    pa.float64(): types.DoubleType(),
    pa.bool_(): types.BooleanType(),
    pa.timestamp("us", tz="UTC"): types.TimestamptzType(),
}
_TRANSFORMS: dict[PartitionBy, Transform[Any, Any]] = {
    PartitionBy.DATE: DayTransform(),
    PartitionBy.HOUR: HourTransform(),
}
_PROPERTIES = {
    # Each commit writes a manifest and a file of metadata; without these both become many.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Properties of tables that are created here."""
_RETRIES = "commit.retry.num-retries"


class IcebergExportTable(Table):
    """An Iceberg table, see `Table`. The constructor loads the catalog."""

    def __init__(
        self, target: TableTarget, storage: Storage, topic: str, export_id: str, options: TableOptions
    ) -> None:
        super().__init__(storage, topic, options)
        self.shown = f"the Iceberg table {target.catalog}/{target.name}"
        self._name = target.name
        self._catalog_name = target.catalog
        self._catalog = load(target.catalog, storage)
        self._loaded_with = file_options(storage)  # a catalog keeps its keys, and they may expire
        self._folder = location_of(storage)
        self._property = f"qcli.to-parquet.{export_id}"
        self._table: LoadedTable | None = None

    def _load(self) -> None:
        if (options := file_options(self._storage)) != self._loaded_with:
            self._catalog, self._loaded_with = load(self._catalog_name, self._storage), options
        with explained(self.shown, "read"):
            try:
                self._table = self._catalog.load_table(self._name)
            except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError):
                self._table = None
                return
            # In this copy only: pyiceberg would repeat a commit on top of another writer's, whatever its number.
            self._table.metadata.properties[_RETRIES] = "0"

    def _committed(self) -> int:
        return 0 if self._table is None else int(self._table.properties.get(self._property, "0"))

    # ------------------------------------------------------------------ columns

    def _check_layout(self, layout: Layout) -> None:
        if self._table is None:
            return
        self._check_partitions(self._table, layout)
        fields = {field.name: field for field in self._table.schema().fields}
        ours = schema_of(layout)
        for column in ours:
            field = fields.get(column.name)
            if field is None:
                if column.name in MESSAGE_COLUMNS:
                    raise TableError(
                        f"{self.shown} has no column {column.name}: it is not a table of exports. Choose another table"
                    )
                continue
            if field.field_type != _TYPES[column.type]:
                raise TableError(
                    f"the column {column.name} of {self.shown} has type {field.field_type}, and that of the files "
                    f"{_TYPES[column.type]}: choose another table"
                )
            if column.nullable and field.required:
                raise TableError(
                    f"the column {column.name} of {self.shown} cannot be null, and that of the files can"
                )
        for field in fields.values():
            if field.required and field.name not in ours.names:
                raise TableError(
                    f"{self.shown} requires the column {field.name}, which the files do not have"
                )

    def _check_partitions(self, table: LoadedTable, layout: Layout) -> None:
        """Check that each file is in one partition. Raises TableError."""
        fine: tuple[Transform[Any, Any], ...] = {
            PartitionBy.NONE: (),
            PartitionBy.DATE: (DayTransform(), MonthTransform(), YearTransform()),
            PartitionBy.HOUR: (HourTransform(), DayTransform(), MonthTransform(), YearTransform()),
        }[layout.partition]
        for field in table.spec().fields:
            column = table.schema().find_column_name(field.source_id)
            if (column == "ts" and field.transform in fine) or (
                column in ("topic", "broker") and field.transform == IdentityTransform()
            ):
                continue
            raise TableError(
                f"{self.shown} is partitioned by {field.transform} of {column}, and the files by {layout.partition}: "
                "choose another --partition-by or another table"
            )

    # ------------------------------------------------------------------ changes

    def _append(self, number: int, names: Sequence[str], layout: Layout) -> None:
        ours = schema_of(layout)
        with explained(self.shown, "created"):
            table = self._table or self._create(layout)
        table.metadata.properties[_RETRIES] = "0"
        there = table.schema().column_names
        properties = {self._property: str(number)}
        with explained(self.shown, "changed"), table.transaction() as change:
            if any(name not in there for name in ours.names):
                with change.update_schema() as update:
                    for column in ours:
                        if column.name not in there:
                            update.add_column(column.name, _TYPES[column.type])
            change.set_properties(properties)
            # Not checked for files that are there already: the number says so, also after a compaction.
            change.add_files(
                [self._uri(name) for name in names],
                snapshot_properties=properties | {"qcli.topic": self._topic},
                check_duplicate_files=False,
            )

    def _create(self, layout: Layout) -> LoadedTable:
        columns = enumerate(schema_of(layout), 1)
        fields = [
            types.NestedField(number, column.name, _TYPES[column.type], required=not column.nullable)
            for number, column in columns
        ]
        schema = Schema(*fields)
        spec = PartitionSpec()
        if layout.partition in _TRANSFORMS:
            transform = _TRANSFORMS[layout.partition]
            name = "ts_hour" if layout.partition is PartitionBy.HOUR else "ts_day"
            spec = PartitionSpec(PartitionField(schema.find_field("ts").field_id, 1000, transform, name))
        namespace = self._name.rpartition(".")[0]
        if not self._catalog.namespace_exists(namespace):
            try:
                self._catalog.create_namespace(namespace)
            except Exception:  # of the catalog's own kind; another writer may have created it
                if not self._catalog.namespace_exists(namespace):
                    raise
        return self._catalog.create_table(
            self._name, schema, self._folder, partition_spec=spec, properties=_PROPERTIES
        )

    def _uri(self, name: str) -> str:
        return f"{self._folder}/{name}"

    # ------------------------------------------------------------------ compaction

    def _files(self) -> list[TableFile]:
        if self._table is None:
            return []
        with explained(self.shown, "read"):
            found = list(self._table.scan().plan_files())
        return [
            TableFile(
                each.file.file_path.removeprefix(f"{self._folder}/"),
                each.file.file_size_in_bytes,
                each.file.record_count,
                str(each.file.partition),
                each.file,
            )
            for each in found
            if each.file.file_path.startswith(f"{self._folder}/")
            # A file with deleted rows stays as it is, and so does one of older partitions of the table.
            and not each.delete_files
            and each.file.spec_id == self._table.spec().spec_id
        ]

    def _replace(self, old: Sequence[TableFile], new: str) -> None:
        table = self._table
        assert table is not None
        with explained(self.shown, "changed"), table.transaction() as change:
            added = parquet_file_to_data_file(table.io, change.table_metadata, self._uri(new))
            properties = {"qcli.topic": self._topic, "qcli.compacted": str(len(old))}
            with change.update_snapshot(snapshot_properties=properties).overwrite() as files:
                for file in old:
                    files.delete_data_file(file.entry)
                files.append_data_file(added)
                # Selects the manifests to read.
                files.delete_by_predicate(_times_of(table, [*(file.entry for file in old), added]))

    def _expire(self) -> None:
        """Expire old snapshots, and remove the files that only they need."""
        if self._table is not None:
            with explained(self.shown, "changed"):
                expire(self._table, datetime.now(UTC) - _retention(self._table))


def _times_of(table: LoadedTable, files: Sequence[Any]) -> BooleanExpression:
    """Return a condition that holds for all rows of these files."""
    number, kind = table.schema().find_field("ts").field_id, types.TimestamptzType()
    low: Any = min(from_bytes(kind, file.lower_bounds[number]) for file in files)
    high: Any = max(from_bytes(kind, file.upper_bounds[number]) for file in files)
    return parse(f"ts >= '{_iso(low)}' AND ts <= '{_iso(high)}'")


def _iso(micros: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).isoformat()


def _retention(table: LoadedTable) -> timedelta:
    """Return how long the table keeps snapshots; by Iceberg's default 5 days."""
    return timedelta(
        milliseconds=int(table.properties.get("history.expire.max-snapshot-age-ms", 5 * 86_400_000))
    )
