"""The message store of a topic: decoded batches in memory for the newest messages, and the log for all."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from ...log import Log, LogReadError, ReadWouldWaitError, RecordBatch
from ...log.interface import sequence_at
from ...log.records import split_batch
from .batch import MERGE_BYTES, MERGE_MESSAGES, Batch, make_batches
from .cache import BatchCache

REDELIVERY_READ_BYTES = 16 * 1024  # not Final: tests set it
"""Read size for requeued messages. They tend to be neighbours, but may be scattered, so it is small."""
_READ_AGAIN_BYTES: Final = 1024 * 1024
_BASE: Final = attrgetter("base_sequence")
BATCHES_KEPT = 16  # not Final: tests set it
"""A merged batch is at most 1/16 of the cache, because a batch is evicted as a whole."""
READ_BATCHES = 64  # not Final: tests set it
"""Number of cached batches read from disk that are found by any of their messages, not only the first."""
READ_BYTES = 4 * 1024 * 1024  # not Final: tests set it
"""Bytes of these batches that stay in memory for a topic with one channel. More would be in no processor's cache when
their memory is used again: bench/README.md, "Consuming"."""
_TIMES_BEHIND: Final = 4
"""So many times these batches and bytes stay for a channel that goes on reading behind its cursor: with 10,000 keys and
5,000 messages in flight, its blocked messages are up to 20,000 behind."""


class Wanted(NamedTuple):
    """The reads that a channel needs before it can deliver more.

    Attributes:
        ahead: Read from this sequence, the cursor, on; None: not needed.
        again: Read these requeued messages.
        since_ns: Find the first sequence published at this time, Unix nanoseconds, or later; None: not needed.
    """

    ahead: int | None
    again: tuple[int, ...] = ()
    since_ns: int | None = None


@dataclass(slots=True)
class Found:
    """The results of the reads in `wanted`.

    Attributes:
        end: The end of the log before the reads.
        ahead: Batches from the cursor on; empty: no message is left before `end`. None: not read.
        again: The batch that holds each message, or None if the message is damaged. Lacks messages that were not read.
        since: The first sequence published at `since_ns` or later. None: not read.
        error: The last error, if any read failed.
    """

    wanted: Wanted
    end: int
    ahead: list[Batch] | None = None
    again: dict[int, Batch | None] = field(default_factory=dict)
    since: int | None = None
    error: LogReadError | None = None


class MessageStore:
    """Finds the messages of a topic, in memory or in its log.

    Args:
        mem_queue_size: Number of the newest messages to keep decoded.
        channels: The topic's channels. If there are several, what one reads stays in the cache for the others.

    Attributes:
        waits_for_disk: `fetch` and `batch_holding` block on disk reads. If False, they raise ReadWouldWaitError, and
            the caller must `read` the messages that its channels need.
        reads_behind: A channel has an order by key: messages behind its cursor are delivered soon.
    """

    def __init__(
        self, name: str, log: Log, cache: BatchCache, mem_queue_size: int, channels: Sized = ()
    ) -> None:
        self.name = name
        self.log = log
        self.waits_for_disk = True
        self.reads_behind = False
        self.cache = cache
        self._channels = channels
        self._mem_queue_size = mem_queue_size
        # (first, after last) of the newest batches, up to mem_queue_size messages, ascending. Only the cache holds the
        # batches, so that its limit bounds all of them; it may have evicted some.
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_messages = 0
        self._largest_merged = (
            min(MERGE_MESSAGES, mem_queue_size // BATCHES_KEPT),
            min(MERGE_BYTES, cache.max_bytes // BATCHES_KEPT),
        )
        # The same for batches read from disk, and of deferred messages, latest last; with their bytes, 0 if deferred.
        self._read: deque[tuple[int, int, int]] = deque()
        self._read_bytes = 0
        self._last_held: Batch | None = None  # requeued messages tend to be neighbours

    # ------------------------------------------------------------------ the newest messages

    @property
    def cached_from(self) -> int:
        """The sequence from which on all messages are decoded in memory."""
        while self._recent and (self.name, self._recent[0][0]) not in self.cache:
            start, after = self._recent.popleft()
            self._recent_messages -= after - start
        return self._recent[0][0] if self._recent else self.log.next_sequence

    def remember(self, batch: Batch) -> None:
        """Cache a batch that was just published."""
        self.cache.put(self.name, batch)
        self._recent.append((batch.base_sequence, batch.next_sequence))
        self._record_recent(len(batch))

    def remember_deferred(self, batch: Batch) -> None:
        """Cache a deferred batch that was just published, until the cache needs the room."""
        self.cache.put(self.name, batch)
        if len(batch) > 1:  # otherwise it is found by its only sequence
            self._record_read(batch, 0)

    def extend_newest(self, record: RecordBatch) -> bool:
        """Add a record to the newest batch unless it was delivered. Larger batches make larger deliveries."""
        if not self._recent:
            return False
        first = self._recent[-1][0]
        newest = self.cache.get((self.name, first))
        if newest is None or not (grown_bytes := newest.absorb(record, *self._largest_merged)):
            return False
        self.cache.record_growth(grown_bytes)
        self._recent[-1] = first, newest.next_sequence
        self._record_recent(record.count)
        return True

    def _record_recent(self, count: int) -> None:
        self._recent_messages += count
        # The newest batch stays even if it exceeds the limit: consumers are about to get it.
        while self._recent_messages > self._mem_queue_size and len(self._recent) > 1:
            start, after = self._recent.popleft()
            self._recent_messages -= after - start
            self.cache.discard((self.name, start))

    def clear(self) -> None:
        self._recent.clear()
        self._recent_messages = 0
        self._read.clear()
        self._read_bytes = 0
        self._last_held = None
        self.cache.forget_topic(self.name)

    # ------------------------------------------------------------------ reading

    def fetch(self, sequence: int) -> list[Batch]:
        """Return batches from the one that holds `sequence` on; the first begins later if messages are missing.

        Empty at the end of the log. Raises LogReadError, or ReadWouldWaitError unless `waits_for_disk`.
        """
        if (cached := self.in_memory(sequence)) is not None:
            return [cached]
        records = self.log.read(sequence) if self.waits_for_disk else self.log.read_cached(sequence)
        batches = _batches_from(records, sequence)
        self.remember_read(batches)
        return batches

    def remember_read(self, batches: Iterable[Batch]) -> None:
        """Cache batches that were read from the log."""
        for batch in batches:
            self.cache.put(self.name, batch)
            self._record_read(batch, batch.size_bytes)

    def _record_read(self, batch: Batch, size_bytes: int) -> None:
        read, alone = self._read, len(self._channels) <= 1
        read.append((batch.base_sequence, batch.next_sequence, size_bytes))
        self._read_bytes += size_bytes
        times = _TIMES_BEHIND if self.reads_behind else 1
        most_batches, most_bytes = READ_BATCHES * times, READ_BYTES * times
        while len(read) > most_batches or (alone and self._read_bytes > most_bytes and len(read) > 1):
            start, _, size_bytes = read.popleft()
            self._read_bytes -= size_bytes
            if alone and size_bytes:
                self.cache.discard((self.name, start))

    def read(self, wanted: Wanted) -> Found:
        """Read the messages that a channel needs from the log. Blocks on the disk; may be called in a thread."""
        found = Found(wanted, end=self.log.next_sequence)
        if wanted.ahead is not None:
            try:
                records = self.log.read(wanted.ahead)
                found.ahead = _batches_from(records, wanted.ahead)
                if records:
                    self.log.prefetch(records[-1].next_sequence)
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
            if batch is None and size_bytes < _READ_AGAIN_BYTES:  # the next call reads the others
                try:
                    records = self.read_scattered(sequence, REDELIVERY_READ_BYTES)
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
        """Return the batch that holds a message, or None if it is no longer in the log. Raises as `fetch`."""
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
            return self.read_scattered(sequence, REDELIVERY_READ_BYTES)
        records: list[RecordBatch] = []
        if sequence >= self.log.first_sequence:
            records = self.log.read_cached(sequence, REDELIVERY_READ_BYTES)
        if self.log.has_carried_forward and (not records or records[0].base_sequence > sequence):
            raise ReadWouldWaitError(Path(self.name))
        return records

    def read_scattered(self, sequence: int, max_bytes: int) -> list[RecordBatch]:
        """As `Log.read`, for a message that may have been carried forward; may be called in a thread."""
        records: list[RecordBatch] = []
        if sequence < self.log.disk_first_sequence:
            records = self.log.read_carried_forward(sequence)
        if not records and sequence >= self.log.first_sequence:
            records = self.log.read(sequence, max_bytes)
        if not records or records[0].base_sequence > sequence:
            records = self.log.read_carried_forward(sequence) or records
        return records

    def timestamp_in_memory(self, sequence: int) -> int | None:
        """Return when a message was published, Unix nanoseconds; None if it is not in memory."""
        batch = self.in_memory(sequence)
        return batch.timestamp_ns(sequence - batch.base_sequence) if batch is not None else None

    def cached(self, base_sequence: int) -> Batch | None:
        """Return the batch that begins there, if it is in memory."""
        return self.cache.get((self.name, base_sequence))

    def in_memory(self, sequence: int) -> Batch | None:
        """Return the batch that holds a message, if it is in memory."""
        if (batch := self.cache.get((self.name, sequence))) is not None:
            return batch
        recent = bisect_right(self._recent, sequence, key=itemgetter(0)) - 1
        starts = [self._recent[recent][0]] if recent >= 0 else []
        starts += [start for start, after, _ in self._read if start <= sequence < after]
        for start in starts:
            batch = self.cache.get((self.name, start))
            if batch is not None and batch.base_sequence <= sequence < batch.next_sequence:
                return batch
        return None

    # ------------------------------------------------------------------ lookups in the log

    def published_ns(self, sequence: int) -> int:
        """Return when a message, or the next existing one, was published, Unix nanoseconds; 0 at the log's end.

        Of a message that only the archive has: when the first one in its file was.

        Reads the log; may be called in a thread. Raises LogReadError.
        """
        if carried := self.log.read_carried_forward(sequence):
            return carried[0].timestamp_ns
        if sequence < self.log.disk_first_sequence and (archived := self.log.archived_files):
            return archived[max(0, bisect_right(archived, sequence, key=_BASE) - 1)].first_ns
        header = next(self.log.headers(sequence), None)
        return header.timestamp_ns if header is not None else 0

    def first_since(self, timestamp_ns: int) -> int:
        """Return the first sequence published at this time or later. Reads the log; raises LogReadError."""
        return sequence_at(self.log, timestamp_ns)

    def id_at(self, sequence: int) -> str | None:
        """Return the id of a message, 16 hex digits; None if it is not in the log. Thread-safe. Raises LogReadError."""
        for record in self.read_scattered(sequence, 1):
            if record.base_sequence <= sequence < record.next_sequence:
                return record.id_of(sequence)
        return None

    def is_carried(self, sequence: int) -> bool:
        """Whether a message was carried forward and its original file removed. Raises LogReadError."""
        return sequence < self.log.disk_first_sequence and bool(self.log.read_carried_forward(sequence))


def _batches_from(records: Sequence[RecordBatch], sequence: int) -> list[Batch]:
    """Return batches of these records, without those before `sequence`."""
    # Records of earlier versions may have a million messages: split them.
    pieces = [piece for record in records for piece in split_batch(record)]
    return make_batches([piece for piece in pieces if piece.next_sequence > sequence])


def _holding(batches: Iterable[Batch], sequence: int) -> Batch | None:
    return next((each for each in batches if each.base_sequence <= sequence < each.next_sequence), None)
