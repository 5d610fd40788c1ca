"""Delta tables of exports: the export folder is the table.

The numbers of commits are `txn` actions of Delta's protocol, whose application is the export. Every commit is based on
a version that was read before, and fails if another writer has added one: a repetition reads the numbers again.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from ...storage import ObjectStorage, Storage
from ..export.columns import file_schema
from ..export.layout import Layout
from ..export.partitions import partition_columns, values_in
from .columns import TableColumn
from .compaction import TableFile
from .locations import table_location
from .parquet_stats import delta_stats
from .table import KEY, Table, key_of
from .target import TableBusy, TableError, TableKind, TableOptions, TableUnavailable

_PHYSICAL_NAME = "delta.columnMapping.physicalName"
_CONSTRAINT = "delta.constraints."
_COLUMN_RULES = {
    "delta.generationExpression": "is generated",
    "delta.identity.start": "is an identity column",
    "delta.invariants": "has an invariant",
}
"""What the metadata of a column obliges writers to compute or to check."""
_LIMITS = {"timeout": "30s", "connect_timeout": "10s", "max_retries": "5", "retry_timeout": "30s"}
"""How long deltalake waits for an object store."""
_CAUSE = re.compile(r"^\s*(\x1b\[\d+m|↳)*")
"""What deltalake writes before a cause: an arrow in colour."""
_CREATED = re.compile(r"already exists|Invalid table version")
"""What deltalake says if the first version exists, or the store refuses it because of another request for it."""
_EXPORT, _NUMBER = "qcliExport", "qcliCommit"
"""What the history says about a commit: its export, and its number."""
_FOOTER_READERS = 8
"""How many footers are read concurrently; most of the time is waiting."""


class DeltaExportTable(Table):
    """A Delta table, see `Table`."""

    _place = "folder"

    def __init__(self, storage: Storage, topic: str, export_id: str, options: TableOptions) -> None:
        super().__init__(storage, topic, options)
        self.shown: str = f"the Delta table {storage.shown}"
        self._url = table_location(TableKind.DELTA, storage, self.shown)
        self._app_id = f"qcli-to-parquet-{export_id}"
        self._table: DeltaTable | None = None
        self._opened_with: dict[
            str, str
        ] = {}  # a table keeps the keys that it was opened with, and they may expire

    def _load(self) -> None:
        options = delta_options(self._storage)
        with explained(self.shown, "read"):
            if self._table is not None and options == self._opened_with:
                self._table.update_incremental()
                return
            self._opened_with = options
            try:
                self._table = DeltaTable(self._url, storage_options=options)
            except TableNotFoundError:
                self._table = None

    def _committed(self) -> int:
        return 0 if self._table is None else self._table.transaction_version(self._app_id) or 0

    def _is_kept(self, number: int) -> bool:
        assert self._table is not None
        version = self._table.version()
        at: int | None = version
        while at is not None and (entry := self._commit_info(at)) is not None:
            if entry.get(_EXPORT) == self._app_id:
                return int(entry[_NUMBER]) >= number
            at = _restored_version(entry) if entry.get("operation") == "RESTORE" else at - 1
        # That is the whole history. A RESTORE may have undone a commit.
        while (entry := self._commit_info(version)) is not None:
            if entry.get(_EXPORT) == self._app_id:
                return False
            version -= 1
        return True

    def _commit_info(self, version: int) -> dict[str, Any] | None:
        """Return what the history says about a version; None if there is none, or it is no longer kept.

        deltalake's own `history` stops all threads while it waits for a store, also those that renew the lease.
        """
        found = self._storage.read(f"_delta_log/{version:020d}.json") if version >= 0 else None
        if found is None:
            return None
        actions = map(json.loads, found.data.splitlines())
        return next((action["commitInfo"] for action in actions if "commitInfo" in action), {})

    # ------------------------------------------------------------------ columns

    @property
    def _is_there(self) -> bool:
        return self._table is not None

    @property
    def _takes_columns(self) -> bool:
        return not self._is_mapped

    @property
    def _is_mapped(self) -> bool:
        """Whether columns may have other names in files: they can be renamed and removed. deltalake adds none then."""
        found = {} if self._table is None else self._table.metadata().configuration
        return found.get("delta.columnMapping.mode", "none") != "none"

    def _columns(self) -> list[TableColumn]:
        assert self._table is not None
        found = []
        for field in self._table.schema().fields:
            kind, required = _name(field.type), not field.nullable
            in_files = str(field.metadata.get(_PHYSICAL_NAME, field.name)) if self._is_mapped else field.name
            found.append(TableColumn(field.name, kind, required))
            if in_files != field.name:
                found.append(TableColumn(in_files, kind, required, field.name))
        return found

    def _schema(self, layout: Layout) -> Any:
        return _table_schema(layout)

    def _type_name(self, field: Any) -> str:
        return _name(_delta_fields([field])[0].type)

    def _check_layout(self, layout: Layout) -> None:
        self._check_rules()
        super()._check_layout(layout)

    def _check_rules(self) -> None:
        """Check that the table wants nothing of the values of its writers: files are added as they are."""
        if self._table is None:
            return
        rules = [
            f"{self.shown} has the CHECK constraint {name.removeprefix(_CONSTRAINT)} ({condition})"
            for name, condition in self._table.metadata().configuration.items()
            if name.startswith(_CONSTRAINT)
        ]
        rules += [
            f"the column {field.name} of {self.shown} {what}"
            for field in self._table.schema().fields
            for key, what in _COLUMN_RULES.items()
            if key in field.metadata
        ]
        if rules:
            raise TableError(f"{rules[0]}, which exports cannot apply: remove it, or choose another folder")

    def _check_partitions(self, layout: Layout) -> None:
        assert self._table is not None
        wanted = partition_columns(layout).names
        if (there := self._table.metadata().partition_columns) != wanted:
            raise TableError(
                f"{self.shown} is partitioned by {', '.join(there) or 'nothing'}, and the files by "
                f"{', '.join(wanted) or 'nothing'}: choose another --partition-by or another folder"
            )

    def _reserve(self, layout: Layout) -> None:
        # In a transaction of its own: it may be repeated, and older files have null in them.
        if (table := self._table) is None:
            return
        there = {field.name for field in table.schema().fields}
        # Those that another program has removed too: null in the other files.
        new = [field.with_nullable(True) for field in _table_schema(layout) if field.name not in there]
        if new and self._is_mapped:
            raise TableError(
                f"{self.shown} has no column {new[0].name}, and none can be added to a table with column mapping: "
                "add it with the program that removed it, or choose another folder"
            )
        if (key := key_of(layout)) and self._key() is None:
            with self._own_change("changed"):
                table.alter.set_table_properties(
                    {KEY: key},
                    raise_if_not_exists=False,
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
        if new:
            with self._own_change("changed"):
                fields = _delta_fields(new)
                table.alter.add_columns(fields, commit_properties=CommitProperties(max_commit_retries=0))

    @contextmanager
    def _own_change(self, what: str) -> Iterator[None]:
        """Change the table in a transaction of its own, in the block, and load it.

        Raises TableBusy: another writer has changed it since. What follows is based on the state before the block.
        """
        before = -1 if self._table is None else self._table.version()
        with explained(self.shown, what, is_new=self._table is None):
            yield
        self._load()
        if self._table is None or self._table.version() != before + 1:
            raise TableBusy(f"{self.shown} cannot be {what}: other writers change it all the time")

    def _key(self) -> str | None:
        assert self._table is not None
        return self._table.metadata().configuration.get(KEY)

    # ------------------------------------------------------------------ changes

    def _append(
        self, number: int, names: Sequence[str], layout: Layout, replaced: Sequence[TableFile] = ()
    ) -> None:
        now_ms = int(time.time() * 1000)
        with ThreadPoolExecutor(_FOOTER_READERS) as readers:
            adds: list[Any] = list(readers.map(lambda name: self._add(name, now_ms, data_change=True), names))
        properties = CommitProperties(
            app_transactions=[Transaction(self._app_id, number)],
            custom_metadata={"topic": self._topic, _EXPORT: self._app_id, _NUMBER: str(number)},
            max_commit_retries=0,
        )
        partition_by = partition_columns(layout).names
        if self._table is None and layout.key:
            self._create_with_key(layout)
        if self._table is None:
            with explained(self.shown, "created", is_new=True):
                create_table_with_add_actions(
                    self._url,
                    Schema.from_arrow(_table_schema(layout)),
                    adds,
                    partition_by=partition_by,
                    storage_options=delta_options(self._storage),
                    commit_properties=properties,
                )
            return
        self._reserve(layout)
        removes = [self._remove(file, now_ms, data_change=True) for file in replaced]
        self._write([*adds, *removes], partition_by, properties)

    def _create_with_key(self, layout: Layout) -> None:
        """Create the table without files: the call that creates it with files takes only Delta's own properties."""
        with self._own_change("created"):
            DeltaTable.create(
                self._url,
                Schema.from_arrow(_table_schema(layout)),
                partition_by=partition_columns(layout).names,
                configuration={KEY: key_of(layout)},
                storage_options=delta_options(self._storage),
                raise_if_key_not_exists=False,
            )

    def _write(self, actions: list[Any], partition_by: list[str], properties: CommitProperties) -> None:
        assert self._table is not None
        with explained(self.shown, "changed"):
            self._table.create_write_transaction(
                actions, "append", self._table.schema(), partition_by, commit_properties=properties
            )

    def _add(self, name: str, now_ms: int, *, data_change: bool) -> AddAction:
        """Return the action that adds a file."""
        found = self._storage.file(name)
        if found is None:
            raise TableError(
                f"the file {self._storage.url_of(name)} is missing, and cannot be added to {self.shown}"
            )
        with self._storage.open_file(found) as file:
            stats = delta_stats(pq.read_metadata(file))
        return AddAction(name, found.size_bytes, _partition_values(name), now_ms, data_change, stats)

    def _remove(self, file: TableFile, now_ms: int, *, data_change: bool) -> RemoveAction:
        return RemoveAction(file.name, data_change, now_ms, file.size_bytes, _partition_values(file.name))

    # ------------------------------------------------------------------ compaction

    def _files(self) -> tuple[list[TableFile], int]:
        if self._table is None:
            return [], 0
        with explained(self.shown, "read"):
            found = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
            partly_deleted = files_with_deleted_rows(self._table)
        files = [
            TableFile(
                # The log has URLs: it escapes what the names of folders have escaped.
                name := unquote(each["path"]),
                each["size_bytes"],
                each["num_records"],
                name.rpartition("/")[0],
            )
            for each in found
            if each["num_records"] is not None
            and not any(
                url.endswith(f"/{each['path']}") for url in partly_deleted
            )  # merged, the rows would be back
        ]
        return files, len(found) - len(files)

    def _replace(self, old: Sequence[TableFile], new: str, layout: Layout) -> None:
        assert self._table is not None
        now_ms = int(time.time() * 1000)
        actions: list[Any] = [self._add(new, now_ms, data_change=False)]
        actions += [self._remove(file, now_ms, data_change=False) for file in old]
        properties = CommitProperties(
            custom_metadata={"topic": self._topic, "compacted": len(old)}, max_commit_retries=0
        )
        self._write(actions, self._table.metadata().partition_columns, properties)

    def _expire(self) -> None:
        """Remove replaced files after the table's retention time: a week, unless its properties say otherwise."""
        if self._table is None:
            return
        with explained(self.shown, "changed"):
            if self._table.vacuum(dry_run=True):
                self._table.vacuum(dry_run=False)


