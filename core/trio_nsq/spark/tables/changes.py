"""The changes of a commit to a table with a key: the newest message of each key, and which of two messages is newer.

Of one log, the message with the greater sequence is newer. Of different logs, it is the one that was published later;
of two at the same nanosecond, that of the greater topic and broker. See docs/decisions/0062-upserts.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...storage import Storage
from ..export.layout import Layout
from ..export.operations import DELETES
from ..export.partitions import values_in
from ..export.widening import opened_parquet
from ..schemas.arrow_types import arrow_type

_KINDS = {"topic": pa.string(), "broker": pa.string(), "seq": pa.int64(), "ts_ns": pa.int64()}
VERSION = tuple(_KINDS)
"""The columns that say which of two messages is newer."""
DELETED, FILE, ROW = "deleted", "file", "row"
_REDUCE_ROWS = 200_000
"""So many messages of one or several files are read before those that are not the newest of their key are forgotten."""
_NEW = "_new"


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of some files of messages.

    Attributes:
        newest: The newest message of each key: `k0`, `k1`..., the columns of `VERSION`, `DELETED`, and its place: the
            index of its file and of its row there.
        keyless: The places of the messages without a key. Each is a row of the table.
        messages: The number of messages with a key.
    """

    newest: Any
    keyless: Any
    messages: int


def key_names(count: int) -> list[str]:
    """Return the names of the columns of a key in tables of this module."""
    return [f"k{number}" for number in range(count)]


def read_changes(storage: Storage, names: Sequence[str], layout: Layout) -> Changes:
    """Read the changes in files of messages. Needs memory for one row group, and for each key of the files.

    Raises:
        StorageError, OSError: A file cannot be read.
    """
    keys = key_names(len(layout.key))
    newest: list[Any] = []
    keyless: list[Any] = []
    waiting = messages = 0
    for number, name in enumerate(names):
        for found in keyed_rows(storage, name, layout):
            found = found.append_column(FILE, pa.repeat(pa.scalar(number, pa.int32()), len(found)))
            has_key = _all(pc.is_valid(found[key]) for key in keys)
            keyless.append(found.filter(pc.invert(has_key)).select([FILE, ROW]))
            found = found.filter(has_key)
            newest.append(found)
            messages += len(found)
            waiting += len(found)
            if waiting >= max(_REDUCE_ROWS, len(newest[0])):
                newest, waiting = [_newest_of_logs(pa.concat_tables(newest), keys)], 0
    if not newest:
        return Changes(
            _no_rows(layout), pa.table({FILE: pa.array([], pa.int32()), ROW: pa.array([], pa.int64())}), 0
        )
    reduced = pa.concat_tables(newest)
    if waiting:
        reduced = _newest_of_logs(reduced, keys)
    if len(pc.unique(reduced["broker"])) > 1:
        reduced = _last(reduced, keys, ["ts_ns", "topic", "broker"])
    return Changes(reduced, pa.concat_tables(keyless), messages)


def _no_rows(layout: Layout) -> Any:
    kinds = [arrow_type(layout.column_of(field).type) for field in layout.key]
    fields = [pa.field(name, kind) for name, kind in zip(key_names(len(kinds)), kinds, strict=True)]
    places = [(DELETED, pa.bool_()), (ROW, pa.int64()), (FILE, pa.int32())]
    return pa.schema([*fields, *_KINDS.items(), *places]).empty_table()


def _newest_of_logs(rows: Any, keys: Sequence[str]) -> Any:
    """Return the newest message of each key and log."""
    return _last(rows, [*keys, "topic", "broker"], ["seq"])


def _last(rows: Any, keys: Sequence[str], order: Sequence[str]) -> Any:
    """Return the last row of each key by an order."""
    rows = rows.sort_by([(name, "ascending") for name in order]).append_column("i", pa.arange(0, len(rows)))
    last = rows.select([*keys, "i"]).group_by(list(keys)).aggregate([("i", "max")])["i_max"]
    return rows.take(last).drop_columns(["i"])


