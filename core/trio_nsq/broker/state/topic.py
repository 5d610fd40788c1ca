"""A topic: one log, the channels over it, and the point up to which the channels may read.

The *high watermark* is the sequence up to which messages belong to the channels. It is the end of the topic,
except while the topic is paused or has no channel: then it stays put, and what arrives waits behind it for the
first channel, or for the pause to end.

A *private channel* (see `Channel.private`) is no part of this. It begins at the end of the topic, gets each message
when it is published, also while the topic is paused, and moves nothing: to all other channels, and to what waits for
a first one, the topic is the same as without it. It never makes a topic full, but loses its oldest messages instead.

The end of the topic is the end of the log as far as `accept` was told of it: while a thread appends, the log may be
ahead of it for a moment.
"""

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...log import Log, LogReadError, ReadWouldWaitError, RecordBatch
from ...log.records import split_batch
from ...log.times import sequence_at
from ...protocol import is_ephemeral
from .batch import MERGE_BYTES, MERGE_MESSAGES, Batch, make_batches
from .cache import BatchCache
from .channel import Channel
from .channel_state import ChannelState, encode_rows
from .deferred import DeferredMessages, Waiting, WaitingMessages
from .producers import LastBatch, Producers
from .record_metadata import batch_number, only_channel
from .settings import SettingsError, TopicSettings, change
from .wanted import Found, Wanted

STATE_FORMAT = 1
_NS_PER_MS = 1_000_000
_CHANNEL_COST = 10
_STEP_COST = 1000
"""A message counts 1: a step takes about half a millisecond."""
_REDELIVERY_READ_BYTES = 16 * 1024
"""Read ahead for requeued messages, which tend to be neighbours; not far, for they may be scattered."""
_READ_AGAIN_BYTES = 1024 * 1024
_BATCHES_KEPT = 16
"""Batches that are merged are at most a sixteenth of what may be kept: they are forgotten together, too."""
_READ_BATCHES = 64
"""As many batches that were read from disk, and are in the cache, are found again by any message of theirs."""


class StateError(ValueError):
    """A topic's saved state is not one this program can read."""


