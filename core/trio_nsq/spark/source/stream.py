"""The reader of `spark.readStream.format("nsq")`.

One reader on the driver returns offsets and partitions; copies of another reader read in the tasks. So a partition has
everything that its task needs. Two offsets determine the messages between them, so a repeated batch has the same rows.

A broker that does not answer keeps its position, and the batches have the messages of the others. Its messages are read
when it answers again. Only a batch that was planned before waits for it, because its rows are determined.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from ...client.errors import RequestRefused
from ...client.reading.broker_log import Bounds
from ...durations import parse_duration_ns
from ...log.gaps import Span
from ..logs import ChannelLog, Log, LogPlace, is_without_topic
from ..options import OptionError
from ..versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from .columns import RowFormat
from .fleet import Fleet, LogKey, ask_logs, check_topics
from .inquiry import Inquiry
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
from .options import ReadOptions, SourceError, TriggerLimits, position_on
from .partitions import (
    NsqPartition,
    SizedSpan,
    log_replaced,
    make_partitions,
    read_partition,
    size_of,
    starts_of,
    without_lost,
)
from .progress import Progress
from .sizes import count_within

_PAUSE_S = 0.1
"""The pause when no broker has new messages: without it, Spark would query them a hundred times a second."""
_NS_PER_S = 10**9


@dataclass(frozen=True, slots=True)
class _Look:
    """What a broker answered about a log.

    Attributes:
        bounds: The bounds of the log, with the position `offset`.
        offset: Where the next batch starts.
    """

    bounds: Bounds
    offset: LogOffset


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream. `read` runs in the tasks, everything else on the driver."""

    def __init__(self, options: ReadOptions, form: RowFormat) -> None:
        self._options = options
        self._form = form
        self._fleet = Fleet(options)
        self._places: dict[LogKey, LogPlace] = {}
        self._find_again_s = 0.0  # on the monotonic clock, like all times here
        self._targets: dict[LogKey, int] | None = None  # ends of the logs for Trigger.AvailableNow
        self._ends: dict[LogKey, int] = {}  # ends of the logs, as of the last answers
        self._channels: dict[LogKey, int] = {}  # where this process has moved the channel
        self._progress = Progress()
        self._last_batch_s: float | None = None
        self._nothing_until_s = 0.0  # no request before
        waits = "its messages are read when it answers again"
        self._looking: Inquiry[str, dict[LogKey, _Look]] = Inquiry(waits)
        self._advancing: Inquiry[str, dict[LogKey, LogOffset]] = Inquiry(waits)

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
        inquiry: Inquiry[str, dict[LogKey, int]] = Inquiry("this query ends without its messages")
        answers = ask_logs(inquiry, self._places, _end_of, self._options.patience_s, waits_for_all=True)
        self._targets = answers.found
        away = {key.broker: error for key, error in answers.away.items()}
        self._looking.assume_away(away)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next batch; `start`, unchanged, if there is nothing to read.

        Raises:
            SourceError: Messages are lost, a broker was removed from the options, or there is no such topic.
            LogReplaced: A log is not the one that was read before.
            BrokerUnreachable: No broker answered for `patience_s`.
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
            BrokerUnreachable: A broker with messages of the batch did not answer for `patience_s`.
            SourceError, LogReplaced: As for `latestOffset`: the plan may be old.
        """
        options = self._options
        before, after = parse_offset(start, options.subscription), parse_offset(end, options.subscription)
        self._check_removed(after)
        wanted: dict[LogKey, LogPlace] = {}
        spans: dict[LogKey, tuple[Span, LogOffset]] = {}
        for key, position in after.items():
            if isinstance(position, LogOffset) and self._is_read(key):
                known = before.get(key)
                first = known.sequence if isinstance(known, LogOffset) else position.first
                if first < position.sequence:
                    spans[key] = Span(first, position.sequence), position
                    wanted[key] = self._places.get(key) or options.place(*key)
        inquiry: Inquiry[str, dict[LogKey, SizedSpan]] = Inquiry(
            "a batch that was planned before waits for it"
        )
        answers = ask_logs(
            inquiry,
            wanted,
            lambda key, place: self._sized(key, place, *spans[key]),
            options.patience_s,
            waits_for_all=True,
        )
        for error in answers.away.values():
            raise error
        return make_partitions(answers.found, options.min_partitions)

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Read a range as Arrow batches. Raises the errors of `read_partition`."""
        return read_partition(partition, self._form, fails=self._options.fail_on_data_loss)

    # ------------------------------------------------------------------ the next batch

    def next_offsets(self, before: LogOffsets, limits: TriggerLimits) -> LogOffsets:
        """Return where the next batch ends. Raises the errors of `latestOffset`."""
        time.sleep(max(0.0, self._nothing_until_s - time.monotonic()))
        places = self._logs(before)
        looks = ask_logs(
            self._looking,
            places,
            partial(self._look, before),
            self._options.patience_s,
            waits_for_all=self._targets is not None,
        )
        after = dict(before)
        for key in places:
            if key in looks.away and key not in before:
                after[key] = NotReached(_fixed(self._starting_position(key, is_first=not before)))
            elif key not in looks.away and key not in looks.found:
                after.pop(key, None)  # the broker does not have the topic, or not any more
        check_topics(self._options, [*after, *looks.found])
        ends = {key: self._end_for(key, look) for key, look in looks.found.items()}
        available = {key: max(0, ends[key] - look.offset.sequence) for key, look in looks.found.items()}
        counts = self._counts(available, looks.found, limits)
        moved = {
            key: look
            for key, look in looks.found.items()
            if counts[key] or not isinstance(before.get(key), LogOffset)
        }
        sizes = self._quotas(counts, moved, limits)
        advanced = ask_logs(
            self._advancing,
            {key: places[key] for key in moved},
            lambda key, place: _advance(place.open(), moved[key], counts[key], sizes.get(key)),
            self._options.patience_s,
        )
        after |= advanced.found
        self._ends |= {key: look.bounds.end for key, look in looks.found.items()}
        self._progress.update(after, self._ends, looks.away | advanced.away)
        now_s = time.monotonic()
        if after == before:
            self._nothing_until_s = now_s + _PAUSE_S
        else:
            self._last_batch_s = now_s
        return after

    def _counts(
        self, available: dict[LogKey, int], looks: dict[LogKey, _Look], limits: TriggerLimits
    ) -> dict[LogKey, int]:
        """Return how many messages of each log the next batch has at most."""
        waits_s = (
            0.0 if self._last_batch_s is None else self._last_batch_s + limits.max_delay_s - time.monotonic()
        )
        if self._targets is None and waits_s > 0 and sum(available.values()) < limits.min_offsets:
            return dict.fromkeys(available, 0)
        return share_limit(available, limits.max_offsets)

    def _quotas(
        self, counts: dict[LogKey, int], looks: dict[LogKey, _Look], limits: TriggerLimits
    ) -> dict[LogKey, int]:
        """Return the most bytes of each log in the next batch; empty: no limit."""
        if limits.max_bytes is None:
            return {}
        sizes = {
            key: look.bounds.bytes_ahead * counts[key] // max(1, look.bounds.end - look.offset.sequence)
            for key, look in looks.items()
        }
        return {key: share or 1 for key, share in share_limit(sizes, limits.max_bytes).items()}

    def _end_for(self, key: LogKey, look: _Look) -> int:
        if self._targets is None:
            return look.bounds.end
        return min(look.bounds.end, self._targets.get(key, look.offset.sequence))

    # ------------------------------------------------------------------ logs

    def _logs(self, before: LogOffsets) -> dict[LogKey, LogPlace]:
        """Return the logs to read: those that are found, and those of the checkpoint."""
        now_s = time.monotonic()
        if not self._places or (not self._fleet.is_fixed and now_s >= self._find_again_s):
            self._places = self._fleet.find()
            self._find_again_s = now_s + self._options.discovery_interval_s
        self._check_removed(before)
        others = [key for key in before if key not in self._places and self._is_read(key)]
        # `place` lists folders if segments are read.
        return {key: self._options.place(*key) for key in others} | self._places

    def _is_read(self, key: LogKey) -> bool:
        """Whether the options allow to read a log of the checkpoint."""
        options = self._options
        return options.subscription.includes(key.topic) and (
            key.broker in options.brokers or bool(options.lookupds or options.segments)
        )

    def _check_removed(self, before: LogOffsets) -> None:
        removed = sorted(key for key in before if not self._is_read(key))
        if not removed or not self._options.fail_on_data_loss:
            return
        topics = sorted({key.topic for key in removed if not self._options.subscription.includes(key.topic)})
        if topics:
            what, option = f"topic {', '.join(topics)}", "the query does not subscribe to"
        else:
            brokers = sorted({key.broker for key in removed})
            what, option = f"broker {', '.join(brokers)}", "nsqdHttpAddress does not have"
        raise SourceError(
            f"the checkpoint has the {what}, which {option}: add it, or set failOnDataLoss=false to continue without it"
        )

    def _starting_position(self, key: LogKey, *, is_first: bool) -> str:
        """Return where to start reading a log.

        If it is found after the first batch, a position relative to now would skip what was published before it was
        found.
        """
        options = self._options
        position = position_on(options.starting, *key, options.brokers.get(key.broker, key.broker))
        if position is None:
            if is_first and options.subscription.single and self._fleet.is_fixed:
                raise OptionError(f"the offsets have no entry for the broker {key.broker}")
            return "earliest"
        return position if is_first or not _is_relative(position) else "earliest"

    # ------------------------------------------------------------------ one log; in a thread for each broker

    def _look(self, before: LogOffsets, key: LogKey, place: LogPlace) -> _Look | None:
        """Ask for the bounds of a log, and check that it continues at its position; move its channel.

        Returns None if the broker does not have the topic.
        """
        log, position = place.open(), before.get(key)
        try:
            if isinstance(position, LogOffset):
                self._move_channel(key, log, position.sequence)
                look = self._look_at_known(key, log, position)
            elif position is not None:
                look = self._look_at_new(key, log, position.start)
            else:
                look = self._look_at_new(key, log, self._starting_position(key, is_first=not before))
        except RequestRefused as error:
            if not is_without_topic(error) or self._is_missed(position):
                raise
            return None
        return look

    def _look_at_known(self, key: LogKey, log: Log, position: LogOffset) -> _Look:
        """Ask for the bounds of a log that was read before, and skip lost messages."""
        bounds = self.bounds_of_known(key, log, position)
        span = Span(position.sequence, bounds.end)
        left = without_lost(key, span, bounds.first, fails=self._options.fail_on_data_loss)
        first = position.sequence if left is None else left.first
        return _Look(bounds, LogOffset(position.first, first, position.last_id))

    def bounds_of_known(self, key: LogKey, log: Log, position: LogOffset) -> Bounds:
        """Return the bounds of a log that was read before, at a position. Raises LogReplaced if it is another log."""
        try:
            bounds = log.bounds(str(position.sequence))
        except RequestRefused as error:
            if is_without_topic(error) and self._is_missed(position):
                raise log_replaced(key) from error
            raise
        last = position.sequence - 1
        nothing_new = position.sequence == bounds.end == self._ends.get(key)
        found = None
        if position.last_id and bounds.first <= last < bounds.end and not nothing_new:
            found = log.id_at(last)
        if position.sequence > bounds.end or found not in (None, position.last_id):
            raise log_replaced(key)
        return bounds

    def _is_missed(self, position: LogOffset | NotReached | None) -> bool:
        """Whether it is an error that a broker does not have a topic any more."""
        is_optional = not self._options.subscription.topics and not self._options.fail_on_data_loss
        return isinstance(position, LogOffset) and not is_optional

    def _look_at_new(self, key: LogKey, log: Log, position: str) -> _Look:
        """Ask for the bounds of a log that is new to the query."""
        bounds, first = start_of(key, log, position)
        fails = self._options.fail_on_data_loss
        left = without_lost(key, Span(first, bounds.end), bounds.first, fails=fails)
        first = bounds.end if left is None else left.first
        self._move_channel(key, log, first)
        return _Look(bounds, LogOffset(first, first))

    def _move_channel(self, key: LogKey, log: Log, sequence: int) -> None:
        """Move the channel, so that retention keeps what is not read yet. Everything before `sequence` is processed."""
        if self._options.channel and self._channels.get(key) != sequence:
            with_channel = cast(ChannelLog, log)
            with_channel.open_channel(self._options.channel)
            with_channel.move_channel(self._options.channel, sequence)
            self._channels[key] = sequence

    def _sized(self, key: LogKey, place: LogPlace, span: Span, position: LogOffset) -> SizedSpan | None:
        """Return what is left of a planned span; None: nothing."""
        log = place.open()
        end = self.bounds_of_known(key, log, position)
        left = without_lost(key, span, end.first, fails=self._options.fail_on_data_loss)
        if left is None:
            return None
        size_bytes = size_of(log.bounds(str(left.first)), end)
        return SizedSpan(place, left, size_bytes, position.last_id, starts_of(log))


