"""Reading the rows of Parquet files that are to be published: some row groups of some files, in the order of the
files or in that of time.

Which rows these are is fixed when a replay is planned: by times, and by the rows that a filter of Spark's has chosen.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..storage import arrow_system
from .files import FileStamp, ReplayColumns, ReplayFileError, times_ns

MIB = 1024 * 1024
_CHUNK_BYTES = 4 * MIB
_MAX_CHUNK_ROWS = 20_000
WINDOW_BYTES = 1024 * MIB
"""Of rows that are in memory to be put in order, the most."""

Row = tuple[str, int]
"""A file's name, and a row in it."""


class FileChanged(ReplayFileError):
    """A file is not the one that was planned for."""


class RowGroupRange(NamedTuple):
    """Some row groups of a file, one after the other.

    Attributes:
        stamp: Which file.
        first_group, end_group: Row groups from one on and before another.
        first_row: The first row of these, counted in the file.
        rows: How many.
        wanted: How many of them are to be read, but for what `TimeRange` says besides.
        body_bytes: What the bodies of these are without compression, about.
        selected: Which: `pack_bits` of all rows; None: all.
        first_ns: The time of the earliest one, if that was asked for; else None.
    """

    stamp: FileStamp
    first_group: int
    end_group: int
    first_row: int
    rows: int
    wanted: int
    body_bytes: int
    selected: bytes | None = None
    first_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Which rows are read.

    Attributes:
        first_ns, end_ns: Of times from one on and before another, Unix nanoseconds; None: no bound. Rows without a
            time are outside of any.
    """

    first_ns: int | None = None
    end_ns: int | None = None


class Rows(NamedTuple):
    """Some rows.

    Attributes:
        bodies: One for each; None: it has none.
        times_ns: If they were asked for; else None.
        places: Where each is from.
    """

    bodies: list[bytes | None]
    times_ns: list[int] | None
    places: "Places"


class Places:
    """Where rows are from. It is not often asked.

    Args:
        name: The file.
        numbers: An Arrow array of their numbers in it; None: from `first` on.
        first: The number of the first one.
    """

    def __init__(self, name: str, first: int, numbers: Any = None) -> None:
        self._name = name
        self._first = first
        self._numbers = numbers

    def __getitem__(self, index: int) -> Row:
        if self._numbers is None:
            return self._name, self._first + index
        return self._name, self._numbers[index].as_py()


class _Several(Places):
    """The same of rows of several files: Arrow arrays of names and numbers."""

    def __init__(self, names: Any, numbers: Any) -> None:
        super().__init__("", 0, numbers)
        self._names = names

    def __getitem__(self, index: int) -> Row:
        return self._names[index].as_py(), self._numbers[index].as_py()


def pack_bits(bits: bytes, first: int, count: int) -> bytes:
    """Some bits of a bitmap (least significant first), so that `unpack_bits` knows them from the same two numbers."""
    return zlib.compress(bits[first // 8 : (first + count + 7) // 8], 1)


def unpack_bits(packed: bytes, first: int, count: int) -> Any:
    """The same bits as a boolean Arrow array."""
    return pa.Array.from_buffers(
        pa.bool_(), count, [None, pa.py_buffer(zlib.decompress(packed))], offset=first % 8
    )


class RowReader:
    """Reads rows.

    Args:
        place: The folder.
        columns: What is read of a row.
        choice: Which rows.
        ordered: Whether `read_in_order` is going to be called.
    """

    def __init__(
        self, place: str, columns: ReplayColumns, choice: TimeRange, *, ordered: bool = False
    ) -> None:
        self._system, self._path = arrow_system(place)
        self._columns = columns
        self._choice = choice
        timed = ordered or choice != TimeRange()
        self._read = [columns.body, columns.unparsed]
        self._read += [columns.time] if timed else []
        self._read += columns.order if ordered else ()

    def read(self, row_groups: Sequence[RowGroupRange]) -> Iterator[Rows]:
        """All there are, in the order of the row_groups.

        Raises:
            ReplayFileError: A file cannot be read, or is another one.
        """
        for part in row_groups:
            for batch, numbers, first in self._batches(part):
                rows = len(batch)
                if rows:
                    yield Rows(self._bodies(batch), None, Places(part.stamp.name, first, numbers))

    def read_in_order(self, row_groups: Sequence[RowGroupRange]) -> Iterator[Rows]:
        """All that have a time, ordered by time, then by `ReplayColumns.order`, or as in the files.

        What is in memory at once are the row groups that overlap in time.

        Args:
            row_groups: Of one row group each, with times.

        Raises:
            ReplayFileError: As `read`; or too much of it overlaps.
        """
        waiting = sorted(row_groups, key=lambda each: (each.first_ns, each.stamp.name, each.first_row))
        window: list[Any] = []
        window_bytes = 0
        for index, part in enumerate(waiting):
            more = self._table(part, index)
            window += more
            window_bytes += sum(each.nbytes for each in more)
            if window_bytes > WINDOW_BYTES:
                raise ReplayFileError(
                    f"more than {WINDOW_BYTES // MIB} MiB of {self._path} lie around {_moment(part.first_ns)}, and "
                    "cannot be put in order here: write it anew sorted by time, or replay it without --ordered"
                )
            until = waiting[index + 1].first_ns if index + 1 < len(waiting) else None
            if not window:
                continue
            table = pa.concat_tables(window)
            if until is None:
                ready, window = table, []
            else:
                before = pc.less(table["time"], until)
                ready, window = table.filter(before), [table.filter(pc.invert(before))]
            window_bytes = sum(each.nbytes for each in window)
            yield from self._sorted(ready)

    def _sorted(self, table: Any) -> Iterator[Rows]:
        keys = [("time", "ascending")]
        keys += [(name, "ascending") for name in self._columns.order or ("file_order", "row")]
        ready = table.take(pc.sort_indices(table, sort_keys=keys))
        rows_at_once = _rows_at_once(len(ready), ready.nbytes)
        for start in range(0, len(ready), rows_at_once):
            part = ready.slice(start, rows_at_once)
            times = part["time"].to_pylist()
            yield Rows(part["body"].to_pylist(), times, _Several(part["file"], part["row"]))

    def _table(self, part: RowGroupRange, order: int) -> list[Any]:
        """A row group with all that it takes to put it in order, as tables."""
        columns = self._columns
        parts = []
        for batch, numbers, first in self._batches(part):
            times = times_ns(batch.column(columns.time))
            rows = pa.array(range(first, first + len(batch))) if numbers is None else numbers
            arrays = {
                "time": times,
                "body": _as_binary(self._body(batch)),
                "file": pa.repeat(pa.scalar(part.stamp.name), len(batch)),
                "file_order": pa.repeat(pa.scalar(order), len(batch)),
                "row": rows,
                **{name: batch.column(name) for name in columns.order},
            }
            table = pa.table(arrays)
            parts.append(table.filter(table["time"].is_valid()) if times.null_count else table)
        return parts

    # ------------------------------------------------------------------ files

    def _batches(self, part: RowGroupRange) -> Iterator[tuple[Any, Any, int]]:
        """Record batches, the numbers of their rows if some are left out, and else that of the first one."""
        name = part.stamp.name
        path = f"{self._path.rstrip('/')}/{name}"
        try:
            self._check_stamp(part.stamp, path)
            selected = None
            if part.selected is not None:
                selected = unpack_bits(part.selected, part.first_row, part.rows)
            with self._system.open_input_file(path) as file, pq.ParquetFile(file) as parquet:
                at = 0
                for group in range(part.first_group, part.end_group):
                    rows = parquet.metadata.row_group(group).num_rows
                    chosen = None if selected is None else selected.slice(at, rows)
                    if chosen is None or pc.any(chosen).as_py():
                        yield from self._group(parquet, group, chosen, part.first_row + at)
                    at += rows
        except (pa.ArrowException, OSError) as exc:
            raise ReplayFileError(f"the file {name} cannot be read: {exc}") from exc

    def _group(self, parquet: Any, group: int, chosen: Any, first: int) -> Iterator[tuple[Any, Any, int]]:
        columns = self._columns
        there = set(parquet.schema_arrow.names)
        wanted = list(dict.fromkeys(name for name in self._read if name in there))
        footer = parquet.metadata.row_group(group)
        size = sum(
            footer.column(index).total_uncompressed_size
            for index in range(footer.num_columns)
            if footer.column(index).path_in_schema in (columns.body, columns.unparsed)
        )
        at = 0
        rows_at_once = _rows_at_once(footer.num_rows, size)
        for batch in parquet.iter_batches(rows_at_once, row_groups=[group], columns=wanted):
            mask = None if chosen is None else chosen.slice(at, len(batch))
            if self._choice != TimeRange():
                mask = _both(mask, self._in_time(batch))
            if mask is None:
                yield batch, None, first + at
            else:
                numbers = pa.array(range(first + at, first + at + len(batch)), pa.int64())
                yield batch.filter(mask), numbers.filter(mask), first + at
            at += len(batch)

    def _in_time(self, batch: Any) -> Any:
        times = times_ns(batch.column(self._columns.time))
        mask = times.is_valid()
        if self._choice.first_ns is not None:
            mask = pc.and_(mask, pc.fill_null(pc.greater_equal(times, self._choice.first_ns), False))
        if self._choice.end_ns is not None:
            mask = pc.and_(mask, pc.fill_null(pc.less(times, self._choice.end_ns), False))
        return mask

    def _check_stamp(self, stamp: FileStamp, path: str) -> None:
        info = self._system.get_file_info(path)
        if not info.is_file or (info.size or 0, info.mtime_ns or 0) != (stamp.size_bytes, stamp.mtime_ns):
            what = "was changed" if info.is_file else "is gone"
            raise FileChanged(f"the file {stamp.name} {what} since this replay was planned: begin a new one")

    # ------------------------------------------------------------------ bodies

    def _body(self, batch: Any) -> Any:
        bodies = batch.column(self._columns.body)
        unparsed = self._columns.unparsed
        if bodies.null_count and unparsed is not None and unparsed in batch.schema.names:
            return pc.coalesce(_as_binary(bodies), batch.column(unparsed))
        return bodies

    def _bodies(self, batch: Any) -> list[bytes | None]:
        found: list[bytes | None] = _as_binary(self._body(batch)).to_pylist()
        return found


def _as_binary(column: Any) -> Any:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _both(one: Any, other: Any) -> Any:
    return other if one is None else pc.and_(one, other)


def _rows_at_once(rows: int, size_bytes: int) -> int:
    mean_bytes = max(1, size_bytes // max(1, rows))
    return max(1, min(_MAX_CHUNK_ROWS, _CHUNK_BYTES // mean_bytes))


def _moment(time_ns: int | None) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp((time_ns or 0) // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def earliest_time(place: str, columns: ReplayColumns, part: RowGroupRange) -> int | None:
    """The earliest time of a part, read from its rows; None: none has one. Raises ReplayFileError."""
    assert columns.time is not None
    system, path = arrow_system(place)
    try:
        with system.open_input_file(f"{path.rstrip('/')}/{part.stamp.name}") as file:
            groups = list(range(part.first_group, part.end_group))
            table = pq.ParquetFile(file).read_row_groups(groups, columns=[columns.time])
        found = [pc.min(times_ns(chunk)).as_py() for chunk in table[columns.time].chunks]
    except (pa.ArrowException, OSError) as exc:
        raise ReplayFileError(f"the file {part.stamp.name} cannot be read: {exc}") from exc
    return min((each for each in found if each is not None), default=None)