class Checkpoint:
    """A topic at one moment, on its way to disk.

    It is a JSON object: format, name, paused, settings (see `change`), distribution_point, end (of the topic), settled
    (no dead letter before this sequence has to be looked at at a restart), producers_used (see `Producers.used_s`),
    ephemeral_needed (the oldest sequence that the ephemeral channels, which are not kept, may yet have to read),
    waiting_deferred [[first, after last, due_ns]], with the channel behind them if only one is to get the messages,
    producers [`LastBatch`] if there are any, channels (see `ChannelState`).

    Args:
        head: The first seven of these.
        waiting: A copy of the topic's.
        producers: As `Producers.state`.
        durable, ephemeral: The channels. Those that have not changed since an earlier checkpoint are encoded already.
        moved_dead_letters: A copy of the topic's.
        settings: The topic's.

    Attributes:
        moved_dead_letters: See `Topic.moved_dead_letters`.
        settings: Those that are in force once it is saved.
        names_batches: It tells what producers have published, so the log has to have that before this is on disk.
        parts: The object, in UTF-8, in pieces. None until `encode` has come to its end.
        first_needed: The oldest sequence that the topic, or one restored from this, would read; likewise.
        all_needed: The sequence from which on it would read all that comes; before it only those messages of its
            channels that are unfinished; likewise.
    """

    def __init__(
        self,
        head: dict[str, Any],
        waiting: WaitingMessages,
        producers: list[LastBatch],
        durable: list[ChannelState],
        ephemeral: list[ChannelState],
        moved_dead_letters: "list[tuple[Topic, bytes]]",
        settings: TopicSettings,
    ) -> None:
        self.parts: list[bytes] = []
        self.moved_dead_letters = moved_dead_letters
        self.settings = settings
        self.names_batches = bool(producers)
        self.first_needed = self.all_needed = 0
        self._head = head
        self._waiting = waiting
        self._producers = producers
        self._durable = {channel.name: channel for channel in durable}
        self._ephemeral = ephemeral

    # ------------------------------------------------------------------ changes that are saved before they are made

    def change_topic(self, **fields: Any) -> None:
        """Save other values of the topic's own fields, named as above."""
        self._head.update(fields)

    def change_channel(self, state: ChannelState) -> None:
        """Save this of a channel, which may be a new one."""
        self._durable[state.name] = state

    def add_channel(self, name: str) -> None:
        """Save a new channel, as `Topic.add_channel` makes it."""
        self.change_channel(ChannelState(name, False, {}, int(self._head["distribution_point"])))

    def remove_channel(self, name: str) -> None:
        """Save the topic without a channel."""
        self._durable.pop(name, None)

    def forget_producer(self, producer: str) -> None:
        """Save the topic without what this producer has published."""
        known = [last.producer for last in self._producers]
        if producer in known:
            at = known.index(producer)
            del self._producers[at], self._head["producers_used"][at]

    def forget_waiting(self) -> None:
        """Save no message that waits for its time behind the high watermark."""
        self._waiting = WaitingMessages()

    # ------------------------------------------------------------------ on the way to disk

    def encode(self) -> Iterator[int]:
        """Set `parts` and `first_needed`, in steps between which others may have their turn; yields their sizes."""
        self.all_needed = min(int(self._head["distribution_point"]), int(self._head["settled"]))
        durable_channels = list(self._durable.values())
        channels = durable_channels + self._ephemeral
        waiting = "[]"
        if self._waiting:
            waiting, lowest = yield from encode_rows(map(_row, self._waiting), 0)
            self.all_needed = min(self.all_needed, lowest)
        producers = ""
        if self._producers:
            rows, _ = yield from encode_rows(iter(self._producers), 2)
            producers = f',"producers":{rows}'
        self.all_needed = min([self.all_needed, *(channel.cursor for channel in channels)])
        cost = 0
        for channel in channels:
            if channel.parts:
                continue
            for messages in channel.encode():
                cost += messages
                if cost >= _STEP_COST:
                    yield cost
                    cost = 0
            cost += _CHANNEL_COST
        ephemeral = min((channel.first_needed for channel in self._ephemeral), default=self._head["end"])
        durable = min((channel.first_needed for channel in durable_channels), default=self.all_needed)
        self.first_needed = min(self.all_needed, durable, ephemeral)
        head = json.dumps({**self._head, "ephemeral_needed": ephemeral}, separators=(",", ":"))
        self.parts = [f'{head[:-1]},"waiting_deferred":{waiting}{producers},"channels":['.encode()]
        for number, channel in enumerate(durable_channels):
            if number:
                self.parts.append(b",")
            self.parts += channel.parts
        self.parts.append(b"]}")

    @property
    def content(self) -> bytes:
        """The same in one piece."""
        return b"".join(self.parts)

    def unfinished_before(self, sequence: int) -> list[int]:
        """The messages before `all_needed`, and before this, that it would read; ascending."""
        found: set[int] = set()
        for channel in chain(self._durable.values(), self._ephemeral):
            if channel.first_needed < sequence:
                found.update(each for each in channel.sequences() if each < sequence)
        return sorted(found)


def _give(channels: Iterable[Channel], count: int, deferred: Sequence[Waiting]) -> None:
    """Let channels have `count` messages that can be read in their turn, and those that cannot."""
    for channel in channels:
        channel.arrived(count)
        for waiting in deferred:
            sequences = waiting.sequences
            if waiting.channel is None or waiting.channel == channel.name:
                channel.arrived(len(sequences))
                channel.arrived_deferred(sequences, waiting.due_ns, waiting.held)
            else:
                channel.skip(sequences.start, sequences.stop)


def _batches_from(records: Sequence[RecordBatch], sequence: int) -> list[Batch]:
    """Batches of what was read to have this message, from the one that holds it on."""
    # A record that was written by an earlier version may hold a million messages.
    pieces = [piece for record in records for piece in split_batch(record)]
    return make_batches([piece for piece in pieces if piece.next_sequence > sequence])


def _holding(batches: Iterable[Batch], sequence: int) -> Batch | None:
    return next((each for each in batches if each.base_sequence <= sequence < each.next_sequence), None)


def _row(waiting: Waiting) -> tuple[Any, ...]:
    only = () if waiting.channel is None else (waiting.channel,)
    return waiting.sequences.start, waiting.sequences.stop, waiting.due_ns, *only


