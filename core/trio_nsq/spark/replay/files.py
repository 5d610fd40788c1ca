"""The Parquet files of a replay: find them, read their footers, and determine the columns to read.

The columns identify the exports of `qcli to-parquet`. Other files need a column of bodies, and one of times if times
are used.
"""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ...protocol.errors import NSQError
from ...storage import Storage, StoredFile, absolute_place, not_utf8, shown_place, split_place
from ..export.layout import HEADERS, MESSAGE_COLUMNS, UNPARSED
from ..places import storage_at
from ..tables.snapshots import version_files
from ..tables.target import TableVersion

BODY, TIME = "body", "ts_ns"
_SUFFIXES = (".parquet", ".pq", ".parq")
_HIDDEN = (".", "_")
_READERS = 8
"""How many footers are read concurrently; most of the time is waiting."""
_NS_PER_UNIT = {"milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}


class ReplayFileError(NSQError):
    """Files cannot be replayed; the text has the file and the reason."""


class RowGroup(NamedTuple):
    """A row group, as described by the footer.

    Attributes:
        body_bytes: The approximate uncompressed size of the bodies.
        first_ns, last_ns: The earliest and the latest time, Unix nanoseconds; None: unknown.
    """

    rows: int
    body_bytes: int
    first_ns: int | None = None
    last_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayFile:
    """A file, as described by its footer.

    Attributes:
        topics: See `ReplayFiles`.
        names: The names of the columns.
    """

    stamp: StoredFile
    groups: tuple[RowGroup, ...]
    topics: frozenset[str]
    names: frozenset[str] = frozenset()

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True, slots=True)
class ReplayColumns:
    """The columns to read.

    Attributes:
        body: The body, binary or string.
        unparsed: The column that replaces a null body; None: no such column.
        time: The publish time: a timestamp, a date, or Unix nanoseconds; None: no such column.
        order: The columns that order rows of the same time; empty: as in the files.
        headers: The headers, a map of strings; None: no such column.
    """

    body: str
    unparsed: str | None = None
    time: str | None = None
    order: tuple[str, ...] = ()
    headers: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayFiles:
    """The files of a replay.

    Attributes:
        place: The folder: an absolute path, or a URI.
        topics: The topics of qcli's exports; empty for other files.
    """

    place: str
    files: tuple[ReplayFile, ...]
    columns: ReplayColumns
    topics: frozenset[str]


def list_files(place: str) -> tuple[str, list[StoredFile]]:
    """List the Parquet files of a folder and its subfolders, or a single file of any name.

    Names that start with a dot or an underscore are ignored, like in Spark and pyarrow.

    Args:
        place: A path, or a URI, see `storage_at`.

    Returns:
        The folder, and the files ordered by name.

    Raises:
        ReplayFileError: There are no files, or they cannot be listed.
        StorageError: The place cannot be used.
    """
    place = absolute_place(place)
    shown = shown_place(place)
    try:
        found = storage_at(place).files()
    except OSError as exc:
        raise ReplayFileError(f"the folder {shown} cannot be read: {exc.strerror or exc}") from exc
    if found is None:
        raise ReplayFileError(f"the folder or file {shown} does not exist")
    if isinstance(found, StoredFile):
        folder, name = split_place(place)
        return folder, [found._replace(name=name)]
    for name in ("", *(each.name for each in found if each.name.lower().endswith(_SUFFIXES))):
        try:
            name.encode()
            place.encode()
        except UnicodeEncodeError:
            raise not_utf8(os.fsencode(f"{place}/{name}".rstrip("/"))) from None
    _refuse_table(shown, found)
    parquet = [each for each in found if each.name.lower().endswith(_SUFFIXES)]
    files = [each for each in parquet if not any(part.startswith(_HIDDEN) for part in each.name.split("/"))]
    if not files:
        hidden = (
            f"; {parquet[0].name} is ignored because of a name that begins with . or _" if parquet else ""
        )
        raise ReplayFileError(f"{shown} has no Parquet files (names that end in .parquet){hidden}")
    return place.rstrip("/") or "/", sorted(files)


def _refuse_table(shown: str, files: Iterable[StoredFile]) -> None:
    """Check that a folder is not that of a table, whose files of older versions have the same rows again."""
    for file in files:
        folder, _, name = file.name.rpartition("/")
        last = folder.rpartition("/")[2]
        if last == "_delta_log":
            kind, option = "a Delta table", "--delta"
        elif last == "metadata" and name.endswith(".metadata.json"):
            kind, option = "an Iceberg table", "--iceberg CATALOG/NAMESPACE.TABLE"
        else:
            continue
        raise ReplayFileError(
            f"{shown} has {kind}, some of whose files may be replaced by others: replay the table, with {option}"
        )


