"""Iceberg tables of exports: files are added where the export wrote them.

The number of the last commit of an export is a property of the table, which is set in the transaction that adds the
files: snapshots, which have it too, expire. A transaction is based on a snapshot that was read before, and fails if
another writer has added one: a repetition reads the number again.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyiceberg import exceptions, types
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import BooleanExpression
from pyiceberg.expressions.parser import parse
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table as LoadedTable
from pyiceberg.table import Transaction
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import (
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    YearTransform,
)

from ...storage import Storage
from ..export.columns import schema_of
from ..export.layout import Layout, PartitionBy
from ..export.levels import parse_level
from .catalogs import explained, file_options, load
from .columns import TableColumn
from .compaction import TableFile
from .iceberg_expiry import expire, history
from .iceberg_files import add_files, data_file, sort_order, transform_of, transforms_of
from .iceberg_types import can_promote, column_type, shown_type
from .locations import table_location
from .table import KEY, Table, key_of
from .target import TableError, TableKind, TableOptions, TableTarget

_TRANSFORMS: dict[str, tuple[str, Transform[Any, Any]]] = {
    PartitionBy.DATE: ("_day", DayTransform()),
    PartitionBy.HOUR: ("_hour", HourTransform()),
}
"""The partitions of a table by level: the end of their name, and their values."""
_PROPERTIES = {
    # Each commit writes a manifest and a file of metadata; without these both become many.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Properties of tables that are created here."""
_NAME_MAPPING = "schema.name-mapping.default"
_RETRIES = "commit.retry.num-retries"
_ONLY_BOUNDS_OF_TS = {"write.metadata.metrics.default": "counts", "write.metadata.metrics.column.ts": "full"}