@contextmanager
def explained(shown: str, what: str, *, is_new: bool = False) -> Iterator[None]:
    """Convert errors of deltalake.

    Args:
        shown: The table.
        what: What cannot be done with it, such as `read`.
        is_new: Whether the table is created.
    """
    try:
        yield
    except CommitFailedError as exc:
        raise TableBusy(f"{shown} cannot be {what}: other writers change it all the time") from exc
    except (DeltaError, ValueError) as exc:
        if is_new and _CREATED.search(str(exc)):
            raise TableBusy(f"{shown} cannot be {what}: another writer creates it") from exc
        raise TableError(f"{shown} cannot be {what}: {_reason(exc)}") from exc
    except OSError as exc:
        raise TableUnavailable(f"{shown} cannot be {what}: {_reason(exc)}") from exc


def files_with_deleted_rows(table: DeltaTable) -> list[str]:
    """Return the URLs of the files in which another program has marked rows as deleted, by deletion vectors."""
    found = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all()
    return [str(url) for url in found.column("filepath").to_pylist()]


def _restored_version(entry: dict[str, Any]) -> int | None:
    """Return the version that a RESTORE has restored; None if it was given as a time."""
    try:
        return int(entry["operationParameters"]["version"])
    except (KeyError, TypeError, ValueError):
        return None


