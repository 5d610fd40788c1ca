"""Writing one range: what a task does, wherever it runs."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...log.gaps import Gap
from ...log.records import RecordBatch
from ..broker_log import PATIENCE_S, BrokerLog, Found, TLSFiles
from ..ranges import Span
from ..runtime.engine import Advance
from ..spool.records import Spooled, SpooledRows, read_spool
from ..storage import Storage, storage_at, writing_to
from .columns import DICTIONARY_COLUMNS, TableBuilder
from .layout import Layout, partition_folder, partition_key, range_name
from .manifest import RangeResult, done_path

MIB = 1024 * 1024
_TABLE_ROWS = 20_000
"""So many rows become Arrow columns at a time."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are written; may differ from one run to the next.

    Attributes:
        compression: A codec of Parquet's, in lower case.
        compression_level: None: the codec's own default.
        row_group_bytes: Bytes of bodies in a row group, about.
    """

    compression: str = "zstd"
    compression_level: int | None = 1
    row_group_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class ExportTask:
    """A range to be written, with all that there is to know; can be pickled.

    Attributes:
        place: The folder of the export, see `storage_at`.
        topic: Its name.
        address: Where the broker is asked.
        broker: What it is called in the files.
        span: The range.
        layout, options: See there.
        tls: For https.
        patience_s: How long a broker that went away is waited for.
        spool: The folder of a spool's log that is read instead of the broker; None: there is none.
    """

    place: str
    topic: str
    address: str
    broker: str
    span: Span
    layout: Layout
    options: FileOptions = field(default_factory=FileOptions)
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S
    spool: Path | None = None

    @property
    def messages(self) -> int:
        """How many sequences there are."""
        return self.span.length

    def run(self, advance: Advance | None = None) -> RangeResult:
        """See `export_range`."""
        return export_range(self, advance)


def export_range(task: ExportTask, advance: Advance | None = None) -> RangeResult:
    """Write a range to files, and note that it is done; if that is noted already, nothing happens.

    Files get their names when all of them are complete, so that a range is there in whole but for the moment in which
    that is done. However it ends, nothing is left under a temporary name, unless the process is killed.

    Raises:
        BrokerUnreachable, RequestRefused, LogReplaced, RawStreamError, LogReadError: It cannot be read.
        OSError, StorageError: It cannot be written.
    """
    storage = storage_at(task.place)
    if (noted := storage.read(done_path(task.topic, task.broker, task.span))) is not None:
        return RangeResult.from_bytes(noted)
    files = _RangeFiles(storage, task)
    try:
        done = _write(task, files, advance)
        files.publish()
    except BaseException:
        files.discard()
        raise
    done = replace(done, files=files.names, file_bytes=files.file_bytes)
    storage.write(done_path(task.topic, task.broker, task.span), done.to_bytes())
    return done


def _source(task: ExportTask) -> Iterator[Found | Spooled]:
    if task.spool is not None:
        return read_spool(task.spool, task.span, task.layout.partition)
    return BrokerLog(task.address, task.topic, task.tls, task.patience_s).read(task.span)


def _write(task: ExportTask, files: "_RangeFiles", advance: Advance | None) -> RangeResult:
    span = task.span
    builder = files.builder
    gaps: list[tuple[int, int, str]] = []
    messages = body_bytes = for_one_channel = 0
    last_id = None
    for found in _source(task):
        if isinstance(found, Gap):
            gaps.append((found.first_sequence, found.next_sequence, found.reason))
            continue
        before = files.body_bytes
        if isinstance(found, SpooledRows):
            count = len(found)
            if found.sequences[-1] == span.end - 1:
                last_id = f"{found.ids[-1]:016x}"
            files.add_spooled(found)
        else:
            indexes = range(
                max(0, span.first - found.base_sequence), min(found.count, span.end - found.base_sequence)
            )
            count = len(indexes)
            if found.next_sequence >= span.end:
                last_id = f"{found.first_id + indexes.stop - 1:016x}"
            if not is_for_all_channels(found):
                for_one_channel += count
                continue
            files.add(found, indexes)
        messages += count
        body_bytes += files.body_bytes - before
        if advance is not None:
            advance(count, files.body_bytes - before)
    files.close()
    return RangeResult(
        task.broker,
        *span,
        messages,
        body_bytes,
        gaps=gaps,
        for_one_channel=for_one_channel,
        unparsed=builder.unparsed,
        last_id=last_id,
    )


def is_for_all_channels(batch: RecordBatch) -> bool:
    """Whether it was published to the topic, and not brought back for one of its channels: the broker notes that."""
    return not (batch.metadata and batch.due_ns) or json.loads(batch.metadata).get("channel") is None


class _RangeFiles:
    """The files of a range, one after the other: one for each date or hour, if there are partitions.

    Where the broker's clock was set back, a date or hour comes a second time; then it gets a second file.

    Attributes:
        builder: Where rows are before they are in a file.
        names: The files' names, once they have them.
        body_bytes: Of all that was added.
        file_bytes: Of all files that are complete.
    """

    def __init__(self, storage: Storage, task: ExportTask) -> None:
        self.builder = TableBuilder(task.topic, task.broker, task.layout)
        self.names: list[str] = []
        self.body_bytes = 0
        self.file_bytes = 0
        self._storage = storage
        self._task = task
        self._name = range_name(task.topic, task.broker, task.span)
        self._key: int | None = None
        self._seen: dict[int, int] = {}  # files by partition
        self._complete: list[tuple[str, str]] = []  # temporary names, and those they are to have
        self._temporary = ""
        self._file: Any = None
        self._writer: Any = None
        self._tables: list[Any] = []
        self._group_bytes = 0
        # pyarrow packs without Python's lock: meanwhile the broker can be read.
        self._beside = ThreadPoolExecutor(1, "trio-nsq-parquet")
        self._writing: Future[None] | None = None

    def add(self, batch: RecordBatch, indexes: range) -> None:
        """Add some messages of a record."""
        self._turn_to(batch.timestamp_ns)
        before = self.builder.body_bytes
        self.builder.add(batch, indexes)
        self._added(before)

    def add_spooled(self, rows: SpooledRows) -> None:
        """Add messages of a spool, all of one partition."""
        self._turn_to(rows.times_ns[0])
        before = self.builder.body_bytes
        self.builder.add_spooled(rows)
        self._added(before)

    def _turn_to(self, time_ns: int) -> None:
        """Begin another file if one is due for this time."""
        key = partition_key(self._task.layout.partition, time_ns)
        if key != self._key:
            self.close()
            self._key = key

    def _added(self, before: int) -> None:
        self.body_bytes += self.builder.body_bytes - before
        if len(self.builder) >= _TABLE_ROWS or self.builder.body_bytes >= self._task.options.row_group_bytes:
            self._flush()

    def close(self) -> None:
        """Complete the file that is being written."""
        if len(self.builder):
            self._flush()
        self._write_group()
        self._await_group()
        if self._writer is None:
            return
        self._writing = self._beside.submit(self._complete_file)
        self._await_group()
        assert self._key is not None
        number = self._seen[self._key] = self._seen.get(self._key, 0) + 1
        part = f"-{number}" if number > 1 else ""
        folder = partition_folder(self._task.layout.partition, self._key)
        self._complete.append((self._temporary, f"{folder}{self._name}{part}.parquet"))
        self._temporary = ""

    def publish(self) -> None:
        """Give the files their names.

        One that is there already was complete when it got its name, and may hold messages that are no longer kept: it
        stays.
        """
        new = [(temporary, name) for temporary, name in self._complete if not self._storage.exists(name)]
        for temporary in {temporary for temporary, _ in self._complete} - {temporary for temporary, _ in new}:
            self._storage.discard(temporary)
        self._storage.publish(new)
        self._beside.shutdown()
        self.names = [name for _, name in self._complete]
        self._complete.clear()

    def discard(self) -> None:
        """Remove what has no name yet."""
        self._beside.shutdown()
        # Both would do that by themselves later, when the file is gone, and say so; a full disk is known already.
        for each in (self._writer, self._file):
            with suppress(Exception):
                if each is not None:
                    each.close()
        for temporary in (self._temporary, *(temporary for temporary, _ in self._complete)):
            if temporary:
                self._storage.discard(temporary)

    def _flush(self) -> None:
        """Make a table of the rows that were added, and a row group of the tables when there is enough of it."""
        self._group_bytes += self.builder.body_bytes
        self._tables.append(self.builder.table())
        if self._group_bytes >= self._task.options.row_group_bytes:
            self._write_group()

    def _write_group(self) -> None:
        """Have a row group packed and written beside us, once that is done with the one before."""
        if not self._tables:
            return
        self._await_group()
        self._writing = self._beside.submit(self._pack, pa.concat_tables(self._tables))
        self._tables, self._group_bytes = [], 0

    def _await_group(self) -> None:
        """Wait for what is being written; raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with writing_to(f"{self._task.place}/{self._name}.parquet"):
                writing.result()

    # In the thread beside us, where no signal interrupts it:

    def _pack(self, group: Any) -> None:
        if self._writer is None:
            options = self._task.options
            self._temporary, self._file = self._storage.create(f"{self._name}.parquet")
            self._writer = pq.ParquetWriter(
                self._file,
                self.builder.schema,
                compression=options.compression,
                compression_level=options.compression_level,
                use_dictionary=DICTIONARY_COLUMNS,
            )
        self._writer.write_table(group, row_group_size=len(group))

    def _complete_file(self) -> None:
        self._writer.close()
        self.file_bytes += self._storage.complete(self._temporary, self._file)
        self._writer = self._file = None
