"""The Parquet files of a replay: find them, read their footers, and determine which columns to read.

Our own exports are recognised by their columns. Other files need a column of bodies, and one of times if times matter.
"""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from ...protocol.errors import NSQError
from ..export.layout import MESSAGE_COLUMNS, UNPARSED
from ..storage import arrow_system, local_path, not_utf8

BODY, TIME = "body", "ts_ns"
_SUFFIXES = (".parquet", ".pq", ".parq")
_HIDDEN = (".", "_")
_READERS = 8
"""Footers that are read at once; most of the time is waiting."""
_NS_PER_UNIT = {"milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}


class ReplayFileError(NSQError):
    """Files cannot be replayed; the text says which and why."""


class RowGroup(NamedTuple):
    """A row group, as described by the footer.

    Attributes:
        body_bytes: Uncompressed bytes of the bodies, about.
        first_ns, last_ns: The earliest and the latest time, Unix nanoseconds; None: unknown.
    """

    rows: int
    body_bytes: int
    first_ns: int | None = None
    last_ns: int | None = None


class FileStamp(NamedTuple):
    """The identity of a file, by which a change is detected.

    Attributes:
        name: The name, relative to the folder.
        mtime_ns: The modification time; 0 if the file system has none.
    """

    name: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class ReplayFile:
    """A file, as described by its footer."""

    stamp: FileStamp
    groups: tuple[RowGroup, ...]
    topics: frozenset[str]

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True, slots=True)
class ReplayColumns:
    """The columns to read.

    Attributes:
        body: The body, binary or string.
        unparsed: Replaces a body that is null; None: no column does.
        time: The publish time: a timestamp, a date, or Unix nanoseconds; None: there is none.
        order: The order of rows of the same time; empty: as in the files.
    """

    body: str
    unparsed: str | None = None
    time: str | None = None
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayFiles:
    """The files of a replay.

    Attributes:
        place: The folder: an absolute path, or a URI.
        topics: The topics of our own exports; empty for other files.
    """

    place: str
    files: tuple[ReplayFile, ...]
    columns: ReplayColumns
    topics: frozenset[str]


def list_files(place: str) -> tuple[str, list[FileStamp]]:
    """List the Parquet files of a folder and its subfolders, or a single file of any name.

    Names that begin with a dot or an underscore are ignored, as by Spark and pyarrow.

    Args:
        place: A path, or a URI, see `arrow_system`.

    Returns:
        The folder, and the files ordered by name.

    Raises:
        ReplayFileError: There are no files, or they cannot be listed.
        StorageError: The place cannot be used.
    """
    if (local := local_path(place)) is not None:
        place = str(local.absolute())
    system, path = arrow_system(place)
    path = path.rstrip("/")
    try:
        info = system.get_file_info(path)
        if info.is_file:
            folder, _, name = place.rstrip("/").rpartition("/")
            return folder or "/", [_stamp(info, name)]
        if not info.type == pyarrow.fs.FileType.Directory:
            raise ReplayFileError(f"there is no folder and no file {place}")
        found = system.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
    except OSError as exc:
        raise ReplayFileError(f"the folder {place} cannot be read: {exc.strerror or exc}") from exc
    place = place.rstrip("/")
    try:
        stamps = [
            _stamp(each, each.path.removeprefix(f"{path}/"))
            for each in found
            if each.is_file and each.path.lower().endswith(_SUFFIXES)
        ]
    except UnicodeDecodeError as exc:
        raise not_utf8(exc.object) from exc
    stamps = [each for each in stamps if not any(part.startswith(_HIDDEN) for part in each.name.split("/"))]
    if not stamps:
        raise ReplayFileError(f"in {place} are no Parquet files (names that end in .parquet)")
    return place or "/", sorted(stamps)


def _stamp(info: Any, name: str) -> FileStamp:
    return FileStamp(name, info.size or 0, info.mtime_ns or 0)


