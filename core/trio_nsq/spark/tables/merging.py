"""Apply the changes of a commit to a table with a key, by copy-on-write: neither library writes delete files.

Files with rows of changed keys are written again without these rows, and the newest messages to new files. Then one
transaction replaces the former by the latter, and stores the number of the commit. The names of new files depend on
what is in them: after a kill, the next attempt finds them, or writes others.

A deleted key has no row, and an older message of it may come later, from a broker that did not answer. So deleted keys
are remembered for some days, in a file for each commit that changes them, which is written before the commit. That of
the greatest number up to that of the last commit counts.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...storage import Storage
from ..export.columns import file_schema
from ..export.layout import Layout, merged_name
from ..export.manifest import changes_folder, deleted_folder
from ..export.widening import opened_parquet, parquet_writer
from .changes import DELETED, FILE, ROW, Compared, bounds_of, compare, key_names, keyed_rows, read_changes
from .compaction import TableFile, tables_of, write_group
from .target import TableOptions

REMEMBERED_MS = 7 * 24 * 3600 * 1000
"""How long a deleted key is remembered after the commit."""
_AT = "at_ms"
_READERS = 8
"""How many files of the table are compared concurrently; in a bucket, most of the time is waiting."""


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """What commits have changed in a table with a key.

    Attributes:
        upserted: Rows that are new, or have replaced one of their key.
        deleted: Rows that were removed, because their key was deleted.
        outdated: Messages that have no row, because a newer one of their key is there, or has deleted it.
    """

    upserted: int = 0
    deleted: int = 0
    outdated: int = 0

    def __add__(self, other: "MergeCounts") -> "MergeCounts":
        return MergeCounts(
            self.upserted + other.upserted, self.deleted + other.deleted, self.outdated + other.outdated
        )


@dataclass(frozen=True, slots=True)
class Merge:
    """What a commit changes.

    Attributes:
        added: The names of the files to add.
        replaced: The files to remove.
    """

    added: Sequence[str]
    replaced: Sequence[TableFile]
    counts: MergeCounts


class Merger:
    """Prepares the commits of one export.

    Args:
        storage: The export folder.
    """

    def __init__(self, storage: Storage, topic: str, options: TableOptions) -> None:
        self._storage = storage
        self._topic = topic
        self._options = options

    def merge(
        self,
        number: int,
        names: Sequence[str],
        layout: Layout,
        files_of: Callable[[], Sequence[TableFile]],
        now_ms: int,
    ) -> Merge:
        """Write the files that change a table.

        Args:
            number: That of the commit.
            names: The files of messages, see `changes_folder`.
            layout: It has all columns of these files.
            files_of: Returns the files of the table.
            now_ms: Unix milliseconds.

        Raises:
            StorageError, OSError: A file cannot be read or written.
        """
        changes = read_changes(self._storage, names, layout)
        newest, keys = changes.newest, key_names(len(layout.key))
        there = list(files_of()) if len(newest) else []
        rows_of = self._comparison(newest, keys, layout)
        with ThreadPoolExecutor(_READERS, "trio-nsq-merge") as readers:
            found = list(readers.map(rows_of, there))
        deleted = self._deleted_keys(number, now_ms)
        of_deleted = _NO_ROWS
        if deleted is not None:
            of_deleted = compare(deleted.append_column(ROW, _indexes(deleted)), newest, keys)
        outdated = _joined([each.outdated for each in (*found, of_deleted)])
        applied = newest.filter(pc.invert(pc.is_in(_indexes(newest), value_set=outdated)))
        removed = applied.filter(applied[DELETED])
        rows = applied.filter(pc.invert(applied[DELETED])).select([FILE, ROW])

        replaced = [
            (file, each.replaced) for file, each in zip(there, found, strict=True) if len(each.replaced)
        ]
        written = [self._without_rows(number, file, rows) for file, rows in replaced]
        added = [name for name in written if name is not None]
        added += self._with_rows(number, names, pa.concat_tables([rows, changes.keyless]), layout)
        self._remember(number, deleted, of_deleted, removed, now_ms)
        by = _joined([each.by for each in found])
        lost = pc.sum(newest[DELETED].take(by)).as_py() or 0
        counts = MergeCounts(len(rows), lost, changes.messages - len(applied))
        return Merge(added, [file for file, _ in replaced], counts)

    def finish(self, number: int, names: Sequence[str]) -> None:
        """Remove what is not needed once the table has a commit; it may be called again.

        Raises:
            StorageError, OSError: A file cannot be removed.
        """
        self._storage.remove(names)
        self._storage.remove([name for at, name in self._files_of_deleted() if at < number][:-1])

    def _comparison(
        self, newest: Any, keys: Sequence[str], layout: Layout
    ) -> Callable[[TableFile], Compared]:
        bounds = bounds_of(newest, keys)

        def rows_of(file: TableFile) -> Compared:
            parts = [
                compare(rows, newest, keys) for rows in keyed_rows(self._storage, file.name, layout, bounds)
            ]
            return Compared(*(_joined(arrays) for arrays in zip(*parts, strict=True))) if parts else _NO_ROWS

        return rows_of

    # ------------------------------------------------------------------ files

    def _without_rows(self, number: int, old: TableFile, rows: Any) -> str | None:
        """Write a file of the table again without some rows; None: no row is left."""
        if len(rows) == old.rows:
            return None
        rows = _joined([rows]).sort()
        folder = old.name.rpartition("/")[0]
        name = self._name(folder, [number, old.name, _bytes_of(rows)])
        with opened_parquet(self._storage, old.name) as parquet:

            def kept() -> Iterator[Any]:
                first = 0
                for group in range(parquet.num_row_groups):
                    table = parquet.read_row_group(group)
                    yield table.filter(pc.invert(pc.is_in(_indexes(table, first), value_set=rows)))
                    first += len(table)

            self._write(name, parquet.schema_arrow, kept())
        return name

    def _with_rows(self, number: int, names: Sequence[str], rows: Any, layout: Layout) -> Iterator[str]:
        """Write these rows of files of messages to a file for each partition, and yield its name."""
        schema, prefix = file_schema(layout), f"{changes_folder(self._topic)}/"
        folders: dict[str, list[tuple[str, Any]]] = {}
        for index, name in enumerate(names):
            chosen = _joined([rows[ROW].filter(pc.equal(rows[FILE], index))]).sort()
            if len(chosen):
                folders.setdefault(name.removeprefix(prefix).rpartition("/")[0], []).append((name, chosen))
        for folder, parts in folders.items():
            content = [each for name, chosen in parts for each in (name, _bytes_of(chosen))]
            new = self._name(folder, [number, *content])
            self._write(new, schema, self._chosen(parts, schema))
            yield new

    def _chosen(self, parts: Iterable[tuple[str, Any]], schema: Any) -> Iterator[Any]:
        for name, chosen in parts:
            first = 0
            for table in tables_of(self._storage, name, schema):
                yield table.filter(pc.is_in(_indexes(table, first), value_set=chosen))
                first += len(table)

    def _name(self, folder: str, of: Iterable[object]) -> str:
        """Return the name of a file, which depends on what is in it."""
        found = hashlib.sha256()
        for each in of:
            found.update(each if isinstance(each, bytes) else f"{each}\n".encode())
        return f"{folder}/{merged_name(self._topic, found.hexdigest()[:20])}".lstrip("/")

    def _write(self, name: str, schema: Any, tables: Iterator[Any]) -> None:
        """Write a file, unless it is there."""
        if self._storage.size(name) is not None:
            return
        options, new = self._options, self._storage.create(name)
        try:
            with parquet_writer(new, schema, options.compression, options.compression_level) as writer:
                group: list[Any] = []
                for table in tables:
                    if len(table):
                        group.append(table)
                    if sum(each.nbytes for each in group) >= options.row_group_bytes:
                        write_group(writer, group)
                write_group(writer, group)
            new.publish()
        except BaseException:
            new.discard()
            raise

    # ------------------------------------------------------------------ deleted keys

    def _files_of_deleted(self) -> list[tuple[int, str]]:
        """Return the files of deleted keys with the numbers of their commits, in this order."""
        found = self._storage.names(deleted_folder(self._topic))
        return sorted((int(PurePosixPath(name).stem), name) for name in found if name.endswith(".parquet"))

    def _deleted_keys(self, number: int, now_ms: int) -> Any:
        """Return the deleted keys that are remembered before a commit, with their versions; None if there are none."""
        before = [name for at, name in self._files_of_deleted() if at < number]
        if not before:
            return None
        with opened_parquet(self._storage, before[-1]) as parquet:
            found = parquet.read()
        return found.filter(pc.greater(found[_AT], now_ms - REMEMBERED_MS))

    def _remember(self, number: int, before: Any, compared: Compared, removed: Any, now_ms: int) -> None:
        """Store the keys that are deleted after a commit, if it changes them."""
        name = f"{deleted_folder(self._topic)}/{number:020d}.parquet"
        is_changed = len(removed) or len(compared.replaced)
        if not is_changed and self._storage.size(name) is None:  # of another attempt
            return
        tables = [removed.drop_columns([DELETED, FILE, ROW])]
        tables[0] = tables[0].append_column(_AT, pa.repeat(pa.scalar(now_ms, pa.int64()), len(removed)))
        if before is not None:
            tables.append(
                before.filter(pc.invert(pc.is_in(_indexes(before), value_set=_joined([compared.replaced]))))
            )
        data = io.BytesIO()
        pq.write_table(pa.concat_tables(tables), data, compression="zstd")
        self._storage.put(name, data.getvalue())


_NO_ROWS = Compared(*[pa.chunked_array([], pa.int64())] * 3)


def _indexes(table: Any, first: int = 0) -> Any:
    """Return the indexes of the rows of a table, from `first` on."""
    return pa.arange(first, first + len(table))


def _joined(arrays: Sequence[Any]) -> Any:
    chunks = [
        chunk for each in arrays for chunk in (each.chunks if isinstance(each, pa.ChunkedArray) else [each])
    ]
    return pa.chunked_array(chunks, pa.int64()).combine_chunks()


def _bytes_of(rows: Any) -> bytes:
    batch = pa.record_batch([_joined([rows])], [ROW])
    return bytes(batch.serialize().to_pybytes())