def open_files(
    place: str, body: str | None = None, time: str | None = None, table: TableVersion | None = None
) -> ReplayFiles:
    """Read the footers of files.

    Args:
        place: A folder, or a file; with `table`, see `version_files`.
        body: The column of bodies; None: `body`.
        time: The column of times; None: the one of qcli's exports, none for other files.
        table: Read the files of this version of a table; None: all Parquet files.

    Raises:
        ReplayFileError: The files cannot be replayed.
        TableError: The table cannot be read.
        StorageError: The place cannot be used.
    """
    folder, stamps = list_files(place) if table is None else version_files(place, table)
    storage, shown = storage_at(folder), shown_place(folder)

    def read_footer(stamp: StoredFile) -> tuple[ReplayFile, ReplayColumns]:
        name = stamp.name if len(stamps) > 1 else f"{shown}/{stamp.name}"
        try:
            with storage.open_file(stamp) as file:
                footer = pq.read_metadata(file)
            schema = footer.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as exc:
            raise ReplayFileError(f"the file {name} cannot be read as Parquet: {exc}") from exc
        columns = find_columns(schema, name, body, time)
        own = bool(columns.order)
        topics = _topics(footer) if own else frozenset()
        if own and topics is None:
            topics = frozenset(_read_topics(storage, stamp))
        file = ReplayFile(stamp, _row_groups(footer, columns), topics or frozenset(), frozenset(schema.names))
        return file, columns

    with ThreadPoolExecutor(min(_READERS, len(stamps))) as readers:
        footers = list(readers.map(read_footer, stamps))
    columns = footers[0][1]
    for file, other in footers:
        if (other.time, other.order) != (columns.time, columns.order):
            raise ReplayFileError(
                f"the file {file.stamp.name} has other columns than {footers[0][0].stamp.name}: replay them one after "
                "the other"
            )
    unparsed = next((other.unparsed for _, other in footers if other.unparsed), None)
    files = tuple(file for file, _ in footers)
    topics = frozenset().union(*(file.topics for file in files))
    headers = next((other.headers for _, other in footers if other.headers), None)
    return ReplayFiles(
        folder, files, ReplayColumns(columns.body, unparsed, columns.time, columns.order, headers), topics
    )


# ---------------------------------------------------------------------- columns


def find_columns(schema: Any, name: str, body: str | None, time: str | None) -> ReplayColumns:
    """Determine the columns to read.

    Args:
        name: The file name, for error messages.
        body, time: See `open_files`.

    Raises:
        ReplayFileError: A column does not exist, or has the wrong type.
    """
    own = {"topic", "broker", "seq", "id", TIME} <= set(schema.names)
    wanted = BODY if body is None else body
    if wanted not in schema.names:
        raise ReplayFileError(_no_body(schema, name, wanted, own=own and body is None))
    kind = schema.field(wanted).type
    if not is_bytes(kind):
        raise ReplayFileError(
            f"the column {wanted} of {name} has type {kind}; a body must be binary or a string"
        )
    if time is None and own:
        time = TIME
    if time is not None:
        if time not in schema.names:
            raise ReplayFileError(f"the file {name} has no column {time}; it has {_names(schema.names)}")
        kind = schema.field(time).type
        if not (pa.types.is_timestamp(kind) or pa.types.is_date32(kind) or pa.types.is_int64(kind)):
            raise ReplayFileError(
                f"the column {time} of {name} has type {kind}; a time must be a timestamp, a date, or Unix nanoseconds "
                "as int64"
            )
    unparsed = UNPARSED if own and body is None and UNPARSED in schema.names else None
    order = ("broker", "seq") if own and time == TIME else ()
    has_headers = own and body is None and HEADERS in schema.names and is_map(schema.field(HEADERS).type)
    return ReplayColumns(wanted, unparsed, time, order, HEADERS if has_headers else None)


def is_map(kind: Any) -> bool:
    """Whether an Arrow type is a map from strings to strings."""
    return pa.types.is_map(kind) and is_bytes(kind.key_type) and is_bytes(kind.item_type)


