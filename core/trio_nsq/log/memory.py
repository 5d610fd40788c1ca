"""The log in memory, for ephemeral topics. It is bounded and drops the oldest messages first."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from ..protocol.messages import MessageSet
from .interface import (
    READ_BYTES,
    ArchivedFileFacts,
    LogFileFacts,
    NothingToRotate,
    NothingToSync,
    Rotation,
    SyncPoint,
    check_order,
)
from .records import RawRecord, RecordBatch, RecordHeader, encode_header
from .segment.format import INCARNATION_BYTES, encode_file_header, seed_for

_PLACEHOLDER = RecordBatch(0, 0, 0, 0, MessageSet(b"", []))
_NO_INCARNATION = bytes(INCARNATION_BYTES)
_HEAD = encode_file_header(0, 0, _NO_INCARNATION)
_SEED = seed_for(0, _NO_INCARNATION)


class MemoryLog:
    """The `Log` of an ephemeral topic.

    Args:
        max_messages: Keep at least this many of the newest messages if `max_bytes` allows it, and drop older batches.
            0 keeps only the newest batch. (nsqd drops the newest messages instead.)
        max_bytes: Maximum bytes of records; the newest batch is kept even if it is larger.
        first_sequence: The first message's sequence.
    """

    files: Sequence[LogFileFacts] = ()
    archived_files: Sequence[ArchivedFileFacts] = ()
    has_carried_forward = False
    failed_syncs = unsynced_bytes = archived_bytes = 0
    has_unsynced_cut = wants_sync = False

    def __init__(
        self, *, max_messages: int = 10_000, max_bytes: int = 64 * 1024 * 1024, first_sequence: int = 0
    ) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._batches: list[RecordBatch] = []
        self._dropped = 0  # number of placeholders at the beginning of `_batches`
        self.incarnation: bytes | None = os.urandom(INCARNATION_BYTES)
        self.first_sequence: int = first_sequence
        self.next_sequence: int = first_sequence
        self.size_bytes: int = 0
        self._written: list[RecordBatch] = []
        self.writes: int = 0

    @property
    def written_sequence(self) -> int:
        return self._written[-1].next_sequence if self._written else self.next_sequence

    @property
    def disk_first_sequence(self) -> int:
        return self.first_sequence

    @property
    def discardable_before(self) -> int:
        return self.next_sequence

    def forget_archived(self, sequence: int) -> None:
        """As `Log.forget_archived`; None, because no archive has this log."""

    def bytes_from(self, sequence: int) -> int:
        """As `Log.bytes_from`, assuming that all messages have the same size."""
        kept = self.next_sequence - self.first_sequence
        waiting = self.next_sequence - max(self.first_sequence, sequence)
        return self.size_bytes * waiting // kept if waiting > 0 else 0

    def last_bytes(self, size: int) -> int:
        """As `Log.last_bytes`, assuming that all messages have the same size."""
        kept = self.next_sequence - self.first_sequence
        return self.next_sequence - (kept * size // self.size_bytes if size < self.size_bytes else kept)

    def read_carried_forward(self, sequence: int) -> list[RecordBatch]:
        """As `Log.read_carried_forward`; always empty."""
        return []

    def carry_forward(
        self, sequences: Sequence[int], max_bytes: int, keeps_metadata: Callable[[bytes], bool] = bool
    ) -> Callable[[], None]:
        """As `Log.carry_forward`; does nothing, because there are no files to discard."""
        return lambda: None

    def needs_rotation(self, size: int) -> bool:
        """As `Log.needs_rotation`; always False."""
        return False

    def rotation(self) -> Rotation:
        """Nothing to do."""
        return NothingToRotate()

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        """As `Log.append`; `sync` has no effect."""
        self.write(batches)
        self.commit(self.written_sequence)

    def write(self, batches: Sequence[RecordBatch]) -> None:
        check_order(batches, self.written_sequence)
        self._written += batches
        self.writes += 1

    def rollback(self) -> None:
        self._written.clear()

    def finish_cut(self) -> None:
        """Nothing to do."""

    def commit(self, sequence: int) -> None:
        batches = [batch for batch in self._written if batch.next_sequence <= sequence]
        if not batches:
            return
        del self._written[: len(batches)]
        self._batches += batches
        self.next_sequence = batches[-1].next_sequence
        self.size_bytes += sum(batch.record_bytes for batch in batches)
        newest = len(self._batches) - 1
        while self._batches[newest].has_previous:
            newest -= 1
        while self._dropped < newest:
            messages_after = self.next_sequence - self._batches[self._dropped].next_sequence
            if messages_after < self._max_messages and self.size_bytes <= self._max_bytes:
                break
            self._drop_first()
        self._update_first()

    def pending_wal(self) -> None:
        """Nothing of it goes to disk."""

    def mark_in_wal(self) -> None:
        """Nothing to do."""

    def sync_point(self) -> SyncPoint:
        return NothingToSync()

    def end_sync(self, point: SyncPoint, error: Exception | None) -> Exception | None:
        """Nothing to do."""
        return error

    def discard_first(self, sequence: int) -> None:
        """As `Log.discard_first`; always None, because there are no files."""

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        found: list[RecordBatch] = []
        for index in range(self._index(sequence), len(self._batches)):
            batch = self._batches[index]
            max_bytes -= batch.record_bytes
            if found and max_bytes < 0:
                break
            found.append(batch)
        return found

    def read_cached(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        return self.read(sequence, max_bytes)

    def prefetch(self, sequence: int) -> None:
        """Nothing to do."""

    def read_raw(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RawRecord]:
        """As `Log.read_raw`, encoded as in a file."""
        return [_raw(batch) for batch in self.read(sequence, max_bytes)]

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        for batch in self._batches[self._index(sequence) :]:
            yield _header(batch)

    def discard_before(self, sequence: int) -> None:
        """As `Log.discard_before`: drops each batch that ends there or before."""
        for _ in range(self._dropped, self._index(sequence)):
            self._drop_first()
        self._update_first()

    def close(self) -> None:
        self._batches.clear()
        self._dropped = self.size_bytes = 0

    def _index(self, sequence: int) -> int:
        """Return the position of the batch that holds `sequence`, or of the first after it."""
        return bisect_right(self._batches, sequence, lo=self._dropped, key=lambda batch: batch.next_sequence)

    def _drop_first(self) -> None:
        self.size_bytes -= self._batches[self._dropped].record_bytes
        self._batches[self._dropped] = _PLACEHOLDER
        self._dropped += 1

    def _update_first(self) -> None:
        """Update the first sequence after batches were dropped, and remove the placeholders if they are many."""
        kept = len(self._batches) - self._dropped
        self.first_sequence = self._batches[self._dropped].base_sequence if kept else self.next_sequence
        if self._dropped >= kept:  # only sometimes, because it moves all batches
            del self._batches[: self._dropped]
            self._dropped = 0


def _header(batch: RecordBatch) -> RecordHeader:
    return RecordHeader(
        base_sequence=batch.base_sequence,
        count=batch.count,
        length=len(batch.messages.data) + len(batch.metadata),
        first_id=batch.first_id,
        timestamp_ns=batch.timestamp_ns,
        due_ns=batch.due_ns,
        payload_crc=batch.payload_crc,
        metadata_bytes=len(batch.metadata),
        has_previous=batch.has_previous,
        has_next=batch.has_next,
    )


def _raw(batch: RecordBatch) -> RawRecord:
    return RawRecord(
        _HEAD, _header(batch), encode_header(batch, _SEED) + batch.messages.data + batch.metadata
    )
