"""Ask about one log of a stream: its bounds, whether it is the log that was read before, and where reading starts."""

import time
from dataclasses import dataclass, replace
from typing import cast

from ...archive.manifest import ArchiveDamaged
from ...client.errors import RequestRefused
from ...client.reading.broker_log import Bounds
from ...log.gaps import Span
from ...log.positions import Position, parse_position
from ..logs import ChannelLog, Log, LogPlace, damage_of, resolve, starts_of
from ..options import OptionError
from .fleet import LogKey
from .offsets import LogOffset, LogOffsets, NotReached
from .options import ReadOptions, SourceError, position_on
from .partitions import SizedSpan, log_replaced, size_of, without_lost

_TRIES = 12
_ENOUGH = 0.9
"""The share of the size at which the search for a number of messages ends."""


@dataclass(frozen=True, slots=True)
class ProbedLog:
    """What a broker answered about a log.

    Attributes:
        bounds: The bounds of the log, with the position `offset`.
        offset: Where the next batch starts.
    """

    bounds: Bounds
    offset: LogOffset


class LogProbes:
    """Asks brokers about their logs, in a thread for each broker.

    Args:
        is_fixed: Whether the options alone determine the logs.

    Attributes:
        ends: The ends of the logs, as of the last answers.
    """

    def __init__(self, options: ReadOptions, *, is_fixed: bool) -> None:
        self.ends: dict[LogKey, int] = {}
        self._options = options
        self._is_fixed = is_fixed
        self._channels: dict[LogKey, int] = {}  # where this process has moved the channel

    def starting_position(self, key: LogKey, *, is_first: bool, log: Log | None = None) -> str:
        """Return where to start reading a log; without `log`, it does not answer.

        If it is found after the first batch, a position relative to now would skip what was published before it was
        found.
        """
        options = self._options
        incarnation = log.bounds().incarnation if log is not None and options.starting[0] == "{" else None
        address = options.brokers.get(key.broker, key.broker)
        position = position_on(options.starting, *key, address, incarnation)
        if position is None:
            if is_first and options.subscription.single and self._is_fixed:
                raise OptionError(f"the offsets have no entry for the broker {key.broker}")
            return "earliest"
        return position if is_first or not _is_relative(position) else "earliest"

    def probe(self, before: LogOffsets, key: LogKey, place: LogPlace) -> ProbedLog | None:
        """Ask for the bounds of a log, and check that it continues at its position; move its channel.

        Returns None if the broker does not have the topic.
        """
        log, position = place.open(), before.get(key)
        try:
            if isinstance(position, LogOffset):
                probe = self._probe_known(key, log, position)
                self._move_channel(key, log, position.sequence, probe.bounds.incarnation)
            elif position is not None:
                probe = self._probe_new(key, log, position.start)
            else:
                start = self.starting_position(key, is_first=not before, log=log)
                probe = self._probe_new(key, log, start)
        except RequestRefused as error:
            if not error.is_without_topic or self._is_missed(position):
                raise
            return None
        return probe

    def _probe_known(self, key: LogKey, log: Log, position: LogOffset) -> ProbedLog:
        """Ask for the bounds of a log that was read before, and skip lost messages."""
        bounds = self.bounds_of_known(key, log, position)
        span = Span(position.sequence, bounds.end)
        left = without_lost(key, span, bounds.first, fails=self._options.fail_on_data_loss)
        first = position.sequence if left is None else left.first
        return ProbedLog(bounds, replace(position, sequence=first))

    def bounds_of_known(self, key: LogKey, log: Log, position: LogOffset) -> Bounds:
        """Return the bounds of a log that was read before, at a position.

        Raises:
            LogReplaced: It is another log.
            ArchiveDamaged: It does not have what was read, because an object is damaged.
        """
        try:
            bounds = log.bounds(str(position.sequence))
        except RequestRefused as error:
            if error.is_without_topic and self._is_missed(position):
                raise log_replaced(key) from error
            raise
        nothing_new = position.sequence == bounds.end == self.ends.get(key)
        mark = replace(position.mark, last=None) if nothing_new else position.mark
        if not mark.continues(log, bounds):
            if damage := damage_of(log):
                raise ArchiveDamaged(damage)
            raise log_replaced(key)
        return bounds

    def _is_missed(self, position: LogOffset | NotReached | None) -> bool:
        """Whether it is an error that a broker does not have a topic any more."""
        is_optional = not self._options.subscription.topics and not self._options.fail_on_data_loss
        return isinstance(position, LogOffset) and not is_optional

    def _probe_new(self, key: LogKey, log: Log, position: str) -> ProbedLog:
        """Ask for the bounds of a log that is new to the query."""
        bounds, first = start_of(key, log, position)
        fails = self._options.fail_on_data_loss
        left = without_lost(key, Span(first, bounds.end), bounds.first, fails=fails)
        first = bounds.end if left is None else left.first
        self._move_channel(key, log, first, bounds.incarnation)
        return ProbedLog(bounds, LogOffset(first, first))

    def _move_channel(self, key: LogKey, log: Log, sequence: int, incarnation: str | None) -> None:
        """Move the channel, so that retention keeps what is not read yet. Everything before `sequence` is processed."""
        if self._options.channel and self._channels.get(key) != sequence:
            with_channel = cast(ChannelLog, log)
            with_channel.open_channel(self._options.channel)
            with_channel.move_channel(self._options.channel, sequence, incarnation)
            self._channels[key] = sequence

    def sized(self, key: LogKey, place: LogPlace, span: Span, position: LogOffset) -> SizedSpan | None:
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
    bounds, first = resolve(log, position)
    if first > bounds.end:
        raise SourceError(
            f"topic {key.topic} on {key.broker} ends before message {bounds.end}, and the query starts at {first}"
        )
    return bounds, first


