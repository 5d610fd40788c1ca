"""An export from its beginning to its end: what there is to do, who does it, and what is noted of it."""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path

from ...log.records import RecordBatch
from ...protocol.errors import NSQError
from ..broker_log import PATIENCE_S, Bounds, BrokerLog, LogReplaced, TLSFiles, broker_label
from ..ranges import Span, subtract
from ..runtime.engine import Advance, Engine
from ..spool.records import SpooledRows
from ..spool.spool import Spool, SpoolLog
from ..storage import LocalStorage, Storage, local_path, make_folder, storage_at
from .json_columns import infer_columns
from .layout import BodyFormat, JsonType, Layout, LayoutError, PartitionBy, safe_name
from .manifest import BrokerRanges, Manifest, ManifestError, RangeResult, done_folder, manifest_path
from .task import ExportTask, FileOptions

SAMPLE_MESSAGES = 10_000
"""So many bodies are looked at for which columns there are."""
_FALLBACK_BYTES = 256
"""Of a message, where the log does not tell."""


class FolderBusy(NSQError):
    """Another export writes to the same folder."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is wanted.

    Attributes:
        topic: Its name.
        place: Where to, see `storage_at`.
        first, end: Positions, see docs/reading.md. Not looked at with a channel, which says itself where it stands.
        channel: Export what this channel has not had yet, and move it over that when it is safe; None: none.
        layout: What the files look like; `json_columns` is not looked at.
        json_fields: Columns of JSON bodies; those without a type get that of a sample. None at all: all fields of it.
        options: How files are written.
        target_bytes: Bytes of the log in a range, about; at least 1.
        least_ranges: Into as many ranges is cut what is worth it, so that there is work for all.
        tls: For https.
        patience_s: How long a broker that goes away is waited for.
        spool: The folder of a spool that is read instead of brokers, and what is in it removed when it is safe; there
            is a channel then, which it was received from. None: there is none.
    """

    topic: str
    place: str
    first: str = "earliest"
    end: str = "latest"
    channel: str | None = None
    layout: Layout = field(default_factory=Layout)
    json_fields: Sequence[tuple[str, JsonType | None]] = ()
    options: FileOptions = field(default_factory=FileOptions)
    target_bytes: int = 256 * 1024 * 1024
    least_ranges: int = 1
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S
    spool: Path | None = None


@dataclass(slots=True)
class ExportResult:
    """What became of an export so far. Counts are of what this run did, but for those that say otherwise.

    Attributes:
        messages, body_bytes, files, file_bytes, ranges: What was written.
        planned_messages, planned_ranges: What was to be done.
        planned_bytes: Of the log, about.
        skipped_ranges, skipped_messages: What was wanted and is there from before.
        missing: Messages that are not there any more.
        damaged: Whether some of them are damaged.
        for_one_channel, unparsed: See `RangeResult`.
        repeated: Messages that a channel gave a second time, and that were left out.
        gaps: `(broker, first, end, reason)`.
    """

    messages: int = 0
    body_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    ranges: int = 0
    planned_messages: int = 0
    planned_ranges: int = 0
    planned_bytes: int = 0
    skipped_ranges: int = 0
    skipped_messages: int = 0
    missing: int = 0
    damaged: bool = False
    for_one_channel: int = 0
    unparsed: int = 0
    repeated: int = 0
    gaps: list[tuple[str, int, int, str]] = field(default_factory=list)

    def add(self, done: RangeResult) -> None:
        """Count a range."""
        self.ranges += 1
        self.messages += done.messages
        self.body_bytes += done.body_bytes
        self.files += len(done.files)
        self.file_bytes += done.file_bytes
        self.for_one_channel += done.for_one_channel
        self.unparsed += done.unparsed
        for first, end, reason in done.gaps:
            self.missing += end - first
            self.damaged |= reason == "damaged"
            self.gaps.append((done.broker, first, end, reason))

    def merge(self, other: "ExportResult") -> None:
        """Count what became of another one, too."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, mine or theirs if isinstance(mine, bool) else mine + theirs)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is wanted of one broker."""

    address: str
    span: Span | None
    bounds: Bounds
    channel_at: int = 0


