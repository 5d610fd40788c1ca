"""The reader of `spark.readStream.format("nsq")`.

One reader on the driver returns offsets and partitions; copies of another reader read in the tasks. So a partition has
everything that its task needs. Two offsets determine the messages between them, so a repeated batch has the same rows.

A broker that does not answer keeps its position, and the batches have the messages of the others. Its messages are read
when it answers again. Only a batch that was planned before waits for it, because its rows are determined.
"""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from ...client.errors import BrokerUnreachable
from ...client.reading.broker_log import Bounds, LogReplaced
from ...log.gaps import Span
from ..logs import LogPlace
from ..versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from .columns import RowFormat
from .fan_out_query import FanOutQuery
from .fleet import Fleet, LogKey, ask_all_logs, ask_logs, check_topics
from .located import Located, bounds_at, is_address, locate
from .log_probes import LogProbes, ProbedLog, advance, fixed
from .offsets import (
    LogOffset,
    LogOffsets,
    NotReached,
    Offset,
    build_offset,
    by_topic,
    parse_offset,
    share_limit,
)
from .options import ReadOptions, SourceError, TriggerLimits
from .partitions import NsqPartition, make_partitions, read_partition
from .progress import Progress

_WAITS = "its messages are read when it answers again"
_PLANNED = "a batch that was planned before waits for it"
_PAUSE_S = 0.1
"""The pause when no broker has new messages: without it, Spark would query them a hundred times a second."""


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream. `read` runs in the tasks, everything else on the driver."""

    def __init__(self, options: ReadOptions, form: RowFormat) -> None:
        self._options = options
        self._form = form
        self._fleet = Fleet(options)
        self._places: dict[LogKey, LogPlace] = {}
        self._find_again_s = 0.0  # on the monotonic clock, like all times here
        self._targets: dict[LogKey, int] | None = None  # ends of the logs for Trigger.AvailableNow
        self._probes = LogProbes(options, is_fixed=self._fleet.is_fixed)
        self._progress = Progress()
        self._last_batch_s: float | None = None
        self._nothing_until_s = 0.0  # no request before
        self._located: Located | None = None  # None: to be found
        self._away: dict[str, BrokerUnreachable] = {}
        self._locating: FanOutQuery[str, dict[LogKey, Bounds]] = FanOutQuery(_WAITS, self._away)
        self._probing: FanOutQuery[str, dict[LogKey, ProbedLog]] = FanOutQuery(_WAITS, self._away)
        self._advancing: FanOutQuery[str, dict[LogKey, LogOffset]] = FanOutQuery(_WAITS)

    # ------------------------------------------------------------------ what Spark calls

    def initialOffset(self) -> Offset:
        """Return an empty offset."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return a limit of the options. `latestOffset` applies all of them."""
        limits = self._options.limits
        if limits.max_offsets is not None:
            return ReadMaxRows(limits.max_offsets)
        if limits.max_bytes is not None:
            return ReadMaxBytes(limits.max_bytes)
        return ReadMinRows(limits.min_offsets) if limits.min_offsets else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query. Brokers that do not answer for `patience_s` are left out.

        Raises:
            BrokerUnreachable: No broker answers.
        """
        self._places = self._fleet.find(waits_for_all=True)
        self._find_again_s = float("inf")
        query: FanOutQuery[str, dict[LogKey, Bounds]] = FanOutQuery("this query ends without its messages")
        answers = ask_logs(query, self._places, bounds_at, self._options.patience_s, waits_for_all=True)
        self._targets = {key: bounds.end for key, bounds in answers.found.items()}
        away = {key.broker: error for key, error in answers.away.items()}
        self._probing.assume_away(away)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next batch; `start`, unchanged, if there is nothing to read.

        Raises:
            SourceError: Messages are lost, a broker was removed from the options, or there is no such topic.
            LogReplaced: A log is not the one that was read before.
            BrokerUnreachable: No broker answered for `patience_s`, or another log is at the address of a known one,
                which may be at an address that does not answer.
        """
        before = parse_offset(start, self._options.subscription)
        # With Trigger.Once, Spark asks for everything.
        limits = TriggerLimits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        return build_offset(self.next_offsets(before, limits), self._options.subscription)

    def reportLatestOffset(self) -> Offset | None:
        """Return the ends of the logs and the lag, which the progress of a query shows as `latestOffset`."""
        return by_topic(self._progress.report(), self._options.subscription) or None

    def partitions(self, start: Offset, end: Offset) -> list[NsqPartition]:
        """Return the ranges between two offsets.

        Raises:
            BrokerUnreachable: A broker that has messages of the batch, or may have, did not answer for `patience_s`.
            SourceError, LogReplaced: As for `latestOffset`: the plan may be old.
        """
        subscription = self._options.subscription
        return self._plan(parse_offset(start, subscription), parse_offset(end, subscription))

    def _plan(self, before: LogOffsets, after: LogOffsets) -> list[NsqPartition]:
        options = self._options
        spans: dict[LogKey, tuple[Span, LogOffset]] = {}
        for key, position in after.items():
            if isinstance(position, LogOffset):
                known = before.get(key)
                first = known.sequence if isinstance(known, LogOffset) else position.first
                if first < position.sequence:
                    spans[key] = Span(first, position.sequence), position
        wanted = self._planned_places(after, spans)
        sized = ask_all_logs(
            wanted,
            lambda key, place: self._probes.sized(key, place, *spans[key]),
            options.patience_s,
            _PLANNED,
        )
        return make_partitions(sized, options.min_partitions, options.max_records)

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Read a range as Arrow batches. Raises the errors of `read_partition`."""
        return read_partition(partition, self._form, fails=self._options.fail_on_data_loss)

    # ------------------------------------------------------------------ the next batch

    def next_offsets(self, before: LogOffsets, limits: TriggerLimits) -> LogOffsets:
        """Return where the next batch ends. Raises the errors of `latestOffset`."""
        time.sleep(max(0.0, self._nothing_until_s - time.monotonic()))
        try:
            return self._next_offsets(before, limits)
        except LogReplaced as error:
            if self._located is None:
                raise
            # The brokers may have other addresses now. Late answers are about the former ones.
            self._located, self._probing = None, FanOutQuery(_WAITS, self._away)
            located = self._located_for(before, before)
            if located.strangers and located.away is not None:
                raise located.away from error
            return self._next_offsets(before, limits)

    def _next_offsets(self, before: LogOffsets, limits: TriggerLimits) -> LogOffsets:
        located = self._locate(before)
        places = located.places
        before = {key: position for key, position in before.items() if key not in located.aliases}
        probed = ask_logs(
            self._probing,
            places,
            partial(self._probes.probe, before),
            self._options.patience_s,
            waits_for_all=self._targets is not None,
        )
        if probed.away or not located.are_sure or located.aliases:
            self._located = None
        after = dict(before)
        for key in places:
            if key in probed.away and key not in before:
                after[key] = NotReached(fixed(self._probes.starting_position(key, is_first=not before)))
            elif key not in probed.away and key not in probed.found:
                after.pop(key, None)  # the broker does not have the topic, or not any more
        check_topics(self._options, [*after, *probed.found])
        ends = {key: self._end_for(places[key], key, probe) for key, probe in probed.found.items()}
        available = {key: max(0, ends[key] - probe.offset.sequence) for key, probe in probed.found.items()}
        counts = self._counts(available, limits)
        moved = {
            key: probe
            for key, probe in probed.found.items()
            if counts[key] or not isinstance(before.get(key), LogOffset)
        }
        sizes = self._quotas(counts, moved, limits)
        advanced = ask_logs(
            self._advancing,
            {key: places[key] for key in moved},
            lambda key, place: advance(place.open(), moved[key], counts[key], sizes.get(key)),
            self._options.patience_s,
        )
        after |= advanced.found
        self._probes.ends |= {key: probe.bounds.end for key, probe in probed.found.items()}
        self._progress.update(after, self._probes.ends, probed.away | advanced.away)
        now_s = time.monotonic()
        if after == before:
            self._nothing_until_s = now_s + _PAUSE_S
        else:
            self._last_batch_s = now_s
        return after

    def _counts(self, available: dict[LogKey, int], limits: TriggerLimits) -> dict[LogKey, int]:
        """Return how many messages of each log the next batch has at most."""
        waits_s = (
            0.0 if self._last_batch_s is None else self._last_batch_s + limits.max_delay_s - time.monotonic()
        )
        if self._targets is None and waits_s > 0 and sum(available.values()) < limits.min_offsets:
            return dict.fromkeys(available, 0)
        return share_limit(available, limits.max_offsets)

    def _quotas(
        self, counts: dict[LogKey, int], probed: dict[LogKey, ProbedLog], limits: TriggerLimits
    ) -> dict[LogKey, int]:
        """Return the most bytes of each log in the next batch; empty: no limit."""
        if limits.max_bytes is None:
            return {}
        sizes = {
            key: probe.bounds.bytes_ahead * counts[key] // max(1, probe.bounds.end - probe.offset.sequence)
            for key, probe in probed.items()
        }
        return {key: share or 1 for key, share in share_limit(sizes, limits.max_bytes).items()}

    def _end_for(self, place: LogPlace, key: LogKey, probe: ProbedLog) -> int:
        if self._targets is None:
            return probe.bounds.end
        at_place = LogKey(key.topic, place.where)
        return min(probe.bounds.end, self._targets.get(at_place, probe.offset.sequence))

    # ------------------------------------------------------------------ logs

    def _locate(self, before: LogOffsets) -> Located:
        """Return where to read each log: those that are found, and those of the checkpoint."""
        now_s = time.monotonic()
        if not self._places or (not self._fleet.is_fixed and now_s >= self._find_again_s):
            found = self._fleet.find()
            if found.keys() != self._places.keys():
                self._located = None
            self._places = found
            self._find_again_s = now_s + self._options.discovery_interval_s
        if self._located is None:
            self._located = self._located_in(before)
        self._check_removed(before, self._located)
        return self._located

    def _located_in(self, offset: LogOffsets, waiting: Fleet | None = None) -> Located:
        """Ask all places for their logs, and find those of an offset. Raises the errors of `locate`.

        Args:
            waiting: Wait for all places, and for all servers of this fleet, also for those that were away before.
        """
        fleet, locating = waiting or self._fleet, self._locating
        if waiting is not None:
            self._places |= waiting.find(waits_for_all=True)
            locating = FanOutQuery(_PLANNED)
        others = [key for key in offset if key not in self._places and self._is_read(key) and is_address(key)]
        # `place` lists folders if segments are read.
        places = {key: self._options.place(*key) for key in others} | self._places
        answers = ask_logs(
            locating, places, bounds_at, self._options.patience_s, waits_for_all=waiting is not None
        )
        located = locate(places, answers.found, answers.away, offset)
        located.away = located.away or next(iter(fleet.away.values()), None)
        return located

    def _located_for(self, offset: LogOffsets, wanted: Iterable[LogKey]) -> Located:
        """Return where to read the logs of an offset; wait for those of a batch."""
        if not self._places:
            self._places = self._fleet.find()
        for waiting in (None, Fleet(self._options)):
            if self._located is None or not all(map(self._located.has, wanted)):
                self._located = self._located_in(offset, waiting)
        assert self._located is not None
        return self._located

    def _planned_places(self, offset: LogOffsets, keys: Iterable[LogKey]) -> dict[LogKey, LogPlace]:
        """Return where to read logs of an offset, for a batch that waits for them; without those that are removed.

        Raises:
            BrokerUnreachable: A log is not found, and a place where it may be did not answer for `patience_s`.
            SourceError: See `_check_removed`.
        """
        options = self._options
        wanted = [key for key in keys if options.subscription.includes(key.topic)]
        located = self._located_for(offset, wanted)
        self._check_removed(offset, located)
        if located.away is not None and not all(map(located.has, wanted)):
            raise located.away
        return {
            key: located.places.get(key) or options.place(*key)
            for key in wanted
            if key in located.places or self._is_read(key)
        }

    def _is_read(self, key: LogKey) -> bool:
        """Whether the options allow to read a log of the checkpoint."""
        options = self._options
        return options.subscription.includes(key.topic) and (
            key.broker in options.brokers or bool(options.lookupds or options.segments)
        )

    def _check_removed(self, before: LogOffsets, located: Located) -> None:
        """Check that the query reads all logs of an offset, at whatever addresses, also those that did not answer."""
        options = self._options
        may_be_unknown = options.lookupds or options.segments
        removed = sorted(
            key
            for key, position in before.items()
            if key not in located.places
            and key not in located.aliases
            and not (self._is_read(key) and (may_be_unknown or isinstance(position, NotReached)))
        )
        topics = sorted({key.topic for key in removed if not options.subscription.includes(key.topic)})
        if not removed or not options.fail_on_data_loss or (located.away and not topics):
            return
        if topics:
            what, option = f"topic {', '.join(topics)}", "the query does not subscribe to"
        else:
            brokers = sorted({key.broker for key in removed})
            what, option = f"broker {', '.join(brokers)}", "nsqdHttpAddress does not have"
        raise SourceError(
            f"the checkpoint has the {what}, which {option}: add it, or set failOnDataLoss=false to continue without it"
        )