class IcebergExportTable(Table):
    """An Iceberg table, see `Table`. The constructor loads the catalog."""

    _place = "table"

    def __init__(
        self, target: TableTarget, storage: Storage, topic: str, export_id: str, options: TableOptions
    ) -> None:
        super().__init__(storage, topic, options)
        self.shown: str = f"the Iceberg table {target.catalog}/{target.name}"
        self._folder = table_location(TableKind.ICEBERG, storage, self.shown)
        self._name = target.name
        self._catalog_name = target.catalog
        self._catalog = load(target.catalog, storage)
        self._loaded_with = file_options(storage)  # a catalog keeps its keys, and they may expire
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

    def _is_kept(self, number: int) -> bool:
        assert self._table is not None
        # A rollback is seen also after it: the snapshots that it undid may expire before those that are current.
        line = history(self._table)
        for each in line:
            if (found := self._number_of(each)) is not None:
                return found >= number
        is_whole = bool(line) and line[-1].sequence_number == 1  # pyiceberg forgets parents that expire
        return not is_whole and all(
            self._number_of(each) != number for each in self._table.metadata.snapshots
        )

    def _number_of(self, snapshot: Snapshot) -> int | None:
        """Return the number of the commit of this export that made a snapshot."""
        text = snapshot.summary.additional_properties.get(self._property) if snapshot.summary else None
        return None if text is None else int(text)

    # ------------------------------------------------------------------ columns

    @property
    def _is_there(self) -> bool:
        return self._table is not None

    def _columns(self) -> list[TableColumn]:
        assert self._table is not None
        schema = self._table.schema()
        names = {field.field_id: field.name for field in schema.fields}
        found = [
            TableColumn(field.name, shown_type(field.field_type), field.required) for field in schema.fields
        ]
        # Of fields in structs, as filters name them: a column with a dot in its name would be ambiguous.
        nested = set(schema.column_names) - set(names.values())
        found += [TableColumn(name, "that of a field of a struct") for name in nested]
        mapping = self._table.name_mapping()
        for mapped in mapping.root if mapping is not None else ():
            if (now := names.get(mapped.field_id or 0)) is not None:
                kind = shown_type(schema.find_type(mapped.field_id or 0))
                found += [
                    TableColumn(name, kind, now=now) for name in mapped.names if name not in names.values()
                ]
        return found

    def _key(self) -> str | None:
        assert self._table is not None
        return self._table.properties.get(KEY)

    def _schema(self, layout: Layout) -> Any:
        return schema_of(layout)

    def _type_name(self, field: Any) -> str:
        return shown_type(column_type(field))

    def _widens(self, one: str, other: str) -> bool:
        return can_promote(one, other)

    def _check_partitions(self, layout: Layout) -> None:
        table = self._table
        assert table is not None
        fine: tuple[Transform[Any, Any], ...] = {
            PartitionBy.NONE: (),
            PartitionBy.DATE: (DayTransform(), MonthTransform(), YearTransform()),
            PartitionBy.HOUR: (HourTransform(), DayTransform(), MonthTransform(), YearTransform()),
        }[layout.partition]
        alike = {"topic", "broker"}
        if layout.keeps_levels:
            alike |= {layout.level_name(level) for level in layout.field_levels if not level.suffix}
        of_levels = transforms_of(layout)
        for field in table.spec().fields:
            column = table.schema().find_column_name(field.source_id)
            if (column == layout.time_column and field.transform in fine) or (
                column in alike and field.transform == IdentityTransform()
            ):
                continue
            if any(each.column == column and field.transform == each.transform for each in of_levels):
                continue
            raise TableError(
                f"{self.shown} is partitioned by {field.transform} of {column}, and the files by {_levels_of(layout)}: "
                "choose another --partition-by or another table"
            )

    # ------------------------------------------------------------------ changes

    def _created(self, layout: Layout) -> LoadedTable:
        """Return the table, which is created if it is missing."""
        with explained(self.shown, "created"):
            table = self._table or self._create(layout)
        table.metadata.properties[_RETRIES] = "0"
        return table

    def _reserve(self, layout: Layout) -> None:
        table = self._created(layout)
        missing, wider = _missing(table, layout), self._names().wider(schema_of(layout))
        properties = _key_property(layout)
        if properties.items() <= table.properties.items():
            properties = {}
        if not (missing or wider or properties):
            return

        def reserve(change: Transaction) -> None:
            _change_columns(change, missing, wider)
            if properties:
                change.set_properties(properties)

        self._change(table, reserve)

    def _append(
        self, number: int, names: Sequence[str], layout: Layout, replaced: Sequence[TableFile] = ()
    ) -> None:
        table = self._created(layout)
        missing = _missing(table, layout)
        wider = self._names().wider(schema_of(layout))
        properties = {self._property: str(number)}

        def append(change: Transaction) -> None:
            _change_columns(change, missing, wider)
            change.set_properties(properties | _key_property(layout))
            if layout.key:
                if (
                    change.table_metadata.name_mapping() is None
                ):  # as `add_files` does: files have no ids of columns
                    names_of = change.table_metadata.schema().name_mapping
                    change.set_properties({_NAME_MAPPING: names_of.model_dump_json()})
                self._exchange(
                    change, table, replaced, names, properties | {"qcli.topic": self._topic}, layout
                )
                return
            # Not checked for files that are there already: the number says so, also after a compaction.
            add_files(
                change,
                table.io,
                [self._uri(name) for name in names],
                layout,
                properties | {"qcli.topic": self._topic},
            )

        self._change(table, append)

    def _change(self, table: LoadedTable, change: Callable[[Transaction], None]) -> None:
        """Apply a change in one transaction."""
        with explained(self.shown, "changed"):
            try:
                with table.transaction() as transaction:
                    change(transaction)
            except OverflowError:
                # A file of an older version has times outside the years 1 to 9999, which pyiceberg cannot have as
                # bounds. In this copy of the properties only:
                table.metadata.properties.update(_ONLY_BOUNDS_OF_TS)
                with table.transaction() as transaction:
                    change(transaction)

    def _create(self, layout: Layout) -> LoadedTable:
        columns = enumerate(schema_of(layout), 1)
        fields = [
            types.NestedField(number, column.name, column_type(column), required=not column.nullable)
            for number, column in columns
        ]
        schema = Schema(*fields)
        spec = PartitionSpec(
            *(
                PartitionField(schema.find_field(column).field_id, number, transform, name)
                for number, (column, transform, name) in enumerate(_partitions_of(layout), 1000)
            )
        )
        namespace = self._name.rpartition(".")[0]
        if not self._catalog.namespace_exists(namespace):
            try:
                self._catalog.create_namespace(namespace)
            except Exception:  # of the catalog's own kind; another writer may have created it
                if not self._catalog.namespace_exists(namespace):
                    raise
        return self._catalog.create_table(
            self._name,
            schema,
            self._folder,
            partition_spec=spec,
            sort_order=sort_order(schema, layout),
            properties=_PROPERTIES | _key_property(layout),
        )

    def _uri(self, name: str) -> str:
        return f"{self._folder}/{name}"

    # ------------------------------------------------------------------ compaction

    def _files(self) -> tuple[list[TableFile], int]:
        if self._table is None:
            return [], 0
        with explained(self.shown, "read"):
            found = list(self._table.scan().plan_files())
        files = [
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
        return files, len(found) - len(files)

    def _replace(self, old: Sequence[TableFile], new: str, layout: Layout) -> None:
        table = self._table
        assert table is not None

        properties = {"qcli.topic": self._topic, "qcli.compacted": str(len(old))}
        self._change(table, lambda change: self._exchange(change, table, old, [new], properties, layout))

    def _exchange(
        self,
        change: Transaction,
        table: LoadedTable,
        old: Sequence[TableFile],
        new: Sequence[str],
        properties: dict[str, str],
        layout: Layout,
    ) -> None:
        """Remove files and add others, in one snapshot; there is a snapshot also if there are none."""
        update = change.update_snapshot(snapshot_properties=properties)
        files: Any = update.overwrite() if old else update.merge_append()
        with files:
            if old:
                # Selects the manifests to read.
                files.delete_by_predicate(_times_of(table, [file.entry for file in old]))
            for file in old:
                files.delete_data_file(file.entry)
            for name in new:
                files.append_data_file(data_file(table.io, change.table_metadata, self._uri(name), layout))

    def _expire(self) -> None:
        """Expire old snapshots, and remove the files that only they need."""
        if self._table is None:
            return
        there = _snapshot_ids(self._table)
        try:
            with explained(self.shown, "changed"):
                expire(self._table, datetime.now(UTC) - _retention(self._table))
        except TableError:
            self._load()
            if self._table is not None and there <= _snapshot_ids(self._table):
                raise
            # Another program has expired snapshots meanwhile. The next compaction expires the others.


def _key_property(layout: Layout) -> dict[str, str]:
    return {KEY: key_of(layout)} if layout.key else {}


def _levels_of(layout: Layout) -> str:
    return ", ".join(layout.levels or [layout.partition])


def _partitions_of(layout: Layout) -> Iterator[tuple[str, Transform[Any, Any], str]]:
    """Yield the column, the transform and the name of each partition of a new table."""
    for level in layout.levels or [layout.partition]:
        if level == layout.partition and level in _TRANSFORMS:
            end, transform = _TRANSFORMS[level]
            yield layout.time_column, transform, f"{layout.time_column}{end}"
        elif level != PartitionBy.NONE:
            found = parse_level(level)
            yield layout.column_of(found.field).name, transform_of(found), layout.level_name(found)


def _missing(table: LoadedTable, layout: Layout) -> list[Any]:
    """Return the columns of a layout that a table does not have."""
    there = {field.name for field in table.schema().fields}
    return [column for column in schema_of(layout) if column.name not in there]


def _change_columns(change: Transaction, missing: Sequence[Any], wider: Sequence[Any]) -> None:
    if missing or wider:
        with change.update_schema() as update:
            # As paths: a dot in a name would separate fields.
            for column in missing:
                update.add_column((column.name,), column_type(column))
            for column in wider:
                kind = column_type(column)
                assert isinstance(kind, types.PrimitiveType)
                update.update_column((column.name,), kind)


def _times_of(table: LoadedTable, files: Sequence[Any]) -> BooleanExpression:
    """Return a condition that holds for all rows of these files."""
    number, kind = table.schema().find_field("ts").field_id, types.TimestamptzType()
    low: Any = min(from_bytes(kind, file.lower_bounds[number]) for file in files)
    high: Any = max(from_bytes(kind, file.upper_bounds[number]) for file in files)
    return parse(f"ts >= '{_iso(low)}' AND ts <= '{_iso(high)}'")


def _iso(micros: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).isoformat()


def _snapshot_ids(table: LoadedTable) -> set[int]:
    return {each.snapshot_id for each in table.metadata.snapshots}


def _retention(table: LoadedTable) -> timedelta:
    """Return how long the table keeps snapshots; by Iceberg's default 5 days."""
    return timedelta(
        milliseconds=int(table.properties.get("history.expire.max-snapshot-age-ms", 5 * 86_400_000))
    )