def keyed_rows(
    storage: Storage, name: str, layout: Layout, bounds: Mapping[str, tuple[Any, Any]] | None = None
) -> Iterator[Any]:
    """Yield what is known of the rows of a file: keys, versions, `DELETED` and `ROW`; a table for each row group.

    Args:
        name: The name of the file; values that are only in the names of its folders are taken from there.
        bounds: The least and the greatest key by its column in these tables. Row groups without a key between them are
            left out. None: all row groups.

    Raises:
        StorageError, OSError: The file cannot be read.
    """
    in_folders = values_in(name)
    fields = [layout.column_of(field) for field in layout.key]
    operation = layout.column_of(layout.operation).name if layout.operation else None
    first = 0
    with opened_parquet(storage, name) as parquet:
        there = set(parquet.schema_arrow.names)
        wanted = {*(column.name for column in fields), *VERSION, *([operation] if operation else ())}
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            if bounds is None or all(
                _may_have(parquet.metadata.row_group(group), column.name, *bounds[key])
                for key, column in zip(key_names(len(fields)), fields, strict=True)
            ):
                rows = parquet.read_row_group(group, sorted(wanted & there))

                def column_of(column: str, kind: Any, rows: Any = rows) -> Any:
                    if column in rows.column_names:
                        return rows[column].cast(kind)
                    return pa.repeat(pa.scalar(in_folders.get(column), pa.string()), len(rows)).cast(kind)

                deletes = column_of(operation, pa.string()) if operation else pa.nulls(count, pa.string())
                yield pa.table(
                    {
                        **{
                            key: column_of(column.name, arrow_type(column.type))
                            for key, column in zip(key_names(len(fields)), fields, strict=True)
                        },
                        **{each: column_of(each, _KINDS[each]) for each in VERSION},
                        DELETED: pc.is_in(pc.utf8_lower(deletes), value_set=pa.array(sorted(DELETES))),
                        ROW: pa.arange(first, first + count),
                    }
                )
            first += count


def _may_have(group: Any, column: str, least: Any, greatest: Any) -> bool:
    """Whether a row group may have a value between two others in a column; also if nothing says that it has not."""
    # Statistics are those of leaves: `a.b` may be a column, and also a field of the struct `a`.
    leaves = [group.column(number) for number in range(group.num_columns)]
    found = [leaf.statistics for leaf in leaves if leaf.path_in_schema == column]
    bounds = found[0] if len(found) == 1 else None
    if bounds is None or not bounds.has_min_max or type(bounds.min) is not type(least):
        return True
    return bool(bounds.min <= greatest and least <= bounds.max)


def bounds_of(changes: Any, keys: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return the least and the greatest value of each column of a key."""
    found = {}
    for key in keys:
        bounds = pc.min_max(changes[key]).as_py()
        found[key] = bounds["min"], bounds["max"]
    return found


class Compared(NamedTuple):
    """How some rows compare with the newest messages of their keys.

    Attributes:
        replaced: The `ROW` of those of which the message is newer.
        by: The index of that message, for each of them.
        outdated: The indexes of messages that are not newer than a row of their key.
    """

    replaced: Any
    by: Any
    outdated: Any


def compare(there: Any, newest: Any, keys: Sequence[str]) -> Compared:
    """Compare rows with the newest messages of their keys.

    Args:
        there: Rows with keys, versions and `ROW`.
        newest: See `Changes`.
    """
    new = newest.select([*keys, *VERSION]).append_column(ROW, pa.arange(0, len(newest)))
    pairs = there.select([*keys, *VERSION, ROW]).join(new, list(keys), join_type="inner", right_suffix=_NEW)
    log, log_new = (("topic", "broker"), (f"topic{_NEW}", f"broker{_NEW}"))
    is_same = pc.and_(*(pc.equal(pairs[one], pairs[other]) for one, other in zip(log, log_new, strict=True)))
    by_time = _is_greater(pairs, ["ts_ns", *log])
    is_newer = pc.if_else(is_same, pc.greater(pairs[f"seq{_NEW}"], pairs["seq"]), by_time)
    is_newer = pc.fill_null(is_newer, True)  # another program has written a row without a version
    newer, older = pairs.filter(is_newer), pairs.filter(pc.invert(is_newer))
    return Compared(newer[ROW], newer[f"{ROW}{_NEW}"], older[f"{ROW}{_NEW}"])


def _is_greater(pairs: Any, names: Sequence[str]) -> Any:
    """Whether the new values of these columns are greater, as tuples."""
    found: Any = None
    for name in reversed(names):
        greater = pc.greater(pairs[f"{name}{_NEW}"], pairs[name])
        same = pc.equal(pairs[f"{name}{_NEW}"], pairs[name])
        found = greater if found is None else pc.or_(greater, pc.and_(same, found))
    return found


def _all(conditions: Iterator[Any]) -> Any:
    found = next(conditions)
    for each in conditions:
        found = pc.and_(found, each)
    return found
