"""A log that lives in memory, for ephemeral topics: bounded, the oldest messages go first."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from .interface import READ_BYTES
from .records import RecordBatch, RecordHeader


class MemoryLog:
    """The `Log` of an ephemeral topic.

    Args:
        max_messages: Keep at least this many of the newest messages; older batches go. 0 keeps only the
            newest batch. (nsqd drops the newest instead, silently.)
        max_bytes: The same by bytes of record.
        first_sequence: Where the topic begins.
    """

    def __init__(
        self, *, max_messages: int = 10_000, max_bytes: int = 64 * 1024 * 1024, first_sequence: int = 0
    ) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._batches: list[RecordBatch] = []
        self._first_sequence = self._next_sequence = first_sequence
        self._size_bytes = 0

    @property
    def first_sequence(self) -> int:
        return self._first_sequence

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        """As `Log.append`; `sync` means nothing here."""
        self._batches.extend(batches)
        self._next_sequence = batches[-1].next_sequence
        self._size_bytes += sum(batch.record_bytes for batch in batches)
        gone = 0
        for batch in self._batches[:-1]:
            kept = self._next_sequence - batch.next_sequence
            if kept < self._max_messages and self._size_bytes <= self._max_bytes:
                break
            self._size_bytes -= batch.record_bytes
            gone += 1
        self._forget(gone)

    def sync(self) -> None:
        """Nothing to do."""

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        found: list[RecordBatch] = []
        for batch in self._batches[self._index(sequence) :]:
            max_bytes -= batch.record_bytes
            if found and max_bytes < 0:
                break
            found.append(batch)
        return found

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        for b in self._batches[self._index(sequence) :]:
            yield RecordHeader(
                b.base_sequence, b.count, len(b.messages.data), b.first_id, b.timestamp_ns, b.due_ns, 0
            )

    def discard_before(self, sequence: int) -> None:
        gone = 0
        for batch in self._batches:
            if batch.next_sequence > sequence:
                break
            self._size_bytes -= batch.record_bytes
            gone += 1
        self._forget(gone)

    def close(self) -> None:
        self._batches.clear()

    def _index(self, sequence: int) -> int:
        """Where the first batch stands that reaches past `sequence`."""
        return bisect_right(self._batches, sequence, key=lambda batch: batch.next_sequence)

    def _forget(self, count: int) -> None:
        if count:
            del self._batches[:count]
            self._first_sequence = self._batches[0].base_sequence if self._batches else self._next_sequence