def advance(log: Log, probe: ProbedLog, count: int, max_bytes: int | None) -> LogOffset:
    """Return the position after some messages: `count`, or fewer that have about `max_bytes`."""
    if max_bytes is not None and count:
        count = _count_within(log, probe.bounds, count, max_bytes)
    sequence = probe.offset.sequence + count
    last_id = log.id_at(sequence - 1) if sequence else None
    return LogOffset(probe.offset.first, sequence, last_id, probe.bounds.incarnation)


def _count_within(log: Log, start: Bounds, count: int, max_bytes: int) -> int:
    """Return about how many messages from `start.at` on have `max_bytes` together; from 1 to `count`.

    Bodies may differ in size: the log is asked for the size at some positions, at most `_TRIES`. Raises the errors of
    `Log.bounds`.
    """

    def size_of(messages: int) -> int:
        return start.bytes_ahead - log.bounds(str(start.at + messages)).bytes_ahead

    low, low_bytes = 0, 0
    high, high_bytes = count, size_of(count)
    if high_bytes <= max_bytes:
        return count
    for attempt in range(_TRIES):
        if high - low <= 1 or low_bytes >= _ENOUGH * max_bytes:
            break
        middle = (low + high) // 2
        if attempt % 2 == 0:  # in turn with halves, which end soon whatever the sizes are
            middle = low + (high - low) * (max_bytes - low_bytes) // max(1, high_bytes - low_bytes)
        middle = max(low + 1, min(middle, high - 1))
        size = size_of(middle)
        if size <= max_bytes:
            low, low_bytes = middle, size
        else:
            high, high_bytes = middle, size
    return max(1, low)


def _is_relative(position: str) -> bool:
    """Whether a position depends on the time when it is resolved."""
    return position == "latest" or position.startswith("-")


def fixed(position: str) -> str:
    """Return a position that is the same later: a relative one as a time."""
    if not _is_relative(position):
        return position
    now_ns = time.time_ns()
    try:
        return str(Position("time", now_ns) if position == "latest" else parse_position(position, now_ns))
    except ValueError as error:
        raise OptionError(f"the option startingOffsets: {error}") from None
