"""Export one topic: plan the ranges, have an engine export them, and update the manifest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import cast

from ...client.reading.broker_log import Bounds, LogReplaced
from ...log.gaps import Span
from ..logs import ChannelLog, LogPlace, SegmentedLog
from ..ranges import BrokerRanges, covered_up_to, subtract
from ..runtime.engine import Advance, Engine
from ..storage import Lease, Storage, StorageError, storage_at
from ..tables.target import TableOptions
from .books import Books
from .manifest import Manifest, RangeResult, manifest_path
from .request import ExportRequest, ExportResult
from .sampling import check_layout, new_layout
from .task import ExportTask

_FALLBACK_BYTES = 256
"""The assumed size of a message if the log is empty."""


@dataclass(frozen=True, slots=True)
class _WantedSpan:
    """The part of one log to export."""

    place: LogPlace
    span: Span | None
    bounds: Bounds
    channel_at: int
    """The position of the channel; 0 without one."""


class ExportJob:
    """The export of one topic into one folder. Created by `open_export`."""

    def __init__(self, request: ExportRequest, storage: Storage, lease: Lease) -> None:
        self.request = request
        self.result = ExportResult()
        self._books = Books(request.topic, storage, lease)
        self._shown = storage.shown
        self._wanted: list[_WantedSpan] = []
        self._next: dict[str, int] = {}  # by label: where the next round starts
        if self._books.manifest is not None:
            check_layout(self._books.manifest.layout, request, self._shown)
            self._use_table()
            self._books.settle()
            self._books.commit()
        self._books.remove_unfinished()

    def _use_table(self) -> None:
        request = self.request
        options = TableOptions(request.compression, request.compression_level, request.row_group_bytes)
        self._books.use_table(request.table, options)

    @property
    def exported(self) -> Mapping[str, BrokerRanges]:
        """The exported and the planned ranges of each log, by label."""
        return self._books.brokers

    def remove_temporary_files(self) -> None:
        """Remove the unfinished files of tasks that were killed or interrupted."""
        self._books.remove_unfinished()

    # ------------------------------------------------------------------ the plan

    def plan(self, places: Sequence[LogPlace]) -> list[ExportTask]:
        """Request the bounds of logs, and store the ranges to export in the manifest.

        Without a channel, the second and later plans continue at the end of the previous one.

        Args:
            places: The logs.

        Raises:
            BrokerUnreachable, RequestRefused: A broker does not answer.
            LogReplaced: Another log was exported to the folder before.
            LayoutError: No columns can be inferred.
            ManifestError: The manifest cannot be used.
            TableError: The table cannot be used.
        """
        request = self.request
        self._wanted = [self._resolve(place) for place in places]
        manifest = self._books.manifest
        if manifest is None:
            spans = [(each.place, each.span) for each in self._wanted if each.span is not None]
            manifest = self._books.start(new_layout(request, spans))
            self._use_table()
        tasks: list[ExportTask] = []
        for wanted in self._wanted:
            tasks += self._plan_broker(manifest, wanted)
        self.result.planned_ranges += len(tasks)
        self.result.planned_messages += sum(task.messages for task in tasks)
        self._books.save()
        return tasks

    def _resolve(self, place: LogPlace) -> _WantedSpan:
        """Determine the sequences of one log to export."""
        request, log = self.request, place.open()
        self._check_same_log(place)
        channel_at = 0
        if request.channel is not None:
            log.bounds()  # fails if the topic does not exist: `open_channel` would create it
            first = channel_at = _with_channels(place).open_channel(request.channel)
        elif place.label in self._next:
            first = self._next[place.label]
        elif request.first.isdecimal():
            first = int(request.first)
        else:
            first = log.bounds(request.first).at
        bounds = log.bounds(request.end)
        if first < bounds.first:
            # Retention has deleted these messages; some may have been exported before.
            for lost in subtract(Span(first, bounds.first), self._books.ranges_of(place.label).planned):
                self.result.add_gap(place.label, lost, "discarded")
        span = Span(max(first, bounds.first), bounds.at)
        return _WantedSpan(place, span if span.length > 0 else None, bounds, channel_at)

    def _check_same_log(self, place: LogPlace) -> None:
        """Check that the messages in the folder are from this log. Raises LogReplaced."""
        ranges = self._books.ranges_of(place.label)
        if not ranges.planned:
            return
        log = place.open()
        bounds, last = log.bounds(), ranges.last
        replaced = ranges.end > bounds.end
        if last is not None and bounds.first <= last.sequence < bounds.end:
            replaced |= log.id_at(last.sequence) not in (None, last.id)
        if replaced:
            raise LogReplaced(
                f"topic {self.request.topic} of the broker at {place.label} is not the one that was exported to "
                f"{self._shown} before: it was deleted and recreated, or lost its last messages. Choose "
                "another folder"
            )

    def _plan_broker(self, manifest: Manifest, wanted: _WantedSpan) -> list[ExportTask]:
        request, label = self.request, wanted.place.label
        mean_bytes = wanted.bounds.mean_bytes or _FALLBACK_BYTES
        per_range = max(1, int(request.target_bytes / mean_bytes))
        if wanted.span is not None:
            per_range = min(per_range, -(-wanted.span.length // request.min_ranges))
            for span in manifest.ranges_of(label).done:
                if span.overlaps(wanted.span):
                    self.result.skipped_messages += span.common(wanted.span)
        log = wanted.place.open()
        starts = log.starts() if isinstance(log, SegmentedLog) else ()
        spans = manifest.plan(label, wanted.span, per_range, starts)
        self.result.planned_bytes += int(sum(span.length for span in spans) * mean_bytes)
        pending = manifest.ranges_of(label).pending
        return [
            ExportTask(request, manifest.layouts[pending[span]], wanted.place, span, pending[span])
            for span in spans
        ]

    # ------------------------------------------------------------------ running

    def run(self, engine: Engine, tasks: Sequence[ExportTask], advance: Advance) -> None:
        """Run the tasks of a plan, then move the channel. Updates the manifest even if a task fails.

        Raises:
            NSQError, OSError: A task failed.
        """
        left = self._run_tasks(engine, tasks, advance)
        while left:
            left = self._run_tasks(engine, left, advance)
        channel = self.request.channel
        for wanted in self._wanted:
            label = wanted.place.label
            self._next[label] = max(wanted.bounds.at, self._next.get(label, 0))
            first = max(wanted.channel_at, wanted.bounds.first)
            to = covered_up_to(first, self._books.ranges_of(label).done)
            if channel is not None and to > wanted.channel_at:
                _with_channels(wanted.place).move_channel(channel, to)
        if self.request.compact:
            self.result.compacted += self._books.compact().replaced

    def _run_tasks(self, engine: Engine, tasks: Sequence[ExportTask], advance: Advance) -> list[ExportTask]:
        """Run tasks once. Return those to run again, with a new layout, because their values need wider columns."""
        finished: list[RangeResult] = []
        try:
            if tasks:
                engine(tasks, finished.append, advance)
        finally:
            for result in self._books.settle([each for each in finished if not each.widen]):
                self.result.add(result)
            self._books.commit()
        unwritten = {(each.broker, each.span): each.widen for each in finished if each.widen}
        if not unwritten:
            return []
        types = {field: kind for widen in unwritten.values() for field, kind in widen.items()}
        self.result.widened += self._books.widen(types)
        manifest = self._books.manifest
        assert manifest is not None
        return [
            replace(task, layout=manifest.layout, layout_index=len(manifest.layouts) - 1)
            for task in tasks
            if (task.broker, task.span) in unwritten
        ]


def _with_channels(place: LogPlace) -> ChannelLog:
    """Open a log whose channels have positions: only those are exported by channel."""
    return cast(ChannelLog, place.open())


@contextmanager
def open_export(request: ExportRequest, places: Sequence[LogPlace]) -> Iterator[ExportJob]:
    """Open a folder for an export. A local folder is locked against other exports on this machine.

    Args:
        places: The logs that must have the topic.

    Raises:
        BrokerUnreachable, RequestRefused: A broker does not have the topic.
        LayoutError: The folder has another layout.
        ManifestError, StorageError, OSError: The folder cannot be used, or another export writes to it.
        TableError: The table cannot be used.
    """
    for place in places:
        place.open().bounds()
    storage = storage_at(request.place)

    def if_held(holder: str) -> StorageError:
        return StorageError(f"another export of topic {request.topic} writes to {storage.shown}: {holder}")

    with ExitStack() as stack:
        lock = PurePosixPath(manifest_path(request.topic)).with_name("lock")
        lease = stack.enter_context(storage.hold(str(lock), if_held))
        job = ExportJob(request, storage, lease)
        try:
            yield job
        except BaseException:
            job.remove_temporary_files()
            raise