def start_of(key: LogKey, log: Log, position: str) -> tuple[Bounds, int]:
    """Return the bounds of a log, and the sequence of a starting position, retained or not.

    Raises:
        SourceError: It is after the end.
        BrokerUnreachable, RequestRefused: See `BrokerLog.bounds`.
    """
    bounds = log.bounds(position)
    first = int(position) if position.isdecimal() else bounds.at
    if first > bounds.end:
        raise SourceError(
            f"topic {key.topic} on {key.broker} ends before message {bounds.end}, and the query starts at {first}"
        )
    return bounds, first


def _end_of(key: LogKey, place: LogPlace) -> int | None:
    """Return the end of a log; None: the broker does not have the topic."""
    try:
        return place.open().bounds().end
    except RequestRefused as error:
        if is_without_topic(error):
            return None
        raise


def _advance(log: Log, look: _Look, count: int, max_bytes: int | None) -> LogOffset:
    """Return the position after some messages: `count`, or fewer that have about `max_bytes`."""
    if max_bytes is not None and count:
        count = count_within(log, look.bounds, count, max_bytes)
    sequence = look.offset.sequence + count
    return LogOffset(look.offset.first, sequence, log.id_at(sequence - 1) if sequence else None)


def _is_relative(position: str) -> bool:
    """Whether a position depends on the time when it is resolved."""
    return position == "latest" or position.startswith("-")


def _fixed(position: str) -> str:
    """Return a position that is the same later: a relative one as a time."""
    if not _is_relative(position):
        return position
    try:
        ago_ns = 0 if position == "latest" else parse_duration_ns(position[1:])
    except ValueError as error:
        raise OptionError(f"the option startingOffsets: {error}") from None
    seconds, ns = divmod(max(0, time.time_ns() - ago_ns), _NS_PER_S)
    return f"@{seconds}.{ns:09d}"
