"""Export one topic: plan the ranges, have an engine export them, and update the manifest."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import cast

from ...archive.manifest import ArchiveDamaged
from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.reading.broker_log import Bounds, LogReplaced
from ...log.gaps import Span
from ...storage import Lease, Storage, StorageError, absolute_place
from ..log_names import name_logs
from ..logs import ChannelLog, Log, LogPlace, damage_of, resolve, starts_of
from ..places import storage_at
from ..ranges import BrokerRanges, covered_up_to
from ..runtime.engine import Advance, Engine
from ..schemas.column_types import parse_type
from ..schemas.contracts import SchemaContract
from ..schemas.promotions import Promotion, common_type
from ..tables.merging import MergeCounts
from ..tables.target import TableOptions
from .dead_letters import check_letters_topic
from .log_queries import LogQueries, Skipped, TolerantTask
from .manifest import Manifest, RangeResult, manifest_path
from .request import ExportRequest, ExportResult
from .rolling import due_until
from .sampling import check_layout, new_layout
from .state import ExportState
from .task import ExportTask

_FALLBACK_BYTES = 256
"""The assumed size of a message if the log is empty."""


@dataclass(frozen=True, slots=True)
class _WantedSpan:
    """The part of one log to export."""

    place: LogPlace
    first: int
    """The first message to export; retention may have deleted it."""
    bounds: Bounds
    channel_at: int
    """The position of the channel; 0 without one."""
    starts: Sequence[int]
    """Where files of the log start, if they are known."""
    damage: str
    """Why newer messages are not read; empty: they are."""
    waiting: int
    """How many messages wait for `max_age_s` or for more messages."""

    @property
    def span(self) -> Span | None:
        """The messages to export, also those that are no longer retained; None if there are none."""
        return _span(self.first, self.bounds.at)

    @property
    def retained(self) -> Span | None:
        """The retained messages to export; None if there are none."""
        return _span(max(self.first, self.bounds.first), self.bounds.at)


def _span(first: int, end: int) -> Span | None:
    return Span(first, end) if first < end else None


@dataclass(slots=True)
class ExportMemory:
    """What the rounds of a continuous export remember of each other, also if each has a job of its own.

    Attributes:
        next: Where the next round starts, by label.
        ends: The identity and the end of each log that the last round has exported completely, by `LogPlace.where`.
        has_planned: Whether a round was planned; it may have had no log.
        seen: Where the logs of all plans are.
        labels: Their labels.
        late: Where the logs are that are newer than the first plan.
    """

    next: dict[str, int] = field(default_factory=dict)
    ends: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    has_planned: bool = False
    seen: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)


class ExportJob:
    """The export of one topic into one folder. Created by `open_export`."""

    def __init__(
        self,
        request: ExportRequest,
        storage: Storage,
        lease: Lease,
        logs: LogQueries | None = None,
        memory: ExportMemory | None = None,
    ) -> None:
        self.request = request
        self.result: ExportResult = ExportResult()
        self._state = ExportState(request.topic, storage, lease, evolves=request.evolves)
        self._shown = storage.shown
        self._logs = logs or LogQueries()
        self._wanted: list[_WantedSpan] = []
        self._memory = memory or ExportMemory()
        self._running: Sequence[ExportTask] = ()
        self._finished: list[RangeResult] = []  # of the running tasks
        if self._state.manifest is not None:
            check_layout(self._state.manifest.layout, request, self._shown)
            self._attach_table()
            self._finish_ranges((), counted=False)
            if request.evolves:
                fields = [(field, kind) for field, kind in request.json_fields if kind is not None]
                self._state.extend_schema(fields, request.promotion)
            for broker, first, end, reason in self._state.manifest.unreported:
                self.result.add_gap(broker, Span(first, end), reason)
        self._state.remove_unfinished()

    def _attach_table(self) -> None:
        request = self.request
        options = TableOptions(
            request.compression, request.compression_level, request.row_group_bytes, evolves=request.evolves
        )
        self._state.attach_table(request.table, options)

    @property
    def exported(self) -> Mapping[str, BrokerRanges]:
        """The exported and the planned ranges of each log, by label."""
        return self._state.brokers

    @property
    def left_elsewhere(self) -> dict[str, int]:
        """The messages that earlier jobs planned and did not export, by label, of logs that no plan of this job had."""
        return {
            label: sum(span.length for span in ranges.pending)
            for label, ranges in self.exported.items()
            if ranges.pending and label not in self._memory.seen | self._memory.labels
        }

    @property
    def waiting(self) -> int:
        """How many messages the last plan has left to a later one, because they are few and not `max_age_s` old."""
        return sum(each.waiting for each in self._wanted)

    @property
    def failures(self) -> Mapping[str, Exception]:
        """Why logs could not be read in this round, by `LogPlace.where`. All others are exported."""
        return self._logs.failures

    def mark_reported(self, outcome: ExportResult) -> None:
        """Note that a report told of the missing messages. Until then, each new job has them in its result.

        Raises ChangedMeanwhile, LeaseLost, StorageError, OSError: The manifest cannot be written.
        """
        manifest = self._state.manifest
        if manifest is not None and manifest.unreported:
            manifest.unreported = [gap for gap in manifest.unreported if gap not in outcome.gaps]
            self._state.save()

    def remove_temporary_files(self) -> None:
        """Remove the unfinished files of tasks that were killed or interrupted."""
        self._state.remove_unfinished()

    # ------------------------------------------------------------------ the plan

    def plan(self, places: Sequence[LogPlace]) -> list[ExportTask]:
        """Request the bounds of logs, and store the ranges to export in the manifest.

        Without a channel, the second and later plans continue at the end of the previous one.

        Args:
            places: The logs. Those that cannot be read get into `failures`, and have no tasks.

        Raises:
            LayoutError: No columns can be inferred.
            BodySchemaError, RegistryError: There is no schema of the bodies.
            ManifestError: The manifest cannot be used.
            TableError: The table cannot be used.
        """
        request = self.request
        wheres = {place.where for place in places}
        if self._memory.has_planned:  # the first plan may have no log
            self._memory.late |= wheres - self._memory.seen
        self._memory.has_planned = True
        self._memory.seen |= wheres
        self._note_late()
        self._logs.begin(places)
        logs = self._named(self._logs.ask(places, lambda place: (place, place.open().bounds())))
        self._note_late()
        self._memory.labels |= {place.label for place in logs}
        self._wanted = self._logs.ask(logs, self._resolve)
        damages = {each.damage for each in self._wanted if each.damage}
        self.result.unread += sorted(damages.difference(self.result.unread))
        manifest = self._state.manifest
        if manifest is None:
            spans = [(each.place, each.retained) for each in self._wanted if each.retained is not None]
            if not spans:
                for wanted in self._wanted:
                    if wanted.span is not None:
                        self.result.add_gap(wanted.place.label, wanted.span, "discarded")
                return []
            manifest = self._state.start(new_layout(request, spans), self._memory.seen | self._memory.labels)
            self._attach_table()
        elif request.schemas is not None:
            keeps_columns = request.json_fields or request.contract not in (None, SchemaContract.EVOLVE)
            schema = request.schemas.reader(request.topic)
            self._state.adopt_schema(schema, request.promotion, with_fields=not keeps_columns)
        self._state.check_names(each.place.label for each in self._wanted)
        tasks: list[ExportTask] = []
        for wanted in self._wanted:
            tasks += self._plan_broker(manifest, wanted)
        self._state.save()
        return tasks

    def _note_late(self) -> None:
        """Note the logs whose topic does not exist yet."""
        self._memory.late |= {
            where
            for where, error in self.failures.items()
            if isinstance(error, RequestRefused) and error.is_without_topic
        }

    def _named(self, found: Sequence[tuple[LogPlace, Bounds]]) -> list[LogPlace]:
        """Give each log the label that its files have, wherever it was then; leave out a log that was found twice.

        Logs that cannot be read get into `failures`.
        """
        logs = name_logs(found, {label: ranges.mark for label, ranges in self.exported.items()})
        for place, error in logs.failures:
            self._logs.failed(place, error)
        # A known log that is not found may be at the address that another one had before.
        are_all_found = self.exported.keys() <= logs.places.keys()
        for label, place in logs.places.items():
            if (
                are_all_found
                and label != place.where
                and label not in {each.where for each in logs.places.values()}
            ):
                self._logs.found_elsewhere(label)
        return list(logs.places.values())

    def _resolve(self, place: LogPlace) -> _WantedSpan:
        """Determine the sequences of one log to export. Called in a thread."""
        request, log = self.request, place.open()
        bounds, end = resolve(
            log, request.end
        )  # fails if the topic does not exist: `open_channel` would create it
        self._check_same_log(place, log, bounds)
        channel_at = 0
        if request.channel is not None and request.has_position_of_channel:
            first = channel_at = self._open_channel(place, request.channel, bounds.first)
        elif place.label in self._memory.next:
            first = self._memory.next[place.label]
        else:
            _, first = resolve(log, request.first)
        ranges = self._state.ranges_of(place.label)
        if not request.has_position_of_channel and request.first == "earliest" and ranges.planned:
            first = min(first, ranges.end)  # retention may have deleted messages since the last run
        if request.channel is not None and request.channel_only_keeps:
            channel_at = self._keep_from(place, request.channel, max(first, bounds.first))
        bounds = bounds._replace(at=min(bounds.at, end))  # it may be before the oldest retained message
        waiting = 0
        if request.max_age_s is not None:
            planned_to = max(first, ranges.end)  # pending ranges do not wait
            due = due_until(log, planned_to, bounds, self._per_range(bounds), request.max_age_s)
            waiting = max(0, bounds.at - due)
            bounds = bounds._replace(at=min(bounds.at, due))
        return _WantedSpan(place, first, bounds, channel_at, starts_of(log), damage_of(log), waiting)

    def _open_channel(self, place: LogPlace, channel: str, oldest: int) -> int:
        """Create the channel if it does not exist, and return its position; `oldest` is the log's first message."""
        log = _with_channels(place)
        is_new = place.where in self._memory.late and not log.has_channel(channel)
        at = log.open_channel(channel)
        if is_new and oldest < at:
            # All its messages were published while the job ran, and a new channel begins after them.
            log.move_channel(channel, oldest)
            at = oldest
        return at

    def _keep_from(self, place: LogPlace, channel: str, sequence: int) -> int:
        """Have the channel keep the messages from a sequence on, and return its position."""
        log = _with_channels(place)
        at = log.open_channel(channel)
        if at > sequence:
            log.move_channel(channel, sequence)
        return min(at, sequence)

    def _check_same_log(self, place: LogPlace, log: Log, bounds: Bounds) -> None:
        """Check that the messages in the folder are from this log.

        Raises:
            LogReplaced: They are not.
            ArchiveDamaged: The log does not have them, because an object is damaged.
        """
        ranges = self._state.ranges_of(place.label)
        if ranges.planned and not ranges.mark.continues(log, bounds):
            if damage := damage_of(log):
                raise ArchiveDamaged(damage)
            raise LogReplaced(
                f"topic {self.request.topic} of the broker at {place.where} is not the one that was exported to "
                f"{self._shown} before: it was deleted and recreated, or lost its last messages, or another "
                "broker has this address now. Choose another folder"
            )

    def _plan_broker(self, manifest: Manifest, wanted: _WantedSpan) -> list[ExportTask]:
        label = wanted.place.label
        request = replace(self.request, place=absolute_place(self.request.place))
        mean_bytes = wanted.bounds.mean_bytes or _FALLBACK_BYTES
        per_range = self._per_range(wanted.bounds)
        if wanted.retained is not None:
            per_range = min(per_range, -(-wanted.retained.length // request.min_ranges))
            for span in manifest.ranges_of(label).done:
                self.result.skipped_messages += span.common(wanted.retained)
        kept_from = wanted.bounds.first
        begun = set(manifest.ranges_of(label).pending)
        spans = manifest.plan(label, wanted.span, per_range, wanted.starts, kept_from)
        planned = sum(max(0, span.end - max(span.first, kept_from)) for span in spans)
        self.result.planned_bytes += int(planned * mean_bytes)
        manifest.ranges_of(label).incarnation = (
            wanted.bounds.incarnation or manifest.ranges_of(label).incarnation
        )
        pending = manifest.ranges_of(label).pending
        return [
            ExportTask(
                request,
                manifest.layouts[pending[span]],
                wanted.place,
                span,
                pending[span],
                manifest.id,
                is_repeated=span in begun,
            )
            for span in spans
        ]

    def _per_range(self, bounds: Bounds) -> int:
        """Return how many messages a range of the target size has."""
        return max(1, int(self.request.target_bytes / (bounds.mean_bytes or _FALLBACK_BYTES)))

    # ------------------------------------------------------------------ running

    def run(self, engine: Engine, tasks: Sequence[ExportTask], advance: Advance) -> None:
        """Run the tasks of a plan, then move the channel. Updates the manifest even if a task fails.

        If a log cannot be read any longer, it gets into `failures`, and its other ranges wait for the next plan.

        Raises:
            NSQError, OSError: A task failed for another reason.
        """
        left = tasks
        while True:
            attempts = self.begin(left, secrets.token_hex(4))
            try:
                if attempts:
                    engine(attempts, self.collect, advance)
            finally:
                self.reconcile()
            if not (left := self.to_repeat()):
                break
        self.complete()

    def begin(self, tasks: Sequence[ExportTask], plan: str) -> list[TolerantTask]:
        """Return what an engine has to run for tasks of the plan; `plan` is the one of `TolerantTask`."""
        self._running, self._finished = tasks, []
        return [TolerantTask(task, plan) for task in tasks]

    def collect(self, outcome: RangeResult | Skipped) -> None:
        """Take the result of what `begin` has returned."""
        if isinstance(outcome, RangeResult):
            self._finished.append(outcome)
            return
        place = next(task.log for task in self._running if task.broker == outcome.broker)
        if place.where not in self.failures:
            self._logs.failed(place, outcome.error)

    def reconcile(self) -> None:
        """Bring the collected results into the manifest and the table. Raises the errors of `ExportState.commit`."""
        self._finish_ranges([each for each in self._finished if not each.widen], counted=True)
        self._finished = [each for each in self._finished if each.widen]
        self.result.new_columns, self._state.new_columns = (
            self.result.new_columns | self._state.new_columns,
            {},
        )
        self.result.widened += self._state.widened
        self._state.widened = []

    def _finish_ranges(self, known: Sequence[RangeResult], *, counted: bool) -> None:
        """Bring results into the manifest and the table, also those of a killed run."""
        state = self._state
        while True:
            for result in state.reconcile(known):
                if counted:
                    self.result.add(result)
            state.commit()
            if not state.has_more:
                break
        self.result.upserted += state.merged.upserted
        self.result.deleted += state.merged.deleted
        self.result.outdated += state.merged.outdated
        state.merged = MergeCounts()

    def to_repeat(self) -> list[ExportTask]:
        """Return the tasks to begin again, with a new layout, because their values need wider columns."""
        unwritten = {(each.broker, each.span): each.widen for each in self._finished if each.widen}
        if not unwritten:
            return []
        self.result.widened += self._state.widen_schema(self._wider_types(unwritten.values()))
        manifest = self._state.manifest
        assert manifest is not None
        return [
            replace(task, layout=manifest.layout, layout_index=len(manifest.layouts) - 1)
            for task in self._running
            if (task.broker, task.span) in unwritten
        ]

    def _wider_types(self, found: Iterable[Mapping[str, str]]) -> dict[str, str]:
        """Return the types that columns need for the values of several tasks."""
        by = self.request.promotion or Promotion.FILES
        types: dict[str, str] = {}
        for widen in found:
            for name, kind in widen.items():
                before = parse_type(types.get(name, kind))
                common = common_type(before, parse_type(kind), by)
                types[name] = (common or before).value
        return types

    def complete(self) -> None:
        """Move the channel, when all tasks of the plan have ended, and compact the table."""
        self._memory.ends.clear()
        for wanted in self._wanted:
            if wanted.place.where not in self.failures:
                self._finish(wanted)
        if self.request.compact:
            self.result.compacted += self._state.compact().replaced

    def _finish(self, wanted: _WantedSpan) -> None:
        """Remember where the next round starts, and move the channel past the exported messages."""
        channel, place = self.request.channel, wanted.place
        self._memory.next[place.label] = max(wanted.bounds.at, self._memory.next.get(place.label, 0))
        first = max(wanted.channel_at, wanted.bounds.first)
        to = covered_up_to(first, self._state.ranges_of(place.label).done)
        if channel is not None and to > wanted.channel_at:
            try:
                _with_channels(place).move_channel(channel, to)
            except (BrokerUnreachable, RequestRefused) as exc:
                self._logs.failed(place, exc)
                return
        self._memory.ends[place.where] = wanted.bounds.incarnation, wanted.bounds.at


def _with_channels(place: LogPlace) -> ChannelLog:
    """Open a log whose channels have positions: only those are exported by channel."""
    return cast(ChannelLog, place.open())


@contextmanager
def open_export(
    request: ExportRequest,
    places: Sequence[LogPlace],
    *,
    waits_for: Callable[[Exception], bool] = lambda _: False,
    memory: ExportMemory | None = None,
    unreachable: dict[str, Exception] | None = None,
) -> Iterator[ExportJob]:
    """Open a folder for an export. It is locked against other exports.

    Args:
        places: The logs. Logs that cannot be read are in the job's `failures`.
        waits_for: Whether a later plan may succeed after an error of a log; then no log need be readable now.
        memory: What earlier jobs of the same continuous export remember.
        unreachable: See `LogQueries`.

    Raises:
        BrokerUnreachable, RequestRefused: No log can be read.
        LayoutError: The folder has another layout.
        ManifestError, StorageError, OSError: The folder cannot be used, or another export writes to it.
        TableError: The table cannot be used.
    """
    if request.dead_letter_topic is not None:
        check_letters_topic(request.dead_letter_topic, request.topic)
    logs = LogQueries(unreachable)
    logs.begin(places)
    if not logs.ask(places, lambda place: place.open().bounds()):
        for error in logs.failures.values():
            if not waits_for(error):
                logs.close()
                raise error
    storage = storage_at(request.place)

    def if_held(holder: str) -> StorageError:
        return StorageError(
            f"another export of topic {request.topic} writes to {storage.shown}: {holder}. Wait for it, or stop it"
        )

    with ExitStack() as stack:
        stack.callback(logs.close)
        lock = PurePosixPath(manifest_path(request.topic)).with_name("lock")
        lease = stack.enter_context(storage.hold(str(lock), if_held))
        job = ExportJob(request, storage, lease, logs, memory)
        try:
            yield job
        except BaseException:
            job.remove_temporary_files()
            raise
