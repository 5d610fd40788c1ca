"""Partition folders by fields of JSON bodies, and by their own time: rows of a range are grouped, then written.

The names and the rows of a file depend on the messages of its range only: after a kill, the next attempt may find
some of the files. So the rows of a range are collected first, beyond some size in a temporary file, and then written,
one file after the other. Any number of partitions needs the same memory and one open file.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...protocol.errors import NSQError
from .layout import Layout, LayoutError, PartitionBy, partition_path

MAX_PARTITIONS = 10_000
"""The most partitions of a range: each is a file. With more, the values of the field are probably data."""
Values = tuple[str | None, ...]
"""The values of the levels of a partition, as text."""


class PartitionSorter:
    """Collects the rows of a range, and returns them by partition. Call `close` at the end.

    Args:
        layout: It has levels of fields, or an event time.
        memory_bytes: Keep about this many bytes of rows in memory, and others in a temporary file.
    """

    def __init__(self, layout: Layout, memory_bytes: int) -> None:
        self._layout = layout
        self._memory_bytes = memory_bytes
        self._dropped = layout.dropped_columns
        self._names = [name for name, _ in layout.partition_columns]
        self._in_memory: dict[Values, list[Any]] = {}
        self._bytes = 0
        self._spilled: dict[Values, list[int]] = {}  # numbers of batches
        self._batches = 0
        self._stack = ExitStack()
        self._file: Any = None
        self._writer: Any = None

    def add(self, table: Any) -> None:
        """Add rows.

        Raises:
            LayoutError: There are too many partitions.
            OSError: The temporary file cannot be written.
        """
        for values, rows in split(table, self._layout):
            self._in_memory.setdefault(values, []).append(rows.drop_columns(self._dropped))
        if len(self._in_memory.keys() | self._spilled.keys()) > MAX_PARTITIONS:
            raise LayoutError(
                f"a range has more than {MAX_PARTITIONS:,} partitions by {', '.join(self._names)}, and each is a file: "
                "choose fields with fewer values for --partition-by, and another folder"
            )
        self._bytes += table.nbytes
        if self._bytes > self._memory_bytes:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = self._stack.enter_context(tempfile.NamedTemporaryFile(prefix="trio-nsq-partitions-"))
        for values, tables in self._in_memory.items():
            (batch,) = pa.concat_tables(tables).combine_chunks().to_batches() or [None]
            if self._writer is None:
                self._writer = pa.ipc.new_file(self._file, batch.schema)
            self._writer.write_batch(batch)
            self._spilled.setdefault(values, []).append(self._batches)
            self._batches += 1
        self._in_memory, self._bytes = {}, 0

    def parts(self) -> Iterator[tuple[str, Iterator[Any]]]:
        """Yield the folder of each partition, and its rows as tables, in the order of the messages.

        Partitions whose values differ may have the same folder, see `partition_path`; they follow each other in an
        order that the values determine.
        """
        reader: Any = None
        if self._writer is not None:
            self._writer.close()
            self._file.flush()
            reader = pa.ipc.open_file(self._stack.enter_context(pa.memory_map(self._file.name)))
        for values in sorted(self._in_memory.keys() | self._spilled.keys(), key=_order):
            yield partition_path(self._names, values), self._rows(values, reader)

    def _rows(self, values: Values, reader: Any) -> Iterator[Any]:
        for number in self._spilled.get(values, ()):
            yield pa.Table.from_batches([reader.get_batch(number)])
        yield from self._in_memory.get(values, ())

    def close(self) -> None:
        """Remove the temporary file."""
        if self._writer is not None:
            self._writer.close()
        self._in_memory.clear()
        self._stack.close()


def split(table: Any, layout: Layout) -> Iterator[tuple[Values, Any]]:
    """Yield the values of each partition of a table, and its rows, in their order."""
    if not len(table):
        return
    levels = [each for level in layout.levels for each in _level_texts(table, layout, level)]
    codes: Any = None
    for texts in levels:
        encoded = texts.dictionary_encode()
        others = len(encoded.dictionary)
        indices = pc.fill_null(encoded.indices.cast(pa.int64()), others)
        codes = indices if codes is None else pc.add(pc.multiply(codes, others + 1), indices)
    order = pc.sort_indices(codes)  # stable
    rows, start = table.take(order), 0
    for run in pc.value_counts(codes.take(order)).to_pylist():
        first = order[start].as_py()
        yield tuple(texts[first].as_py() for texts in levels), rows.slice(start, run["counts"])
        start += run["counts"]


def _level_texts(table: Any, layout: Layout, level: str) -> Sequence[Any]:
    """Return the values of the folders of a level, as text: one array, and of `hour` that of the date, too."""
    if level not in (PartitionBy.DATE, PartitionBy.HOUR):
        return [_column(table, layout.column_of(level).name).cast(pa.string())]
    times = _column(table, layout.time_column)
    dates = times.cast(pa.timestamp("us")).cast(pa.date32(), safe=False).cast(pa.string())
    if level == PartitionBy.DATE:
        return [dates]
    return [dates, pc.utf8_lpad(pc.hour(times.cast(pa.timestamp("us"))).cast(pa.string()), 2, "0")]


def _column(table: Any, name: str) -> Any:
    found = table[name].combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) and found.num_chunks == 1 else found


def _order(values: Values) -> list[tuple[bool, str]]:
    return [(value is not None, value or "") for value in values]


class PartitionError(NSQError):
    """Reserved."""
