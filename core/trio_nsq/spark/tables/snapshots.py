"""The files of a version of a table, for programs that read Parquet files."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ...storage import StoredFile, shown_place
from ..places import storage_at
from .locations import table_location
from .target import TableError, TableKind, TableVersion, missing_extra

if TYPE_CHECKING:
    from deltalake import DeltaTable


def version_files(source: str, version: TableVersion) -> tuple[str, list[StoredFile]]:
    """List the files of a version of a table.

    Args:
        source: The place of a Delta table, or `CATALOG/NAMESPACE.TABLE`.

    Returns:
        A folder, and the files in it and below, ordered by name.

    Raises:
        TableError: There is no such table or version, rows of it were deleted without rewriting files, or its files
            do not exist any more.
        TableUnavailable, StorageError: The table cannot be read.
    """
    try:
        is_delta = version.kind is TableKind.DELTA
        shown, folder, names = _delta_files(source, version) if is_delta else _iceberg_files(source, version)
    except ImportError as exc:
        raise missing_extra(version.kind, exc) from exc
    if not names:
        raise TableError(f"{shown} has no files in this version")
    found = storage_at(folder).files()
    there = {each.name: each for each in found} if isinstance(found, list) else {}
    files = [there.get(name) or there.get(unquote(name)) for name in names]
    if None in files:
        missing = names[files.index(None)]
        raise TableError(
            f"the file {missing} of {shown} does not exist any more: the table keeps old versions for a limited time. "
            "Choose a newer version"
        )
    return folder, sorted(each for each in files if each is not None)


def _delta_files(place: str, version: TableVersion) -> tuple[str, str, list[str]]:
    import pyarrow as pa
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    from .delta import delta_options, explained, files_with_deleted_rows

    storage, shown = storage_at(place), f"the Delta table {shown_place(place)}"
    location = table_location(TableKind.DELTA, storage, shown)
    with explained(shown, "read"):
        try:
            table = DeltaTable(location, version=version.number, storage_options=delta_options(storage))
        except TableNotFoundError as exc:
            raise TableError(
                f"{shown_place(place)} is not a Delta table: it has no folder _delta_log"
            ) from exc
        except DeltaError:
            if version.number is None:
                raise
            newest = DeltaTable(location, storage_options=delta_options(storage)).version()
            if version.number <= newest:
                raise
            raise TableError(f"{shown} has no version {version.number}: the newest one is {newest}") from None
        if version.as_of is not None:
            table.load_as_version(_version_at(table, shown, version.as_of))
        if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
            raise TableError(f"{shown} has renamed columns (column mapping), which are not supported")
        if files_with_deleted_rows(table):
            raise TableError(
                f"{shown} has deleted rows (deletion vectors), which are not supported: rewrite its files with "
                "REORG TABLE ... APPLY (PURGE)"
            )
        paths = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
        return shown, place, [unquote(path) for path in paths]  # the log has URLs


def _version_at(table: "DeltaTable", shown: str, as_of: datetime) -> int:
    """Return the version of a time, by the times in the log: deltalake goes by those of files, which copies change.

    Raises:
        TableError: The table had no version at that time.
    """
    times = {each["version"]: each["timestamp"] for each in table.history() if "timestamp" in each}
    found = [number for number, time_ms in times.items() if time_ms <= as_of.timestamp() * 1000]
    if not found:
        oldest = f": the oldest one is {_moment(min(times.values()))}" if times else ""
        raise TableError(f"{shown} has no version of {as_of:%Y-%m-%dT%H:%M:%SZ}{oldest}")
    return int(max(found))


def _iceberg_files(source: str, version: TableVersion) -> tuple[str, str, list[str]]:
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    from .catalogs import explained, load

    shown, (catalog, _, name) = f"the Iceberg table {source}", source.partition("/")
    loaded = load(catalog)
    with explained(shown, "read"):
        try:
            table = loaded.load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError) as exc:
            raise TableError(f"there is no Iceberg table {source}") from exc
        number = version.number
        if version.as_of_ns is not None:
            found = table.snapshot_as_of_timestamp(version.as_of_ns // 10**6)
            if found is None:
                raise TableError(f"{shown} has no snapshot of {version.as_of:%Y-%m-%dT%H:%M:%SZ}")
            number = found.snapshot_id
        if number is not None and table.snapshot_by_id(number) is None:
            raise TableError(f"{shown} has no snapshot {number}")
        tasks: list[Any] = list(table.scan(snapshot_id=number).plan_files())
    if any(task.delete_files for task in tasks):
        raise TableError(
            f"{shown} has deleted rows (delete files), which are not supported: rewrite its data files"
        )
    folder, names = _common_folder(task.file.file_path for task in tasks)
    return shown, folder, names


def _common_folder(uris: Iterable[str]) -> tuple[str, list[str]]:
    """Return the folder that has all of these files below it, without folders of partitions, and their names in it."""
    # Spark writes `file:/tmp`, and others `file:///tmp`.
    paths = [re.sub("^file:/+", "/", uri).split("/") for uri in uris]
    if not paths:
        return "", []
    folder = list(takewhile(lambda part: "=" not in part, paths[0][:-1]))
    for path in paths:
        same = 0
        while same < len(folder) and folder[same] == path[same]:
            same += 1
        folder = folder[:same]
    return "/".join(folder), ["/".join(path[len(folder) :]) for path in paths]


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