class Topic:
    """One topic, synchronous and pure but for reading its log.

    Args:
        name: A valid topic name.
        log: Where its messages lie; the topic does not close it.
        cache: The broker's decoded batches.
        mem_queue_size: How many of the newest messages to keep decoded.
        e2e_window_ns: Over how long channels measure the time from publish to FIN; 0: they do not.
        defaults: Its settings, but for those that `configure` changes.

    Attributes:
        distribution_point: See above.
        paused: Nothing is distributed.
        settings: Those in force.
        ephemeral: It lives in memory only.
        message_count, message_bytes: Published since the broker started; bytes of bodies.
        expired_count, dropped_count: Messages dropped since then before any channel had them: they had waited for
            longer than `ttl_ms`, or there were too many.
        ttl_ns: The setting `ttl_ms`, 0 if there is none.
        held_back: Why nothing may be published until its state is saved; empty: it may.
        may_refuse: Whether `why_full` ever says anything, or it is held back.
        may_drop: Whether `make_room` ever does anything.
        producers: What those that number their batches have published.
        moved_dead_letters: Dead letters that left its channels since the last checkpoint, which still has them: the
            dead-letter topic they are in, and the metadata they have there.
        waits_for_disk: `fetch` and `batch_holding` do. Otherwise the caller has to `read` what its channels want.
        has_distributed_deferred: The channels have got deferred messages; who then looks out for these clears it.
    """

    def __init__(
        self,
        name: str,
        log: Log,
        cache: BatchCache,
        mem_queue_size: int,
        e2e_window_ns: int = 0,
        defaults: TopicSettings = TopicSettings(),  # noqa: B008 - it cannot be changed
    ) -> None:
        self.name = name
        self._defaults = defaults
        self._changes: dict[str, Any] = {}  # settings of its own, by name
        self.held_back = ""
        self.configure({})
        self.log = log
        self.e2e_window_ns = e2e_window_ns
        self.channels: dict[str, Channel] = {}
        self._private: dict[str, Channel] = {}  # those of them that are
        self.paused = False
        self.message_count = 0
        self.message_bytes = 0
        self.expired_count = 0
        self.dropped_count = 0
        self.ephemeral = is_ephemeral(name)
        self.has_distributed_deferred = False
        self.waits_for_disk = True
        self.high_watermark = self._first = log.first_sequence
        self._end = log.next_sequence
        self._cache = cache
        self._mem_queue_size = mem_queue_size
        # (first, after last) of the newest batches, as many as mem_queue_size allows, ascending. They are in the
        # cache, unless it had no room: it alone holds them, so that its limit is one.
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_messages = 0
        self._largest_merged = (
            min(MERGE_MESSAGES, mem_queue_size // _BATCHES_KEPT),
            min(MERGE_BYTES, cache.max_bytes // _BATCHES_KEPT),
        )
        # The same of batches that were read, the latest last.
        self._read: deque[tuple[int, int]] = deque(maxlen=_READ_BATCHES)
        self._last_held: Batch | None = None  # requeued messages tend to be neighbours
        # Deferred by their publisher, or for one channel only, and behind the high watermark.
        self._waiting = WaitingMessages()
        self.producers = Producers()
        self.moved_dead_letters: list[tuple[Topic, bytes]] = []
        # The first sequence of the dead letters here, by their metadata, whose channels may yet have them in
        # their saved states, ascending.
        self._unconfirmed: dict[bytes, int] = {}

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings, by name; None goes back to the default. Raises SettingsError, and nothing is changed."""
        self.settings, self._changes = change(self._defaults, self._changes, changes)
        self.ttl_ns = self.settings.ttl_ms * _NS_PER_MS
        self.may_drop = self.settings.drops
        self.may_refuse = bool(self.held_back) or (self.settings.is_limited and not self.may_drop)

    def hold_back(self, reason: str) -> None:
        """Let nothing be published until its state is saved."""
        self.held_back = reason
        self.configure({})

    @property
    def depth(self) -> int:
        """Messages waiting for a channel, or for the pause to end."""
        point = self.high_watermark
        # A bounded memory may have lost the place of a deferred message, though not the message.
        return self._end - point - self._waiting.messages_from(point)

    @property
    def is_finished(self) -> bool:
        """Nothing of its log will be read again: no message waits, is deferred or in flight, in any channel."""
        return self.oldest_waiting == self._confirmed_before == self._end and not any(
            channel.depth or channel.deferred_count or channel.in_flight_count
            for channel in self.channels.values()
        )

    @property
    def backend_depth(self) -> int:
        """The part of `depth` that would have to be read from disk."""
        return min(self.depth, max(0, self.cached_from - self.high_watermark))

    @property
    def end(self) -> int:
        """The sequence after the last message."""
        return self._end

    @property
    def cached_from(self) -> int:
        """The first sequence from which on messages are decoded in memory."""
        while self._recent and (self.name, self._recent[0][0]) not in self._cache:
            start, after = self._recent.popleft()
            self._recent_messages -= after - start
        return self._recent[0][0] if self._recent else self._end

    # ------------------------------------------------------------------ publishing

    def accept(self, records: Sequence[RecordBatch]) -> None:
        """Take records that are now in the log: remember them decoded, and distribute them."""
        start, self._end = self._end, records[-1].next_sequence
        for record in records:
            self.message_count += record.count
            self.message_bytes += record.messages.body_bytes
            if record.metadata:
                self._record_metadata(record)
        if not (len(records) == 1 and self._extend_newest(records[0])):
            self._remember_all(records)
        if self._private:
            self._show(start)
        self.distribute()
        self._follow_log()

    def _remember_all(self, records: Sequence[RecordBatch]) -> None:
        for batch in make_batches(records):
            if batch.due_ns:
                held = batch if self.ephemeral else None
                sequences = range(batch.base_sequence, batch.next_sequence)
                self._waiting.add(Waiting(sequences, batch.due_ns, batch.channel, held))
            else:
                self._remember(batch)

    def _record_metadata(self, record: RecordBatch) -> None:
        if batch := batch_number(record.metadata):
            self.producers.record(LastBatch(*batch, record.base_sequence), record.timestamp_ns)
        elif not record.due_ns:
            # A channel that was moved back may give up the very same again: it goes to the end.
            self._unconfirmed.pop(record.metadata, None)
            self._unconfirmed[record.metadata] = record.base_sequence

    def _remember(self, batch: Batch) -> None:
        self._cache.put(self.name, batch)
        self._recent.append((batch.base_sequence, batch.next_sequence))
        self._record_recent(len(batch))

    def _extend_newest(self, record: RecordBatch) -> bool:
        """Remember a record with those before it, if they have not been delivered yet: that makes deliveries large."""
        if not self._recent:
            return False
        first = self._recent[-1][0]
        newest = self._cache.get((self.name, first))
        if newest is None or not (grown_bytes := newest.absorb(record, *self._largest_merged)):
            return False
        self._cache.record_growth(grown_bytes)
        self._recent[-1] = first, newest.next_sequence
        self._record_recent(record.count)
        return True

    def _record_recent(self, count: int) -> None:
        self._recent_messages += count
        # The newest batch stays even if it is larger, or the size 0: its consumers are about to ask for it.
        while self._recent_messages > self._mem_queue_size and len(self._recent) > 1:
            start, after = self._recent.popleft()
            self._recent_messages -= after - start
            self._cache.discard((self.name, start))

    def _follow_log(self) -> None:
        """Take note of what a log that is bounded has dropped at its beginning."""
        if self.log.first_sequence > self._first:
            self._first = self.log.first_sequence
            self.high_watermark = max(self.high_watermark, self._first)
            for channel in self.channels.values():
                channel.move_to(self._first)

    def distribute(self) -> None:
        """Let the channels have what is behind the high watermark, unless it is frozen."""
        end, point = self._end, self.high_watermark
        channels = self._shared if self._private else self.channels.values()
        if self.paused or not channels:
            return
        if not self._waiting:
            self.high_watermark = end
            for channel in channels:
                channel.arrived(end - point)
            return
        self.has_distributed_deferred = True
        count = self.depth
        self.high_watermark = end
        _give(channels, count, list(self._waiting))
        self._waiting = WaitingMessages()

    def _show(self, start: int) -> None:
        """Let the private channels have what was accepted from `start` on."""
        new = list(self._waiting.since(start))
        self.has_distributed_deferred |= bool(new)
        count = self._end - start - sum(len(waiting.sequences) for waiting in new)
        _give(self._private.values(), count, new)

    @property
    def _shared(self) -> Collection[Channel]:
        """The channels that are not private."""
        channels = self.channels.values()
        return [channel for channel in channels if not channel.private] if self._private else channels

    # ------------------------------------------------------------------ limits

    @property
    def oldest_waiting(self) -> int:
        """The oldest sequence that some channel has yet to deliver, or that waits for one; the end if there is none."""
        return self._oldest_of(self.channels.values())

    def _oldest_of(self, channels: Iterable[Channel]) -> int:
        return min([self.high_watermark, *[channel.cursor for channel in channels]])

    def why_full(self, messages: int, size: int, coming_messages: int = 0, coming_bytes: int = 0) -> str:
        """Why so many more messages, in records of so many bytes, have to be refused; empty if they need not be.

        Those that are on their way to the log already count as waiting.
        """
        limits = self.settings
        if self.may_drop:
            return ""
        if limits.max_messages:
            waiting = self.depth + max((channel.depth for channel in self._shared), default=0)
            waiting += coming_messages
            if waiting + messages > limits.max_messages:
                return self._no_room(waiting, messages, "messages", limits.max_messages)
        if limits.max_bytes:
            waiting = self.log.bytes_from(self._oldest_of(self._shared)) + coming_bytes
            if waiting + size > limits.max_bytes:
                return self._no_room(waiting, size, "bytes", limits.max_bytes)
        return ""

    def _no_room(self, waiting: int, more: int, unit: str, limit: int) -> str:
        if more > limit:
            return f"topic {self.name} cannot take {more} {unit} at once: max_{unit} is {limit}"
        return f"topic {self.name} is full: {waiting} {unit} wait, {more} more are too many: max_{unit} is {limit}"

    def make_room(self) -> None:
        """Drop the oldest messages that are ready, if there are more than there may be: in private channels, and
        everywhere if so it is set.
        """
        if not (self.may_drop or (self._private and self.may_refuse)):
            return
        limits = self.settings
        channels = self.channels if self.may_drop else self._private
        if limits.max_messages:
            for channel in channels.values():
                waiting = channel.depth + (0 if channel.private else self.depth)
                if (excess := waiting - limits.max_messages) > 0:
                    channel.drop_oldest(min(excess, channel.ready_count))
            if self.may_drop and (excess := self.depth - limits.max_messages) > 0:
                self.dropped_count += self._pass_over(self._after_waiting(excess))
        if limits.max_bytes and self.log.bytes_from(self.oldest_waiting) > limits.max_bytes:
            sequence = self.log.last_bytes(limits.max_bytes)
            for channel in channels.values():
                channel.dropped_count += channel.pass_over(sequence)
            if self.may_drop:
                self.dropped_count += self._pass_over(sequence)

    def settings_with(self, changes: Mapping[str, Any]) -> TopicSettings:
        """The settings that `configure` would put in force. Raises SettingsError."""
        return change(self._defaults, self._changes, changes)[0]

    def would_drop(self, settings: TopicSettings, expired_before: int) -> int:
        """How many messages other settings would drop at once: each counts once for every channel that loses it.

        What the settings now in force already drop is not counted, nor what is in flight or deferred.

        Args:
            settings: Those to come.
            expired_before: Messages below this sequence would have waited for too long; 0: none.
        """
        limited = settings.drops and settings.limits != self.settings.limits
        too_many = 0
        if limited and settings.max_bytes and self.log.bytes_from(self.oldest_waiting) > settings.max_bytes:
            too_many = self.log.last_bytes(settings.max_bytes)
        most = settings.max_messages if limited and settings.max_messages else None
        total = self._lost(self.depth, self.depth, most, self._count_before(max(too_many, expired_before)))
        for channel in self._shared:
            lost = max(
                channel.count_before(too_many, requeued=False),
                channel.count_before(expired_before, requeued=True),
            )
            total += self._lost(channel.depth + self.depth, channel.ready_count, most, lost)
        return total

    @staticmethod
    def _lost(waiting: int, ready: int, most: int | None, passed: int) -> int:
        """How many of `ready` messages go if `most` of the `waiting` may stay, and `passed` of them go anyway."""
        return max(passed, 0 if most is None else min(waiting - most, ready))

    def _count_before(self, sequence: int) -> int:
        """How many of the messages that `depth` counts are below `sequence`."""
        point = self.high_watermark
        if (sequence := min(sequence, self._end)) <= point:
            return 0
        return sequence - point - self._waiting.messages_from(point) + self._waiting.messages_from(sequence)

    def published_ns(self, sequence: int) -> int:
        """When a message, or the next one that is there, was published, Unix nanoseconds; 0 at the end of the log.

        Reads the log; may be called in a thread. Raises LogReadError.
        """
        if carried := self.log.read_carried_forward(sequence):
            return carried[0].timestamp_ns
        header = next(self.log.headers(sequence), None)
        return header.timestamp_ns if header is not None else 0

    def first_since(self, timestamp_ns: int) -> int:
        """The first sequence published at this time or later. Reads the log; raises LogReadError."""
        return sequence_at(self.log, timestamp_ns)

    def expire_before(self, sequence: int) -> None:
        """Drop what has not been delivered yet, below `sequence`: it has waited for too long."""
        for channel in self.channels.values():
            channel.expired_count += channel.pass_over(sequence)
        self.expired_count += self._pass_over(sequence)

    def _after_waiting(self, count: int) -> int:
        """The sequence after the first `count` of the messages that `depth` counts."""
        to = self.high_watermark
        for waiting in self._waiting:
            start = waiting.sequences.start
            if to + count < start:
                break
            if start >= to:
                count, to = count - (start - to), waiting.sequences.stop
        return to + count

    def _pass_over(self, sequence: int) -> int:
        """Move the high watermark, and count what that drops. What waits for its time does so further on."""
        for waiting in self._waiting:
            if waiting.sequences.start < sequence < waiting.sequences.stop:
                sequence = waiting.sequences.stop
        sequence = min(sequence, self._end)
        point = self.high_watermark
        if sequence <= point:
            return 0
        before = self.depth
        for channel in self._shared:
            channel.skip(point, sequence)
        self.high_watermark = sequence
        return before - self.depth

    # ------------------------------------------------------------------ reading

    def fetch(self, sequence: int) -> list[Batch]:
        """Batches from the one that holds `sequence` on; the first may begin later if messages are missing there.

        Empty at the end of the log. Raises LogReadError; that is ReadWouldWaitError unless it `waits_for_disk`.
        """
        if (cached := self.in_memory(sequence)) is not None:
            return [cached]
        records = self.log.read(sequence) if self.waits_for_disk else self.log.read_now(sequence)
        batches = _batches_from(records, sequence)
        self.remember_read(batches)
        return batches

    def remember_read(self, batches: Iterable[Batch]) -> None:
        """Keep what was read of the log, as far as there is room."""
        for batch in batches:
            self._cache.put(self.name, batch)
            self._read.append((batch.base_sequence, batch.next_sequence))

    def read(self, wanted: Wanted) -> Found:
        """Read what channels want of the log, however long that takes; may be called in a thread."""
        found = Found(wanted, end=self.log.next_sequence)
        if wanted.ahead is not None:
            try:
                records = self.log.read(wanted.ahead)
                found.ahead = _batches_from(records, wanted.ahead)
                if records:
                    self.log.read_soon(records[-1].next_sequence)
            except LogReadError as exc:
                found.error = exc
        if wanted.since_ns is not None:
            try:
                found.since = self.first_since(wanted.since_ns)
            except LogReadError as exc:
                found.error = exc
        self._read_again(wanted.again, found)
        return found

    def _read_again(self, sequences: Iterable[int], found: Found) -> None:
        batches: list[Batch] = []
        size_bytes = 0
        for sequence in sequences:
            batch = _holding(batches, sequence)
            if batch is None and size_bytes < _READ_AGAIN_BYTES:  # others are for the next time
                try:
                    records = self.read_scattered(sequence, _REDELIVERY_READ_BYTES)
                except LogReadError as exc:
                    found.error = exc
                    continue
                more = _batches_from(records, sequence)
                batch = _holding(more, sequence)
                batches += more
                size_bytes += sum([each.size_bytes for each in more])
                found.again[sequence] = batch
            elif batch is not None:
                found.again[sequence] = batch

    def batch_holding(self, sequence: int) -> Batch | None:
        """The batch with this very message, or None if the log no longer has it. Raises LogReadError, as `fetch`."""
        held = self._last_held
        if held is not None and held.base_sequence <= sequence < held.next_sequence:
            return held
        batch = self.in_memory(sequence)
        if batch is None:
            batches = _batches_from(self._scattered(sequence), sequence)
            self.remember_read(batches)
            if (batch := _holding(batches, sequence)) is None:
                return None
        self._last_held = batch
        return batch

    def _scattered(self, sequence: int) -> list[RecordBatch]:
        if self.waits_for_disk:
            return self.read_scattered(sequence, _REDELIVERY_READ_BYTES)
        records: list[RecordBatch] = []
        if sequence >= self.log.first_sequence:
            records = self.log.read_now(sequence, _REDELIVERY_READ_BYTES)
        if self.log.has_carried_forward and (not records or records[0].base_sequence > sequence):
            raise ReadWouldWaitError(Path(self.name))
        return records

    def read_scattered(self, sequence: int, max_bytes: int) -> list[RecordBatch]:
        """As `Log.read`, for a message that may have been carried forward; may be called in a thread."""
        records: list[RecordBatch] = []
        if sequence >= self.log.first_sequence:
            records = self.log.read(sequence, max_bytes)
        if not records or records[0].base_sequence > sequence:
            records = self.log.read_carried_forward(sequence) or records
        return records

    def timestamp_in_memory(self, sequence: int) -> int | None:
        """When a message was published, Unix nanoseconds; None if only the log could tell."""
        batch = self.in_memory(sequence)
        return batch.timestamp_ns(sequence - batch.base_sequence) if batch is not None else None

    def in_memory(self, sequence: int) -> Batch | None:
        """The batch with this message, if it need not be read."""
        if (batch := self._cache.get((self.name, sequence))) is not None:
            return batch
        recent = bisect_right(self._recent, sequence, key=itemgetter(0)) - 1
        spans = [self._recent[recent]] if recent >= 0 else []
        for start, after in chain(spans, self._read):
            if start <= sequence < after:
                batch = self._cache.get((self.name, start))
                if batch is not None and batch.base_sequence <= sequence < batch.next_sequence:
                    return batch
        return None

    # ------------------------------------------------------------------ operators

    def add_channel(self, name: str, *, private: bool = False) -> Channel:
        """Return the channel of this name.

        If there is none it is made: at the high watermark, or, a private one, at the end of the topic. One that is
        there stays as it is, private or not.
        """
        channel = self.channels.get(name)
        if channel is not None:
            return channel
        if private:
            channel = self.channels[name] = self._private[name] = Channel(self, name, self._end, private=True)
        else:
            channel = self.channels[name] = Channel(self, name, self.high_watermark)
            self.distribute()
        return channel

    def remove_channel(self, channel: Channel) -> None:
        """Delete a channel: its messages are dropped, its consumers' connections closed."""
        if self.channels.get(channel.name) is channel:
            del self.channels[channel.name]
            self._private.pop(channel.name, None)
            for consumer in list(channel.consumers):
                channel.remove(consumer)
                consumer.close()
            channel.empty()  # an alarm may yet keep it in memory for a while

    def pause(self) -> None:
        """Freeze the high watermark."""
        self.paused = True

    def unpause(self) -> None:
        """Let it move on."""
        self.paused = False
        self.distribute()

    def plan_configure(self, checkpoint: "Checkpoint", changes: Mapping[str, Any]) -> None:
        """Have a checkpoint save what `configure` would do. Raises SettingsError."""
        checkpoint.settings, own = change(self._defaults, self._changes, changes)
        checkpoint.change_topic(settings=own)

    def plan_empty(self, checkpoint: "Checkpoint") -> None:
        """Have a checkpoint save what `empty` would do."""
        for channel in self.channels.values():
            if not channel.ephemeral:
                checkpoint.change_channel(channel.state_if_skipped(self.high_watermark, self._end))
        checkpoint.forget_waiting()
        checkpoint.change_topic(distribution_point=self._end)

    def empty(self) -> None:
        """Drop what is behind the high watermark; channels keep what they have."""
        for channel in self._shared:
            channel.skip(self.high_watermark, self._end)
        self._waiting = WaitingMessages()
        self.high_watermark = self._end

    def close(self) -> None:
        """Let go of everything: the topic is being deleted, or the broker stops."""
        for topic, metadata in self.moved_dead_letters:
            topic.confirm_moved(metadata)  # no saved state has them any more
        self.moved_dead_letters.clear()
        for channel in list(self.channels.values()):
            self.remove_channel(channel)
        self._recent.clear()
        self._recent_messages = 0
        self._read.clear()
        self._last_held = None
        self._cache.forget_topic(self.name)

    # ------------------------------------------------------------------ checkpoints

    @staticmethod
    def first_needed(state: dict[str, Any], is_carried: Callable[[int], bool] = lambda _: False) -> int:
        """The oldest sequence that a topic restored from this snapshot would read, but for those carried forward."""
        needed = [int(state["distribution_point"]), int(state.get("settled", state["end"]))]
        needed += [int(start) for start, *_ in state["waiting_deferred"]]
        unfinished = [int(state["ephemeral_needed"])]
        for channel in state["channels"]:
            needed.append(int(channel["cursor"]))
            unfinished += [sequence for sequence, *_ in channel["unfinished"]]
            unfinished += DeferredMessages.restore(channel["deferred"]).sequences()
        return min(chain(needed, (sequence for sequence in unfinished if not is_carried(sequence))))

    def is_carried(self, sequence: int) -> bool:
        """Whether a message was carried forward, and the file that had it is gone. Raises LogReadError."""
        return sequence < self.log.first_sequence and bool(self.log.read_carried_forward(sequence))

    def checkpoint(self) -> "Checkpoint":
        """The topic and its channels as they are now."""
        return Checkpoint(
            {
                "format": STATE_FORMAT,
                "name": self.name,
                "paused": self.paused,
                "settings": self._changes,
                "distribution_point": self.high_watermark,
                "end": self._end,
                "settled": self._confirmed_before,
                "producers_used": self.producers.used_s(),
            },
            self._waiting.copy(),
            self.producers.state(),
            [c.state() for c in self.channels.values() if not c.ephemeral],
            [c.state() for c in self.channels.values() if c.ephemeral],
            self.moved_dead_letters.copy(),
            self.settings,
        )

    def saved(self, checkpoint: "Checkpoint") -> "list[Topic]":
        """Take note that a checkpoint is on disk; returns the topics that have to be saved for that reason."""
        if self.held_back:
            self.hold_back("")
        del self.moved_dead_letters[: len(checkpoint.moved_dead_letters)]
        for topic, metadata in checkpoint.moved_dead_letters:
            topic.confirm_moved(metadata)
        return list({topic: None for topic, _ in checkpoint.moved_dead_letters})

    # ------------------------------------------------------------------ dead letters

    @property
    def _confirmed_before(self) -> int:
        return next(iter(self._unconfirmed.values()), self._end)

    @property
    def unconfirmed(self) -> Mapping[bytes, int]:
        """The dead letters here that may be in the saved states of their channels, too: metadata and first sequence."""
        return self._unconfirmed

    def id_at(self, sequence: int) -> str | None:
        """The id of a message, 16 hex digits; None if the log has not got it. Raises LogReadError; for any thread."""
        for record in self.read_scattered(sequence, 1):
            if record.base_sequence <= sequence < record.next_sequence:
                return f"{record.first_id + sequence - record.base_sequence:016x}"
        return None

    def confirm_moved(self, metadata: bytes) -> None:
        """Take note that dead letters are not in the saved state of the channel they come from any more."""
        self._unconfirmed.pop(metadata, None)

    def snapshot(self) -> dict[str, Any]:
        """The same at once, as JSON data: for a topic that nobody waits for."""
        checkpoint = self.checkpoint()
        for _ in checkpoint.encode():
            pass
        data: dict[str, Any] = json.loads(checkpoint.content)
        return data

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Take up a snapshot, and what came into the log after it.

        Args:
            state: None if none was ever written: the topic then has its log and no channel.

        Returns:
            Whether the snapshot was ahead of the log, after a power cut with `--sync=interval`. Then save a new one
            before anything is published: sequences that the old one takes for finished are going to be used again.

        Raises:
            StateError: It is not a snapshot of this topic.
            LogReadError: The operating system refused.
        """
        end, scanned, ahead = self._end, self._first, False
        unconfirmed = scanned
        if state is not None:
            try:
                ahead = int(state["end"]) > end
                scanned = min(int(state["end"]), end)
                unconfirmed = min(int(state.get("settled", scanned)), scanned)
                self._take_up(state)
            except (KeyError, TypeError, ValueError, OverflowError, SettingsError) as exc:
                raise StateError(f"it lacks {exc}" if isinstance(exc, KeyError) else str(exc)) from exc
        self._scan(scanned, unconfirmed)
        self.distribute()
        return ahead

    def _scan(self, new: int, unconfirmed: int) -> None:
        """Look for what is not in the saved state, from one sequence on, and for dead letters, from another on."""
        for header in self.log.headers(min(new, unconfirmed)):
            metadata = b""
            if header.metadata_bytes:
                read = self.log.read(header.base_sequence, 1)
                metadata = next((r.metadata for r in read if r.base_sequence == header.base_sequence), b"")
            if header.due_ns and header.base_sequence >= new:
                sequences = range(header.base_sequence, header.next_sequence)
                self._waiting.add(Waiting(sequences, header.due_ns, only_channel(metadata)))
            if batch := batch_number(metadata):
                if header.base_sequence >= new:
                    self.producers.record(LastBatch(*batch, header.base_sequence), header.timestamp_ns)
            elif metadata and not header.due_ns and header.base_sequence >= unconfirmed:
                self._unconfirmed[metadata] = header.base_sequence

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["format"] != STATE_FORMAT:
            raise StateError(f"its format is {state['format']}, this program reads {STATE_FORMAT}")
        if state["name"] != self.name:
            raise StateError(f"it is the state of topic {state['name']}")
        end = self._end
        self.paused = bool(state["paused"])
        self.configure(state.get("settings", {}))
        self.high_watermark = max(self._first, min(int(state["distribution_point"]), end))
        for first, after, due_ns, *only in state["waiting_deferred"]:
            if first < end:
                sequences = range(int(first), min(int(after), end))
                self._waiting.add(Waiting(sequences, int(due_ns), str(*only) if only else None))
        self.producers.restore(state.get("producers", []), state.get("producers_used", []), end)
        for channel_state in state["channels"]:
            channel = Channel.restore(self, channel_state, end)
            channel.move_to(self._first)
            self.channels[channel.name] = channel