def is_bytes(kind: Any) -> bool:
    """Whether an Arrow type has bytes or strings."""
    if pa.types.is_dictionary(kind):
        return is_bytes(kind.value_type)
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    )


def _no_body(schema: Any, name: str, wanted: str, *, own: bool) -> str:
    candidates = [
        each.name for each in schema if is_bytes(each.type) and each.name not in (*MESSAGE_COLUMNS, UNPARSED)
    ]
    if own:
        return (
            f"the file {name} was written with --json, which splits bodies into columns: there is no column {wanted} "
            "to publish. Choose a column with --body-column, or export the topic with --keep-body"
        )
    there = _names(candidates) if candidates else "none"
    return (
        f"the file {name} has no column {wanted}: choose the column of the bodies with --body-column; possible are: "
        f"{there}"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def times_ns(column: Any) -> Any:
    """Convert a column of times to an int64 Arrow array of Unix nanoseconds; times without a zone are UTC.

    Raises ArrowInvalid if a time is out of range.
    """
    if pa.types.is_int64(column.type):
        return column
    if pa.types.is_date32(column.type):
        column = column.cast(pa.timestamp("s"))
    return column.cast(pa.timestamp("ns", tz=column.type.tz)).cast(pa.int64())


# ---------------------------------------------------------------------- footers


def _row_groups(footer: Any, columns: ReplayColumns) -> tuple[RowGroup, ...]:
    wanted = {columns.body, columns.unparsed} - {None}
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    bodies = [index for index, path in enumerate(paths) if path in wanted]
    time_at = paths.index(columns.time) if columns.time in paths else None
    found = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        size = sum(group.column(index).total_uncompressed_size for index in bodies)
        bounds: tuple[int | None, int | None] = (None, None)
        if time_at is not None:
            bounds = _time_bounds(group.column(time_at).statistics)
        found.append(RowGroup(group.num_rows, size, *bounds))
    return tuple(found)


def _time_bounds(statistics: Any) -> tuple[int | None, int | None]:
    """Return the earliest and the latest time, if there are statistics; rows without a time are not included."""
    if statistics is None or not statistics.has_min_max or statistics.physical_type != "INT64":
        return None, None
    # Raw values, because Python's have no nanoseconds; in the unit of the file, which may differ from Arrow's.
    unit = json.loads(statistics.logical_type.to_json()).get("timeUnit", "nanoseconds")
    factor = _NS_PER_UNIT[unit]
    return statistics.min_raw * factor, statistics.max_raw * factor


def _topics(footer: Any) -> frozenset[str] | None:
    """Return the topics of an export's file; None if the statistics do not determine them."""
    names = [footer.schema.column(index).path for index in range(footer.num_columns)]
    found: set[str] = set()
    for number in range(footer.num_row_groups):
        statistics = footer.row_group(number).column(names.index("topic")).statistics
        if statistics is None or not statistics.has_min_max or statistics.min != statistics.max:
            return None
        found.add(_text(statistics.min))
    return frozenset(found)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _read_topics(storage: Storage, stamp: StoredFile) -> set[str]:
    with storage.open_file(stamp) as file:
        table = pq.ParquetFile(file).read(columns=["topic"])
    return {_text(each) for each in table["topic"].unique().to_pylist() if each is not None}


def select_topics(files: ReplayFiles, topics: Sequence[str]) -> ReplayFiles:
    """Select the files of some topics.

    Args:
        topics: The topics; empty: all files, which must have a single topic.

    Raises:
        ReplayFileError: No topic is given and there are several, a topic does not exist, or a file also has others.
    """
    if not topics:
        if len(files.topics) > 1:
            raise ReplayFileError(
                f"the folder {shown_place(files.place)} has the topics {_names(sorted(files.topics))}: choose with "
                "--from-topic"
            )
        return files
    for topic in topics:
        if topic not in files.topics:
            there = (
                f"it has {_names(sorted(files.topics))}"
                if files.topics
                else "the files are not exports of qcli"
            )
            raise ReplayFileError(
                f"the folder {shown_place(files.place)} has no messages of topic {topic}: {there}"
            )
    wanted = frozenset(topics)
    for file in files.files:
        if file.topics & wanted and file.topics - wanted:
            raise ReplayFileError(
                f"the file {file.stamp.name} has several topics: choose with --where \"topic = '...'\""
            )
    kept = tuple(file for file in files.files if file.topics & wanted)
    return replace(files, files=kept, topics=wanted)