class ExportJob:
    """The export of one topic into one folder. Made by `open_export`.

    Attributes:
        request: What is wanted.
        outcome: What became of it so far.
        spool: Where messages are put that are to be exported; None: brokers' logs are.
    """

    def __init__(self, request: ExportRequest, storage: Storage) -> None:
        self.request = request
        self.result = ExportResult()
        self.spool: Spool | None = None
        self._storage = storage
        self._path = manifest_path(request.topic)
        self._manifest = self._read_manifest()
        self._wanted: list[_Wanted] = []
        self._next: dict[str, int] = {}  # by address, the sequence after what was done last
        self._saved = b""
        self._take_over()
        self.sweep()

    def open_spool(self) -> Spool:
        """Open the spool that was asked for, into which something may be received then.

        Raises:
            SpoolError, OSError, LogError: It cannot be used.
            LayoutError: The folder was begun with another layout.
        """
        assert self.request.spool is not None
        assert self.request.channel is not None
        books: Mapping[str, BrokerRanges] = {}
        if self._manifest is not None:
            self._check_layout(self._manifest.layout)
            books = self._manifest.brokers
        self.spool = Spool(self.request.spool, self.request.topic, self.request.channel, books)
        return self.spool

    # ------------------------------------------------------------------ the books

    def _read_manifest(self) -> Manifest | None:
        data = self._storage.read(self._path)
        if data is None:
            return None
        try:
            manifest = Manifest.from_bytes(data)
        except ManifestError as exc:
            raise ManifestError(
                f"the manifest {self._path} in {self.request.place} is of no use: {exc}"
            ) from exc
        if manifest.topic != self.request.topic:
            raise ManifestError(
                f"the folder {self.request.place} holds topic {manifest.topic}, and the files of "
                f"{self.request.topic} would be called the same: name another one"
            )
        return manifest

    def _save(self) -> None:
        assert self._manifest is not None
        data = self._manifest.to_bytes()
        if data != self._saved:
            self._storage.write(self._path, data)
            self._saved = data

    def _take_over(self) -> list[RangeResult]:
        """Take over what tasks have noted, also those of a run that was killed."""
        if self._manifest is None:
            return []
        noted = self._storage.names(done_folder(self.request.topic))
        found = []
        for name in noted:
            if name.endswith(".json") and (data := self._storage.read(name)) is not None:
                found.append(RangeResult.from_bytes(data))
                self._manifest.finish(found[-1])
        if noted:
            self._save()
            for name in noted:
                self._storage.discard(name)
        return found

    def sweep(self) -> None:
        """Remove what attempts that were killed have left under temporary names; another topic's may be under way."""
        brokers = self._manifest.brokers if self._manifest is not None else {}
        ours = tuple(f".{safe_name(self.request.topic)}-{safe_name(label)}-" for label in brokers)
        books = self._path.rpartition("/")[0] + "/"
        for name in self._storage.temporary_names():
            if name.startswith((books, *ours)):
                self._storage.discard(name)

    # ------------------------------------------------------------------ the plan

    def plan(self, addresses: Sequence[str]) -> list[ExportTask]:
        """Ask the brokers what there is, and write down what is to be done; nobody works on any of it yet.

        Planning again, after what was planned is done, goes on where that ended.

        Args:
            addresses: Where the brokers are asked; the nsqds that the spool has something of.

        Raises:
            BrokerUnreachable, RequestRefused: A broker does not tell.
            LogReplaced: What is there is of another log than what is in the folder.
            LayoutError: The folder was begun with another layout, or there are no columns.
            ManifestError: It cannot be used.
        """
        request = self.request
        self._wanted = [self._look(address) for address in addresses]
        if self._manifest is None:
            self._manifest = Manifest(request.topic, self._layout())
        else:
            self._check_layout(self._manifest.layout)
        tasks: list[ExportTask] = []
        for wanted in self._wanted:
            tasks += self._plan_broker(self._manifest, wanted)
        self.result.planned_ranges += len(tasks)
        self.result.planned_messages += sum(task.span.length for task in tasks)
        self._save()
        return tasks

    def _log(self, address: str) -> BrokerLog | SpoolLog:
        if self.spool is not None:
            return self.spool.log(address)
        return BrokerLog(address, self.request.topic, self.request.tls, self.request.patience_s)

    def _look(self, address: str) -> _Wanted:
        request, log = self.request, self._log(address)
        self._check_same_log(address, log)
        channel_at = 0
        if request.channel is not None:
            log.bounds()  # for a topic that is not there is not to be made
            log.create_channel(request.channel)
            first = channel_at = log.channel_position(request.channel)
        elif address in self._next:
            first = self._next[address]
        elif request.first.isdecimal():
            first = int(request.first)
        else:
            first = log.bounds(request.first).at
        bounds = log.bounds(request.end)
        if first < bounds.first:
            self._note_discarded(address, Span(first, bounds.first))
        span = Span(max(first, bounds.first), bounds.at)
        return _Wanted(address, span if span.length > 0 else None, bounds, channel_at)

    def _note_discarded(self, address: str, span: Span) -> None:
        """Count what was to be had and is no longer kept."""
        label = broker_label(address)
        book = self._manifest.brokers.get(label) if self._manifest is not None else None
        for lost in subtract(span, [] if book is None else [*book.done, *book.pending]):
            self.result.missing += lost.length
            self.result.gaps.append((label, *lost, "discarded"))

    def _check_same_log(self, address: str, log: BrokerLog | SpoolLog) -> None:
        """Raises LogReplaced if this is another log than the one whose messages are in the folder."""
        label = broker_label(address)
        if isinstance(log, SpoolLog):  # it has looked itself
            return
        if self._manifest is None or label not in self._manifest.brokers:
            return
        book = self._manifest.brokers[label]
        bounds = log.bounds()
        ends = max((span.end for span in [*book.done, *book.pending]), default=0)
        found = None
        if book.last is not None and bounds.first <= book.last.sequence < bounds.end:
            found = log.id_at(book.last.sequence)
        if ends > bounds.end or (found is not None and book.last is not None and found != book.last.id):
            raise LogReplaced(
                f"topic {self.request.topic} of the broker at {address} is not the one that was exported to "
                f"{self.request.place} before: it was deleted and made again, or lost its end. Name another folder"
            )

    def _plan_broker(self, manifest: Manifest, wanted: _Wanted) -> list[ExportTask]:
        request, label = self.request, broker_label(wanted.address)
        log = self._log(wanted.address)
        mean_bytes = wanted.bounds.mean_bytes or _FALLBACK_BYTES
        per_range = max(1, int(request.target_bytes / mean_bytes))
        if wanted.span is not None:
            per_range = min(per_range, -(-wanted.span.length // request.least_ranges))
            for span in manifest.done_within(label, wanted.span):
                self.result.skipped_ranges += 1
                self.result.skipped_messages += span.common(wanted.span)
        spans = manifest.plan(label, wanted.span, per_range)
        self.result.planned_bytes += int(sum(span.length for span in spans) * mean_bytes)
        return [
            ExportTask(
                request.place,
                request.topic,
                wanted.address,
                label,
                span,
                manifest.layout,
                request.options,
                request.tls,
                request.patience_s,
                log.folder if isinstance(log, SpoolLog) else None,
            )
            for span in spans
        ]

    # ------------------------------------------------------------------ columns

    def _layout(self) -> Layout:
        """The layout of a folder that is begun."""
        asked = self.request.layout
        if asked.body is not BodyFormat.JSON:
            return asked
        columns = infer_columns(islice(self._sample(), SAMPLE_MESSAGES), self.request.json_fields)
        return Layout(asked.partition, asked.body, tuple(columns), not self.request.json_fields)

    def _sample(self) -> Iterator[bytes]:
        """Bodies of the messages that come first."""
        for wanted in self._wanted:
            if wanted.span is None:
                continue
            end = min(wanted.span.end, wanted.span.first + SAMPLE_MESSAGES)
            for found in self._log(wanted.address).read(Span(wanted.span.first, end)):
                if isinstance(found, RecordBatch):
                    yield from found.messages.bodies()
                elif isinstance(found, SpooledRows):
                    yield from found.bodies

    def _check_layout(self, there: Layout) -> None:
        """Raises LayoutError if the folder was begun with another one."""
        asked = self.request.layout
        same = (there.partition, there.body) == (asked.partition, asked.body)
        if same and asked.body is BodyFormat.JSON and self.request.json_fields:
            types = {column.field: column.type for column in there.json_columns}
            fields = dict(self.request.json_fields)
            same = list(types) == list(fields) and all(
                kind in (None, types[name]) for name, kind in fields.items()
            )
        if not same:
            raise LayoutError(
                f"the folder {self.request.place} was begun with {_describe(there)}, and readers want all files alike: "
                "ask for the same, or name another folder"
            )

    # ------------------------------------------------------------------ the work

    def run(self, engine: Engine, tasks: Sequence[ExportTask], advance: Advance) -> None:
        """Have the tasks of a plan done, and note it, also when that fails; then move the channel.

        Raises:
            NSQError, OSError: What went wrong.
        """
        counted: set[tuple[str, Span]] = set()

        def finish(done: RangeResult) -> None:
            if (done.broker, done.span) not in counted:
                counted.add((done.broker, done.span))
                self.result.add(done)

        try:
            if tasks:
                engine(tasks, finish, advance)
        finally:
            for done in self._take_over():
                finish(done)
        for wanted in self._wanted:
            self._next[wanted.address] = max(wanted.bounds.at, self._next.get(wanted.address, 0))
        if self.request.channel is not None:
            self._move_channel(self.request.channel)

    def _move_channel(self, channel: str) -> None:
        assert self._manifest is not None
        for wanted in self._wanted:
            to = self._manifest.covered_up_to(
                broker_label(wanted.address), max(wanted.channel_at, wanted.bounds.first)
            )
            if to > wanted.channel_at:
                self._log(wanted.address).move_channel(channel, to)


def _describe(layout: Layout) -> str:
    words = []
    if layout.body is BodyFormat.TEXT:
        words.append("--text")
    if layout.body is BodyFormat.JSON:
        columns = ",".join(f"{column.field}:{column.type}" for column in layout.json_columns)
        words.append("--json" if layout.keep_rest else f"--json --columns {columns}")
    if layout.partition is not PartitionBy.NONE:
        words.append(f"--partition-by {layout.partition}")
    return " ".join(words) or "bodies as they are and no partitions"


@contextmanager
def open_export(request: ExportRequest, addresses: Sequence[str]) -> Iterator[ExportJob]:
    """Open a folder for an export; no other one may write to it meanwhile, where that can be told: on this machine.

    Args:
        request: What is wanted.
        addresses: The brokers that have the topic; nothing is made for one that is not there. None with a spool.

    Raises:
        BrokerUnreachable, RequestRefused: One of them does not have it.
        FolderBusy: There is another one.
        SpoolError: The spool cannot be used.
        ManifestError, StorageError, OSError: The folder cannot be used.
    """
    for address in addresses:
        BrokerLog(address, request.topic, request.tls, request.patience_s).bounds()
    storage = storage_at(request.place)
    with _locked(request, storage), ExitStack() as stack:
        job = ExportJob(request, storage)
        if request.spool is not None:
            stack.enter_context(job.open_spool())
        try:
            yield job
        except BaseException:
            job.sweep()
            raise


@contextmanager
def _locked(request: ExportRequest, storage: Storage) -> Iterator[None]:
    if not isinstance(storage, LocalStorage):
        yield
        return
    path = storage.folder / Path(manifest_path(request.topic)).with_name("lock")
    make_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusy(f"another export of topic {request.topic} writes to {request.place}") from None
        yield
    finally:
        os.close(fd)


def spool_folder(place: str, topic: str) -> Path | None:
    """Where an export's spool lies if it is not said: beside the books. None: they are not on this machine."""
    local = local_path(place)
    return None if local is None else local / Path(manifest_path(topic)).with_name("spool")
