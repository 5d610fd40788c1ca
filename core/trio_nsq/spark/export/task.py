"""The task of an export: write one range to Parquet files, in this process or in a Spark worker."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...client.reading.batches import is_for_all_channels
from ...log.gaps import Gap, Span
from ...log.records import RecordBatch
from ..logs import LogPlace
from ..runtime.engine import Advance
from ..storage import NewFile, Storage, naming_file, storage_at
from .columns import DICTIONARY_COLUMNS, TableBuilder
from .layout import Layout, partition_folder, partition_key, range_name
from .manifest import RangeResult, result_path
from .request import ExportRequest

_TABLE_ROWS = 20_000
"""How many messages are converted to Arrow at a time."""


@dataclass(frozen=True, slots=True)
class ExportTask:
    """A range to export. Can be pickled.

    Attributes:
        log: The log to read.
        layout_index: The index of the layout in the manifest.
    """

    request: ExportRequest
    layout: Layout
    log: LogPlace
    span: Span
    layout_index: int = 0

    @property
    def broker(self) -> str:
        return self.log.label

    @property
    def messages(self) -> int:
        return self.span.length

    def run(self, advance: Advance | None = None, storage: Storage | None = None) -> RangeResult:
        """Write the files of the range, then its result; if there is a result, only return it.

        Files get their final names when all of them are complete. On an error, temporary files are removed, unless the
        process is killed.

        Args:
            advance: Called with the number of messages and bytes of each record.
            storage: The storage to write to; None: the folder of the request.

        Raises:
            BrokerUnreachable, RequestRefused, LogReplaced, RawStreamError, LogReadError: The range cannot be read.
            OSError, StorageError: The files cannot be written.
        """
        storage = storage or storage_at(self.request.place)
        path = result_path(self.request.topic, self.broker, self.span)
        if (existing := storage.read(path)) is not None:
            return RangeResult.from_bytes(existing.data)
        files = _RangeFiles(storage, self)
        try:
            result = self._write(files, advance)
            files.publish()
        except BaseException:
            files.discard()
            raise
        result = replace(result, files=files.names, file_bytes=files.file_bytes)
        if not storage.put_new(path, result.to_bytes()) and (existing := storage.read(path)) is not None:
            return RangeResult.from_bytes(existing.data)  # of another attempt
        return result

    def _write(self, files: "_RangeFiles", advance: Advance | None) -> RangeResult:
        span = self.span
        gaps: list[tuple[int, int, str]] = []
        messages = body_bytes = for_one_channel = 0
        last_id = None
        for found in self.log.open().read(span):
            if isinstance(found, Gap):
                gaps.append((found.first_sequence, found.next_sequence, found.reason))
                continue
            count = found.count
            if found.next_sequence == span.end:
                last_id = f"{found.first_id + count - 1:016x}"
            if not is_for_all_channels(found):
                for_one_channel += count
                continue
            size = files.add(found)
            messages += count
            body_bytes += size
            if advance is not None:
                advance(count, size)
        files.close()
        return RangeResult(
            self.broker,
            *span,
            messages,
            body_bytes,
            gaps=gaps,
            for_one_channel=for_one_channel,
            unparsed=files.builder.unparsed,
            misfits=dict(files.builder.misfits),
            new_fields=files.builder.new_fields,
            last_id=last_id,
            layout=self.layout_index,
        )


class _RangeFiles:
    """Writes the files of a range one after the other; with partitions, one for each date or hour.

    If the broker's clock was set back, a date or hour may occur twice; it then has two files.

    Attributes:
        builder: Collects the messages that are not written yet.
        names: The final names of the files, after `publish`.
        file_bytes: The size of the files, after `publish`.
    """

    def __init__(self, storage: Storage, task: ExportTask) -> None:
        topic, broker = task.request.topic, task.broker
        self.builder = TableBuilder(topic, broker, task.layout)
        self.names: list[str] = []
        self.file_bytes = 0
        self._storage = storage
        self._partition = task.layout.partition
        self._request = task.request
        self._name = range_name(topic, broker, task.span)
        self._key: int | None = None  # the current partition
        self._files_of: dict[int, int] = {}  # complete files, by partition
        self._complete: list[tuple[str, NewFile]] = []  # with their final names
        self._file_name = ""
        self._file: NewFile | None = None
        self._writer: Any = None
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
            self._key = key
        size = self.builder.add(found)
        if len(self.builder) >= _TABLE_ROWS or self.builder.body_bytes >= self._request.row_group_bytes:
            self._flush()
        return size

    def close(self) -> None:
        if len(self.builder):
            self._flush()
        self._write_group()
        self._wait()
        if self._writer is None:
            return
        self._writing = self._thread.submit(self._complete_file)
        self._wait()

    def publish(self) -> None:
        """Give the files their final names.

        Existing files are not replaced: they are complete, and may have messages that are no longer retained.
        """
        self._thread.shutdown()
        for name, file in self._complete:
            size = file.size if file.publish() else self._storage.size(name)
            self.file_bytes += size or 0
        self.names = [name for name, _ in self._complete]
        self._complete.clear()

    def discard(self) -> None:
        """Remove the files without a final name."""
        self._thread.shutdown(wait=False, cancel_futures=True)
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

    def _flush(self) -> None:
        """Convert the added messages to a table; write a row group if it is large enough."""
        self._group_bytes += self.builder.body_bytes
        self._tables.append(self.builder.table())
        if self._group_bytes >= self._request.row_group_bytes:
            self._write_group()

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
                self._writer = pq.ParquetWriter(
                    self._file,
                    self.builder.schema,
                    compression=self._request.compression,
                    compression_level=self._request.compression_level,
                    use_dictionary=DICTIONARY_COLUMNS,
                )
            self._writer.write_table(group, row_group_size=len(group))

    def _complete_file(self) -> None:
        with self._lock:
            if self._discarded:
                return
            assert self._file is not None
            self._writer.close()
            self._file.close()
            self._complete.append((self._file_name, self._file))
            self._writer = self._file = None

    def _next_name(self) -> str:
        assert self._key is not None
        number = self._files_of[self._key] = self._files_of.get(self._key, 0) + 1
        part = f"-{number}" if number > 1 else ""
        return f"{partition_folder(self._partition, self._key)}{self._name}{part}.parquet"