def delta_options(storage: Storage) -> dict[str, str]:
    """Return deltalake's options to open a table in a storage; they may have secrets."""
    return {**_LIMITS, **storage.access.options()} if isinstance(storage, ObjectStorage) else {}


def _delta_fields(fields: Sequence[Any]) -> list[Any]:
    """Convert columns of files to those of a table. Raises TableError: a table has no such type."""
    for field in fields:
        for kind in _leaves(field.type):
            if pa.types.is_time(kind) or (pa.types.is_timestamp(kind) and kind.unit == "ns"):
                raise TableError(
                    f"a Delta table has no type {kind}, that of the column {field.name}: choose another type, such as "
                    "string or timestamp(us)"
                )
    return Schema.from_arrow(pa.schema(fields)).fields


def _leaves(kind: Any) -> Iterator[Any]:
    """Yield the types without parts that a type has in it."""
    if not kind.num_fields:
        yield kind
    for number in range(kind.num_fields):
        yield from _leaves(kind.field(number).type)


def _table_schema(layout: Layout) -> Any:
    """Return the Arrow schema of the table: the columns of the files, and those of partitions."""
    return pa.schema([*file_schema(layout), *partition_columns(layout)])


def _partition_values(name: str) -> dict[str, str | None]:
    """Return the values of the partition columns for a file, from its folders."""
    found = values_in(name)
    if hour := found.get("hour"):
        found["hour"] = str(int(hour))
    return found


def _name(kind: Any) -> str:
    return str(json.loads(kind.to_json()))


def _reason(error: Exception) -> str:
    """Return what an error says: its first line, and the last of its causes, which deltalake lists below it."""
    first, *causes = [
        line for each in str(error).splitlines() if (line := _CAUSE.sub("", each).strip().rstrip("."))
    ] or [type(error).__name__]
    return f"{first}: {causes[-1]}" if causes else first