def open_files(place: str, body: str | None = None, time: str | None = None) -> ReplayFiles:
    """Read the footers of files.

    Args:
        place: A folder, or a file.
        body: The column of bodies; None: `body`.
        time: The column of times; None: that of our own exports, and none for other files.

    Raises:
        ReplayFileError: The files cannot be replayed.
        StorageError: The place cannot be used.
    """
    folder, stamps = list_files(place)
    system, path = arrow_system(folder)

    def read_footer(stamp: FileStamp) -> tuple[ReplayFile, ReplayColumns]:
        name = stamp.name if len(stamps) > 1 else f"{folder}/{stamp.name}"
        try:
            footer = pq.read_metadata(f"{path}/{stamp.name}", filesystem=system)
            schema = footer.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as exc:
            raise ReplayFileError(f"the file {name} cannot be read as Parquet: {exc}") from exc
        columns = find_columns(schema, name, body, time)
        own = bool(columns.order)
        topics = _topics(footer) if own else frozenset()
        if own and topics is None:
            topics = frozenset(_read_topics(system, f"{path}/{stamp.name}"))
        return ReplayFile(stamp, _row_groups(footer, columns), topics or frozenset()), columns

    with ThreadPoolExecutor(min(_READERS, len(stamps))) as readers:
        footers = list(readers.map(read_footer, stamps))
    columns = footers[0][1]
    for file, other in footers:
        if (other.time, other.order) != (columns.time, columns.order):
            raise ReplayFileError(
                f"the file {file.stamp.name} has other columns than {footers[0][0].stamp.name}: replay one after the "
                "other"
            )
    unparsed = next((other.unparsed for _, other in footers if other.unparsed), None)
    files = tuple(file for file, _ in footers)
    topics = frozenset().union(*(file.topics for file in files))
    return ReplayFiles(
        folder, files, ReplayColumns(columns.body, unparsed, columns.time, columns.order), topics
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
    if not _is_bytes(kind):
        raise ReplayFileError(
            f"the column {wanted} of {name} is of type {kind}: a body is binary or a string"
        )
    if time is None and own:
        time = TIME
    if time is not None:
        if time not in schema.names:
            raise ReplayFileError(f"the file {name} has no column {time}; there are {_names(schema.names)}")
        kind = schema.field(time).type
        if not (pa.types.is_timestamp(kind) or pa.types.is_date32(kind) or pa.types.is_int64(kind)):
            raise ReplayFileError(
                f"the column {time} of {name} is of type {kind}: a time is a timestamp, a date, or Unix nanoseconds "
                "as int64"
            )
    unparsed = UNPARSED if own and body is None and UNPARSED in schema.names else None
    order = ("broker", "seq") if own and time == TIME else ()
    return ReplayColumns(wanted, unparsed, time, order)


def _is_bytes(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_bytes(kind.value_type)
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


def _no_body(schema: Any, name: str, wanted: str, *, own: bool) -> str:
    candidates = [
        each.name for each in schema if _is_bytes(each.type) and each.name not in (*MESSAGE_COLUMNS, UNPARSED)
    ]
    if own:
        return (
            f"the file {name} was written with --json, which takes bodies to pieces: there is no column {wanted} to "
            "publish. Name one of its columns with --body-column, or export the topic without --json"
        )
    there = _names(candidates) if candidates else "none that could be one"
    return (
        f"the file {name} has no column {wanted}: name the one that holds the bodies with --body-column; there are "
        f"{there}"
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def times_ns(column: Any) -> Any:
    """A column of times as an int64 Arrow array of Unix nanoseconds; times without a zone are UTC.

    Raises ArrowInvalid: A time is out of range.
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
    """The earliest and the latest time, if there are statistics; rows without a time are not covered."""
    if statistics is None or not statistics.has_min_max or statistics.physical_type != "INT64":
        return None, None
    # The raw values, as Python's have no nanoseconds, in the unit of the file, which may differ from Arrow's.
    unit = json.loads(statistics.logical_type.to_json()).get("timeUnit", "nanoseconds")
    factor = _NS_PER_UNIT[unit]
    return statistics.min_raw * factor, statistics.max_raw * factor


def _topics(footer: Any) -> frozenset[str] | None:
    """The topics of one of our own files; None: the statistics do not tell."""
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


def _read_topics(system: Any, path: str) -> set[str]:
    table = pq.read_table(path, columns=["topic"], filesystem=system, partitioning=None)
    return {_text(each) for each in table["topic"].unique().to_pylist() if each is not None}


def select_topics(files: ReplayFiles, topics: Sequence[str]) -> ReplayFiles:
    """Select the files of some topics.

    Args:
        topics: The topics; empty: all files, which must have a single topic.

    Raises:
        ReplayFileError: No topic is given and there are several, one does not exist, or a file has others, too.
    """
    if not topics:
        if len(files.topics) > 1:
            raise ReplayFileError(
                f"the folder {files.place} holds the topics {_names(sorted(files.topics))}: say with --from-topic "
                "which of them"
            )
        return files
    for topic in topics:
        if topic not in files.topics:
            there = (
                f"it holds {_names(sorted(files.topics))}"
                if files.topics
                else "these are no exports of qcli's"
            )
            raise ReplayFileError(f"the folder {files.place} holds nothing of topic {topic}: {there}")
    wanted = frozenset(topics)
    for file in files.files:
        if file.topics & wanted and file.topics - wanted:
            raise ReplayFileError(
                f"the file {file.stamp.name} holds several topics: choose with --where \"topic = '...'\""
            )
    kept = tuple(file for file in files.files if file.topics & wanted)
    return replace(files, files=kept, topics=wanted)
