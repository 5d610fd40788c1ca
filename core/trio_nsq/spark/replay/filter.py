"""Select rows by a condition in DuckDB's SQL. It is evaluated once, when a replay is planned, to one bit per row.

So a replay that is resumed publishes the same rows, even if the condition has `random()` or `now()`. pyarrow reads the
rows, only the columns of the condition. `spark_filter` does the same with Spark.
"""

import resource
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from ...protocol.limits import MIB
from ...storage import Storage
from ..places import storage_at
from ..runtime.engine import Advance
from ..runtime.processes import ProcessDied, ProcessEngine
from ..sql_conditions import FilterError, as_text, open_condition, rows_of
from .files import ReplayFile, ReplayFiles, is_bytes
from .rows import as_binary, open_parquet, read_row_group

CHUNK_BYTES = 16 * MIB
"""The approximate size of the values that DuckDB gets at a time."""
_MAX_DATA_BYTES = 4 * 1024 * MIB
"""The most memory of a process that evaluates a condition."""
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class FilterTask:
    """A `Task` that selects rows in a process of its own, see `select_rows`.

    Attributes:
        memory_bytes: The most memory that the process gets.
    """

    files: ReplayFiles
    condition: str
    memory_bytes: int = _MAX_DATA_BYTES
    messages: int = 0

    def run(self, advance: Advance | None = None) -> dict[str, bytes]:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = self.memory_bytes if most == resource.RLIM_INFINITY else min(self.memory_bytes, most)
        with suppress(OSError, ValueError):  # a system without this limit
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
        try:
            return select_rows(self.files, self.condition)
        except MemoryError as exc:
            raise FilterError("--where cannot be used: it needs too much memory") from exc


def select_rows_apart(files: ReplayFiles, condition: str) -> dict[str, bytes]:
    """Select rows in a process of its own; see `select_rows`.

    So Ctrl-C ends a condition that never ends, and a condition cannot take all memory: DuckDB does not count that of
    all functions, and does not look at signals while a function runs.

    Raises:
        FilterError: Also if the process was killed.
    """
    found: list[dict[str, bytes]] = []
    try:
        with ProcessEngine(1) as engine:
            engine([FilterTask(files, condition)], found.append, lambda messages, size: None)
    except ProcessDied as exc:
        raise FilterError(f"--where cannot be used: {exc}") from exc
    return found[0]


def select_rows(files: ReplayFiles, condition: str) -> dict[str, bytes]:
    """Select rows.

    Args:
        condition: A condition as in WHERE. It can use the columns of the files and of Hive-style folders. Binary
            columns are text; bytes that are not UTF-8 are U+FFFD.

    Returns:
        For each file with selected rows, a bitmap of all its rows, least significant bit first.

    Raises:
        FilterError: The condition is invalid, or its evaluation failed.
        ReplayFileError, StorageError: A file cannot be read.
    """
    storage = storage_at(files.place)
    with open_condition(condition) as where:
        folders = partition_columns(files)
        where.known = frozenset(name for file in files.files for name in file.names).union(*folders)
        wanted = {name.lower() for name in where.known if where.used is None or name.lower() in where.used}
        found = {}
        for file, values in zip(files.files, folders, strict=True):
            parts = [where.matches(rows) for rows in _read(storage, file, wanted, values)]
            bits = pa.concat_arrays(parts) if parts else pa.array([], pa.bool_())
            if pc.any(bits).as_py():
                found[file.stamp.name] = bytes(bits.buffers()[1])[: (len(bits) + 7) // 8]
    return found


def _read(storage: Storage, file: ReplayFile, wanted: Set[str], folders: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the rows of a file as tables with the columns of the condition.

    Columns that only other files have are null.

    Args:
        wanted: The names of the columns, in lower case: DuckDB does not distinguish the case.
        folders: The values of the file's folders, by name.

    Raises:
        FilterError: Names of columns differ only in case.
    """
    values = {name.lower(): value for name, value in folders.items() if name.lower() in wanted}
    own: dict[str, str] = {}
    for name in sorted(file.names):
        if (key := name.lower()) in wanted and key not in values and own.setdefault(key, name) != name:
            raise FilterError(
                f"--where cannot be used: the columns {own[key]} and {name} of {file.stamp.name} differ only in case"
            )
    nothing = dict.fromkeys(wanted - own.keys() - values.keys(), pa.scalar(None))
    with open_parquet(storage, file.stamp) as parquet:
        for number in range(len(file.groups)):
            for batch in read_row_group(parquet, number, [*own.values()], [*own.values()], CHUNK_BYTES):
                columns = {key: pa.repeat(value, len(batch)) for key, value in (values | nothing).items()}
                columns |= {key: _as_text(batch.column(name)) for key, name in own.items()}
                yield rows_of(columns, len(batch))


def _as_text(column: Any) -> Any:
    """Convert binary values to text; other columns remain as they are."""
    return as_text(as_binary(column)) if is_bytes(column.type) else column


def partition_columns(files: ReplayFiles) -> list[dict[str, Any]]:
    """Return the columns of Hive-style folders, such as `date=2026-11-21/`, as Arrow scalars for each file.

    A column has integers or dates if all its values are, else text, as in Spark.
    """
    texts: list[dict[str, str | None]] = []
    for file in files.files:
        pairs = (part.split("=", 1) for part in file.stamp.name.split("/")[:-1] if "=" in part)
        texts.append(
            {unquote(name): None if value == _NULL_PARTITION else unquote(value) for name, value in pairs}
        )
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in texts for name in each):
        column = pa.array([each.get(name) for each in texts], pa.string())
        for kind in (pa.int64(), pa.date32()):
            try:
                column = column.cast(kind)
                break
            except pa.ArrowInvalid:
                continue
        columns[name] = column
    return [{name: column[index] for name, column in columns.items()} for index in range(len(texts))]
