"""Write the Parquet files of a range."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa

from ...log.gaps import Span
from ...log.records import RecordBatch
from ...protocol.limits import MIB
from ...storage import NewFile, Storage, naming_file
from .columns import PendingTable, TableBuilder, file_schema
from .dead_letters import LetterPublisher
from .layout import Layout, PartitionBy, partition_folder, partition_key, range_name, span_of_file
from .manifest import changes_folder
from .partitions import PartitionSorter
from .request import ExportRequest
from .widening import check_owner, convert_file, exported_files, footer_of, parquet_writer

_TABLE_ROWS = 20_000
_TABLE_BYTES = 4 * MIB
"""How many messages, and bytes of bodies, are converted to Arrow at a time. JSON needs 10 times as much memory."""
_LETTERS_BYTES = 4 * MIB
"""Bodies of dead letters that wait in memory; others are published before the range is complete."""


class RangeFiles:
    """Writes the files of a range one after the other; with partitions, one for each partition.

    The messages of a range are in the order of their publish time. With partitions of it, the next file begins when
    the date or hour changes: if the broker's clock was set back, it may occur twice, and then has two files. For other
    partitions, see `PartitionSorter`.

    Args:
        letters: Publishes the messages that do not fit the columns; None: the column `unparsed` has them.

    Attributes:
        builder: Collects the messages that are not written yet.
        names: The final names of the files, after `publish`.
        file_bytes: The size of the files, after `publish`.
    """

    def __init__(
        self,
        storage: Storage,
        request: ExportRequest,
        layout: Layout,
        broker: str,
        span: Span,
        letters: LetterPublisher | None = None,
    ) -> None:
        self.builder: TableBuilder = TableBuilder(
            request.topic,
            broker,
            layout,
            request.contract,
            request.promotion,
            request.schemas,
            keeps_letters=letters is not None,
        )
        self._letters = letters
        self.names: list[str] = []
        self.file_bytes: int = 0
        self._storage = storage
        self._broker = broker
        self._layout = layout
        # With a key, the table takes the rows from there: see `tables/merging.py`.
        self._place = f"{changes_folder(request.topic)}/" if layout.key else ""
        is_collected = bool(layout.levels or layout.sort_by)
        self._sorter = PartitionSorter(layout, request.row_group_bytes) if is_collected else None
        self._partition = PartitionBy.NONE if is_collected else layout.partition
        self._schema = file_schema(layout)
        self._request = request
        self._table_bytes = min(_TABLE_BYTES, request.row_group_bytes)
        self._span = span
        self._name = range_name(request.topic, broker, span)
        self._footers: dict[str, Any] = {}  # of complete files
        self._key: int | None = None  # the current partition
        self._folder = ""  # of the current partition
        self._files_of: dict[str, int] = {}  # complete files, by folder
        self._complete: list[tuple[str, NewFile]] = []  # with their final names
        self._file_name = ""
        self._file: NewFile | None = None
        self._writer: Any = None
        self._pending: PendingTable | None = None  # threads parse its bodies while the next messages are read
        self._tables: list[Any] = []
        self._group_bytes = 0
        # pyarrow compresses without the GIL, so the next messages are read meanwhile.
        self._thread = ThreadPoolExecutor(1, "trio-nsq-parquet")
        self._writing: Future[None] | None = None
        # Held by the thread while it works. `shutdown` alone does not wait for a thread whose start was interrupted,
        # and Arrow crashes if a writer is closed while another thread writes.
        self._lock = threading.Lock()
        self._discarded = False

    def add(self, found: RecordBatch) -> int:
        """Add the messages of a record, and return the size of their bodies."""
        key = partition_key(self._partition, found.timestamp_ns)
        if key != self._key:
            self.close()
            self._key, self._folder = key, partition_folder(self._partition, key)
        size = self.builder.add(found)
        if len(self.builder) >= _TABLE_ROWS or self.builder.body_bytes >= self._table_bytes:
            self._flush()
        return size

    def close(self) -> None:
        """Complete the files of what was added."""
        if len(self.builder):
            self._flush()
        self._finish_table()
        if self._sorter is not None:
            for folder, tables in self._sorter.parts():
                self._folder = folder
                for table in tables:
                    self._append(table)
                self._close_file()
        self._close_file()

    def _close_file(self) -> None:
        self._write_group()
        self._wait()
        if self._writer is None:
            return
        self._writing = self._thread.submit(self._complete_file)
        self._wait()

    def publish(self, *, replaces: bool = False) -> None:
        """Give the files their final names.

        Args:
            replaces: Whether other files of the range are removed, which an earlier run with another contract has
                published before it was killed. Otherwise existing files stay: they are complete, and may have messages
                that are no longer retained.

        Raises:
            StorageError, OSError: A file cannot be given its name, or another topic or broker has one of this name.
            BrokerUnreachable, RequestRefused: The dead letters cannot be published.
        """
        self._publish_letters()
        self._thread.shutdown()
        self._close_sources()
        if replaces:
            self._remove_others()
        for name, file in self._complete:
            if file.publish():
                self.file_bytes += file.size
            else:
                # An attempt that was considered dead may have written it before columns became wider.
                check_owner(self._storage, name, self._request.topic, self._broker)
                convert_file(self._storage, name, self._layout)
                self.file_bytes += self._storage.size(name) or 0
        self.names = [name for name, _ in self._complete]
        self._complete.clear()

    def _remove_others(self) -> None:
        """Remove the files of the range with other rows. The log has their messages, and so have those that follow."""
        own = {name for name, _ in self._complete}
        for name in exported_files(self._storage, self._request.topic, [self._broker]):
            if span_of_file(name, self._request.topic, self._broker) != self._span:
                continue
            check_owner(self._storage, name, self._request.topic, self._broker)
            if name not in own or footer_of(self._storage, name) != self._footers[name]:
                self._storage.remove([name])

    def discard(self) -> None:
        """Remove the files without a final name; also after `publish` has failed."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._close_sources()
        with self._lock:
            self._discarded = True
            # Closed here: their finalizers would report an error again, for example on a full disk.
            with suppress(Exception):
                if self._writer is not None:
                    self._writer.close()
            if self._file is not None:
                self._file.discard()
            for _, file in self._complete:
                file.discard()

    def _close_sources(self) -> None:
        self.builder.close()
        if self._sorter is not None:
            self._sorter.close()

    def _flush(self) -> None:
        """Begin to convert the added messages to a table, and finish the table before."""
        if self.builder.body_bytes > 2 * _TABLE_BYTES:
            # A large message takes several times its size: not while others are converted or written.
            self._finish_table()
            self._wait()
        begun = self.builder.begin()
        self._finish_table()
        self._pending = begun

    def _finish_table(self) -> None:
        """Add the table that is being converted to the file, or to its partitions."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        table = self.builder.finish(pending)
        if sum(len(each.body) for each in self.builder.letters) > _LETTERS_BYTES:
            self._publish_letters()
        if not len(table):
            return  # a file without rows is of no use
        if self._sorter is not None:
            self._sorter.add(table)
        else:
            self._append(table)

    def _append(self, table: Any) -> None:
        """Add rows to the file; write a row group if it is large enough."""
        self._group_bytes += table.nbytes
        self._tables.append(table)
        if self._group_bytes >= self._request.row_group_bytes:
            self._write_group()

    def _publish_letters(self) -> None:
        if self._letters is not None and not self.builder.widen:
            self._letters.publish(self.builder.letters)
            self.builder.letters.clear()

    def _write_group(self) -> None:
        """Write a row group in the thread, after the previous one."""
        if not self._tables:
            return
        self._wait()
        self._writing = self._thread.submit(self._write_table, pa.concat_tables(self._tables))
        self._tables, self._group_bytes = [], 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with naming_file(self._storage.url_of(f"{self._name}.parquet")):
                writing.result()

    # These run in the thread, where signals do not interrupt them:

    def _write_table(self, group: Any) -> None:
        with self._lock:
            if self._discarded:
                return
            if self._writer is None:
                self._file_name = self._next_name()
                self._file = self._storage.create(self._file_name)
                request = self._request
                self._writer = parquet_writer(
                    self._file, self._schema, request.compression, request.compression_level
                )
            self._writer.write_table(group, row_group_size=len(group))

    def _complete_file(self) -> None:
        with self._lock:
            if self._discarded:
                return
            assert self._file is not None
            self._writer.close()
            self._footers[self._file_name] = self._writer.writer.metadata
            self._file.close()
            self._complete.append((self._file_name, self._file))
            self._writer = self._file = None

    def _next_name(self) -> str:
        number = self._files_of[self._folder] = self._files_of.get(self._folder, 0) + 1
        part = f"-{number}" if number > 1 else ""
        return f"{self._place}{self._folder}{self._name}{part}.parquet"
