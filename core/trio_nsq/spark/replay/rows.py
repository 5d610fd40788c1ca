"""Read the rows of Parquet files, in the order of the files or in the order of time.

The plan of a replay determines the rows: row groups, a time range, and the rows that a filter selected.
"""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...protocol.headers import encode_headers
from ...protocol.limits import MIB
from ...storage import Storage, StoredFile
from ..places import storage_at
from .files import ReplayColumns, ReplayFileError, times_ns

CHUNK_BYTES = 4 * MIB
"""The approximate size of the bodies that are decoded at a time."""
_MAX_CHUNK_ROWS = 20_000
WINDOW_BYTES = 1024 * MIB
"""The memory limit for rows that are sorted by time."""


class RowGroupRange(NamedTuple):
    """Consecutive row groups of a file.

    Attributes:
        first_group, end_group: The first row group, and the one after the last.
        first_row: The number of the first row in the file.
        wanted: The number of selected rows; a time range may exclude some of them.
        body_bytes: The approximate uncompressed size of their bodies.
        selected: The selected rows, as `pack_bits` of all rows; None: all.
        first_ns: The time of the earliest row, if known.
    """

    stamp: StoredFile
    first_group: int
    end_group: int
    first_row: int
    rows: int
    wanted: int
    body_bytes: int
    selected: str | None = None
    first_ns: int | None = None

    def join(self, other: "RowGroupRange") -> "RowGroupRange":
        """Join this range and the next one; neither may have `selected`."""
        return self._replace(
            end_group=other.end_group,
            rows=self.rows + other.rows,
            wanted=self.wanted + other.wanted,
            body_bytes=self.body_bytes + other.body_bytes,
        )


class Rows(NamedTuple):
    """Rows that were read.

    Attributes:
        bodies: The bodies, which may be null.
        times_ns: The times, if the rows are read in order of time; otherwise None.
        locate: Returns the file name and the row number of the row at an index.
        headers: The text of the headers of each; empty: none has headers.
    """

    bodies: list[bytes | None]
    times_ns: list[int] | None
    locate: Callable[[int], tuple[str, int]]
    headers: Sequence[str] = ()


