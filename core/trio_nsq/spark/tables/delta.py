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

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from ..export.columns import schema_of
from ..export.layout import MESSAGE_COLUMNS, Layout, PartitionBy
from ..storage import ObjectStorage, Storage, local_path
from .compaction import TableFile
from .parquet_stats import delta_stats
from .table import Table
from .target import TableBusy, TableError, TableOptions, TableUnavailable

_PARTITIONS = {
    PartitionBy.NONE: [],
    PartitionBy.DATE: [pa.field("date", pa.date32())],
    PartitionBy.HOUR: [pa.field("date", pa.date32()), pa.field("hour", pa.int32())],
}
_LIMITS = {"timeout": "30s", "connect_timeout": "10s", "max_retries": "5", "retry_timeout": "30s"}
"""How long deltalake waits for an object store."""
_CAUSE = re.compile(r"^\s*(\x1b\[\d+m|↳)*")
"""What deltalake writes before a cause: an arrow in colour."""
_FOOTER_READERS = 8
"""How many footers are read concurrently; most of the time is waiting."""


class DeltaExportTable(Table):
    """A Delta table, see `Table`."""

    def __init__(self, storage: Storage, topic: str, export_id: str, options: TableOptions) -> None:
        super().__init__(storage, topic, options)
        self.shown = f"the Delta table {storage.shown}"
        self._url = storage.url_of("").rstrip("/")
        if local_path(self._url) is not None and (escape := re.search("%[0-9A-Fa-f]{2}", self._url)):
            raise TableError(
                f"{self.shown} cannot be used: deltalake would write to another folder, because it decodes "
                f"{escape.group()} in the path. Choose another folder"
            )
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

    # ------------------------------------------------------------------ columns

    def _check_layout(self, layout: Layout) -> None:
        if self._table is None:
            return
        wanted = [field.name for field in _PARTITIONS[layout.partition]]
        if (there := self._table.metadata().partition_columns) != wanted:
            raise TableError(
                f"{self.shown} is partitioned by {', '.join(there) or 'nothing'}, and the files by "
                f"{', '.join(wanted) or 'nothing'}: choose another --partition-by or another folder"
            )
        fields = {field.name: field for field in self._table.schema().fields}
        ours = Schema.from_arrow(_table_schema(layout)).fields
        for field in ours:
            if field.name not in fields and field.name in (*MESSAGE_COLUMNS, *wanted):
                raise TableError(
                    f"{self.shown} has no column {field.name}: it is not a table of exports. Choose another folder"
                )
            if field.name in fields and fields[field.name].type != field.type:
                raise TableError(
                    f"the column {field.name} of {self.shown} has type {_name(fields[field.name].type)}, and that of "
                    f"the files {_name(field.type)}: choose another folder"
                )
            if field.name in fields and field.nullable and not fields[field.name].nullable:
                raise TableError(
                    f"the column {field.name} of {self.shown} cannot be null, and that of the files can"
                )
        names = {field.name for field in ours}
        for field in fields.values():
            if field.name not in names and not field.nullable:
                raise TableError(
                    f"{self.shown} requires the column {field.name}, which the files do not have"
                )

    def _add_columns(self, table: DeltaTable, layout: Layout) -> None:
        """Add columns in a transaction of their own: it may be repeated, and older files have null in them."""
        there = {field.name for field in table.schema().fields}
        new = [field for field in Schema.from_arrow(_table_schema(layout)).fields if field.name not in there]
        if new:
            with explained(self.shown, "changed"):
                table.alter.add_columns(new, commit_properties=CommitProperties(max_commit_retries=0))
            self._load()

    # ------------------------------------------------------------------ changes

    def _append(self, number: int, names: Sequence[str], layout: Layout) -> None:
        now_ms = int(time.time() * 1000)
        with ThreadPoolExecutor(_FOOTER_READERS) as readers:
            adds: list[Any] = list(readers.map(lambda name: self._add(name, now_ms, data_change=True), names))
        properties = CommitProperties(
            app_transactions=[Transaction(self._app_id, number)],
            custom_metadata={"topic": self._topic},
            max_commit_retries=0,
        )
        partition_by = [field.name for field in _PARTITIONS[layout.partition]]
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
        self._add_columns(self._table, layout)
        self._write(adds, partition_by, properties)

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

    # ------------------------------------------------------------------ compaction

    def _files(self) -> list[TableFile]:
        if self._table is None:
            return []
        with explained(self.shown, "read"):
            found = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return [
            TableFile(each["path"], each["size_bytes"], each["num_records"], each["path"].rpartition("/")[0])
            for each in found
            if each["num_records"] is not None
        ]

    def _replace(self, old: Sequence[TableFile], new: str) -> None:
        assert self._table is not None
        now_ms = int(time.time() * 1000)
        actions: list[Any] = [self._add(new, now_ms, data_change=False)]
        actions += [
            RemoveAction(file.name, False, now_ms, file.size_bytes, _partition_values(file.name))
            for file in old
        ]
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
        if is_new and "already exists" in str(exc):
            raise TableBusy(f"{shown} cannot be {what}: another writer creates it") from exc
        raise TableError(f"{shown} cannot be {what}: {_reason(exc)}") from exc
    except OSError as exc:
        raise TableUnavailable(f"{shown} cannot be {what}: {_reason(exc)}") from exc


def delta_options(storage: Storage) -> dict[str, str]:
    """Return deltalake's options to open a table in a storage; they may have secrets."""
    return {**_LIMITS, **storage.access.options()} if isinstance(storage, ObjectStorage) else {}


def _table_schema(layout: Layout) -> Any:
    """Return the Arrow schema of the table: the columns of the files, and those of partitions."""
    return pa.schema([*schema_of(layout), *_PARTITIONS[layout.partition]])


def _partition_values(name: str) -> dict[str, str | None]:
    """Return the values of the partition columns for a file, from its folders."""
    found: dict[str, str | None] = {}
    for part in name.split("/")[:-1]:
        key, _, value = part.partition("=")
        found[key] = str(int(value)) if key == "hour" else value
    return found


def _name(kind: Any) -> str:
    return json.loads(kind.to_json()) if hasattr(kind, "to_json") else str(kind)


def _reason(error: Exception) -> str:
    """Return what an error says: its first line, and the last of its causes, which deltalake lists below it."""
    first, *causes = [
        line for each in str(error).splitlines() if (line := _CAUSE.sub("", each).strip().rstrip("."))
    ] or [type(error).__name__]
    return f"{first}: {causes[-1]}" if causes else first