def pack_bits(bits: bytes, first: int, count: int) -> str:
    """Encode some bits of a bitmap, least significant bit first; pass the same numbers to `unpack_bits`."""
    return b64encode(zlib.compress(bits[first // 8 : (first + count + 7) // 8], 1)).decode()


def unpack_bits(packed: str, first: int, count: int) -> Any:
    """Decode bits into a boolean Arrow array."""
    bits = pa.py_buffer(zlib.decompress(b64decode(packed)))
    return pa.Array.from_buffers(pa.bool_(), count, [None, bits], offset=first % 8)


class RowReader:
    """Reads the rows of row groups.

    Args:
        first_ns: The start of the time range, Unix nanoseconds; None: no bound.
        end_ns: The end of the time range, exclusive; None: no bound. A bound excludes rows without a time.
        ordered: Whether `read_in_order` will be called.
    """

    def __init__(
        self,
        place: str,
        columns: ReplayColumns,
        first_ns: int | None = None,
        end_ns: int | None = None,
        *,
        ordered: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._storage = storage_at(place)
        self._columns = columns
        self._first_ns, self._end_ns = first_ns, end_ns
        self._has_bounds = first_ns is not None or end_ns is not None
        self._chunk_bytes = chunk_bytes
        self._window_bytes = window_bytes
        names = [columns.body, columns.unparsed, columns.headers]
        names += [columns.time] if ordered or self._has_bounds else []
        names += columns.order if ordered else ()
        self._names = [name for name in dict.fromkeys(names) if name is not None]

    def read(self, groups: Sequence[RowGroupRange]) -> Iterator[Rows]:
        """Read row groups in the given order. Raises ReplayFileError if a file cannot be read or has changed."""
        for group in groups:
            for batch, numbers, first in self._batches(group):
                if len(batch):
                    bodies = as_binary(self._body(batch)).to_pylist()
                    locate = _locator(group.stamp.name, numbers, first)
                    yield Rows(bodies, None, locate, self._headers(batch, locate))

    def read_in_order(self, groups: Sequence[RowGroupRange]) -> Iterator[Rows]:
        """Read the rows with a time, ordered by time, then by `ReplayColumns.order` or as in the files.

        Row groups whose times overlap are in memory at the same time.

        Args:
            groups: Single row groups with `first_ns`.

        Raises:
            ReplayFileError: See `read`; or overlapping row groups exceed the memory limit.
        """
        waiting = sorted(groups, key=lambda each: (each.first_ns, each.stamp.name, each.first_row))
        window: list[Any] = []
        window_bytes = 0
        for index, group in enumerate(waiting):
            more = self._tables(group, index)
            window += more
            window_bytes += sum(each.nbytes for each in more)
            if window_bytes > self._window_bytes:
                raise ReplayFileError(
                    f"{self._storage.shown} has row groups of more than {self._window_bytes // MIB} MiB that overlap "
                    f"at {_moment(group.first_ns)}, too many to sort in memory: rewrite the files sorted by time, or "
                    "replay without --ordered"
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
        rows_at_once = _rows_at_once(len(ready), ready.nbytes, self._chunk_bytes)
        for start in range(0, len(ready), rows_at_once):
            part = ready.slice(start, rows_at_once)
            bodies, times = (part[name].to_pylist() for name in ("body", "time"))
            headers = part["headers"].to_pylist() if "headers" in part.column_names else ()
            yield Rows(bodies, times, _table_locator(part), headers if any(headers) else ())

    def _tables(self, group: RowGroupRange, order: int) -> list[Any]:
        """Read a row group as tables with the columns to sort by."""
        columns = self._columns
        tables = []
        for batch, numbers, first in self._batches(group):
            times = times_ns(batch.column(columns.time))
            rows = pa.array(range(first, first + len(batch))) if numbers is None else numbers
            arrays = {
                "time": times,
                "body": as_binary(self._body(batch)),
                "file": pa.repeat(pa.scalar(group.stamp.name), len(batch)),
                "file_order": pa.repeat(pa.scalar(order), len(batch)),
                "row": rows,
                **{name: batch.column(name) for name in columns.order},
            }
            if columns.headers is not None:
                texts = self._headers(batch, _locator(group.stamp.name, numbers, first))
                arrays["headers"] = pa.array(texts or [""] * len(batch), pa.string())
            table = pa.table(arrays)
            tables.append(table.filter(table["time"].is_valid()) if times.null_count else table)
        return tables

    # ------------------------------------------------------------------ files

    def _batches(self, group: RowGroupRange) -> Iterator[tuple[Any, Any, int]]:
        """Yield record batches, their row numbers (None if all rows are selected), and the number of the first row."""
        selected = None
        if group.selected is not None:
            selected = unpack_bits(group.selected, group.first_row, group.rows)
        with open_parquet(self._storage, group.stamp) as parquet:
            there = set(parquet.schema_arrow.names)
            names = [name for name in self._names if name in there]
            at = 0
            for number in range(group.first_group, group.end_group):
                rows = parquet.metadata.row_group(number).num_rows
                mask = None if selected is None else selected.slice(at, rows)
                if mask is None or pc.any(mask).as_py():
                    yield from self._read_group(parquet, number, names, mask, group.first_row + at)
                at += rows

    def _read_group(
        self, parquet: Any, number: int, names: Sequence[str], selected: Any, first: int
    ) -> Iterator[tuple[Any, Any, int]]:
        at = 0
        sized = [self._columns.body, self._columns.unparsed]
        if (headers := self._columns.headers) is not None:
            sized += [f"{headers}.key_value.{each}" for each in ("key", "value")]
        for batch in read_row_group(parquet, number, names, sized, self._chunk_bytes):
            mask = None if selected is None else selected.slice(at, len(batch))
            if self._has_bounds:
                in_time = self._in_time(batch)
                mask = in_time if mask is None else pc.and_(mask, in_time)
            if mask is None:
                yield batch, None, first + at
            else:
                numbers = pa.array(range(first + at, first + at + len(batch)), pa.int64())
                yield batch.filter(mask), numbers.filter(mask), first + at
            at += len(batch)

    def _in_time(self, batch: Any) -> Any:
        times = times_ns(batch.column(self._columns.time))
        mask = times.is_valid()
        if self._first_ns is not None:
            mask = pc.and_(mask, pc.fill_null(pc.greater_equal(times, self._first_ns), False))
        if self._end_ns is not None:
            mask = pc.and_(mask, pc.fill_null(pc.less(times, self._end_ns), False))
        return mask

    def _headers(self, batch: Any, locate: Callable[[int], tuple[str, int]]) -> list[str]:
        """Return the text of the headers of each row; empty if none has headers. Raises ReplayFileError."""
        name = self._columns.headers
        if name is None or name not in batch.schema.names or not len(batch.column(name).values):
            return []
        texts = []
        for index, items in enumerate(batch.column(name).to_pylist()):
            try:
                texts.append(encode_headers(dict(items)) if items else "")
            except (TypeError, ValueError) as exc:
                file, row = locate(index)
                raise ReplayFileError(
                    f"row {row} of {file} has headers that a message cannot have: {exc}"
                ) from exc
        return texts if any(texts) else []

    def _body(self, batch: Any) -> Any:
        bodies = batch.column(self._columns.body)
        unparsed = self._columns.unparsed
        if bodies.null_count and unparsed is not None and unparsed in batch.schema.names:
            return pc.coalesce(as_binary(bodies), batch.column(unparsed))
        return bodies


def _locator(name: str, numbers: Any, first: int) -> Callable[[int], tuple[str, int]]:
    return lambda index: (name, first + index if numbers is None else numbers[index].as_py())


def _table_locator(table: Any) -> Callable[[int], tuple[str, int]]:
    return lambda index: (table["file"][index].as_py(), table["row"][index].as_py())


def as_binary(column: Any) -> Any:
    """Convert bytes or strings to an Arrow array of binary values."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _moment(time_ns: int | None) -> str:
    return datetime.fromtimestamp((time_ns or 0) // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def earliest_time(place: str, columns: ReplayColumns, group: RowGroupRange) -> int | None:
    """Read the earliest time of row groups from their rows; None if no row has a time. Raises ReplayFileError."""
    assert columns.time is not None
    with open_parquet(storage_at(place), group.stamp) as parquet:
        numbers = list(range(group.first_group, group.end_group))
        table = parquet.read_row_groups(numbers, columns=[columns.time])
        found = [pc.min(times_ns(chunk)).as_py() for chunk in table[columns.time].chunks]
    return min((each for each in found if each is not None), default=None)


# ---------------------------------------------------------------------- files


@contextmanager
def open_parquet(storage: Storage, stamp: StoredFile) -> Iterator[Any]:
    """Open a file as a ParquetFile.

    Raises:
        ReplayFileError: The file has changed since it was listed; or it cannot be read, also inside the block.
    """
    try:
        if (found := storage.file(stamp.name)) != stamp:
            what = "was removed" if found is None else "was changed"
            raise ReplayFileError(
                f"the file {stamp.name} {what} after this replay was planned: start a new replay"
            )
        with storage.open_file(stamp) as file, pq.ParquetFile(file) as parquet:
            yield parquet
    except (pa.ArrowException, OSError) as exc:
        raise ReplayFileError(f"the file {stamp.name} cannot be read: {exc}") from exc


def read_row_group(
    parquet: Any, number: int, names: Sequence[str], sized: Sequence[str | None], chunk_bytes: int
) -> Iterator[Any]:
    """Yield a row group as record batches of limited size.

    Args:
        names: The columns to read; they exist.
        sized: The columns that count for `chunk_bytes`.
    """
    footer = parquet.metadata.row_group(number)
    size = sum(
        footer.column(index).total_uncompressed_size
        for index in range(footer.num_columns)
        if footer.column(index).path_in_schema in sized
    )
    rows = _rows_at_once(footer.num_rows, size, chunk_bytes)
    for batch in parquet.iter_batches(rows, row_groups=[number], columns=names):
        for index, name in enumerate(batch.schema.names):
            batch = batch.set_column(index, name, _without_view(batch.column(index)))
        yield batch


def _without_view(column: Any) -> Any:
    """Convert an array of the types for views, which Arrow can neither filter nor sort."""
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if pa.types.is_binary_view(column.type) else column


def _rows_at_once(rows: int, size_bytes: int, chunk_bytes: int) -> int:
    mean_bytes = max(1, size_bytes // max(1, rows))
    return max(1, min(_MAX_CHUNK_ROWS, chunk_bytes // mean_bytes))
