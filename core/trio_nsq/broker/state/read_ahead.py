"""The batches that a channel delivers next, and the disk reads that they need."""

from bisect import bisect_right
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Final

from ...log import ReadWouldWaitError
from .batch import Batch
from .channel_messages import ChannelMessages
from .message_store import Found, MessageStore, Wanted

_READ_AT_ONCE: Final = 64
"""Maximum number of requeued messages per read."""
_PASSED_BATCHES: Final = 256
"""The beginnings that are kept; the store keeps fewer batches."""


class ReadAhead:
    """The batches that one channel has read.

    In a channel with an order by key, messages behind the cursor are delivered soon. So the store keeps the batches
    that the cursor has passed, and this knows where they begin.
    """

    __slots__ = ("_again", "_batches", "_messages", "_passed", "_since", "_since_ns", "_store")

    def __init__(self, store: MessageStore, messages: ChannelMessages) -> None:
        self._store = store
        self._messages = messages
        self._batches: deque[Batch] = deque()  # the one at the cursor, and the following ones
        self._passed: list[int] = []  # the first sequences of the batches before it, ascending
        # Batches of requeued messages, by sequence; None: the message is damaged.
        self._again: dict[int, Batch | None] = {}
        # The requested time, see `Wanted.since_ns`; and the last answer: a time and its first sequence.
        self._since_ns: int | None = None
        self._since: tuple[int, int] | None = None

    def at_cursor(self) -> Batch | None:
        """Move the cursor past missing messages, and return the batch that holds it; None at the end.

        Raises LogReadError, or ReadWouldWaitError unless the store waits for the disk.
        """
        messages, batches = self._messages, self._batches
        cursor, end = messages.cursor, messages.end
        while cursor.position < end:
            while batches and batches[0].next_sequence <= cursor.position:
                passed = batches.popleft()
                if messages.order is not None:
                    self._keep(passed)
            if not batches:
                batches.extend(self._store.fetch(cursor.position))
            if batches and batches[0].base_sequence <= cursor.position:
                return batches[0]
            # Messages up to the next batch or the end are damaged (reported by the log), or a bounded log dropped them.
            found = batches[0].base_sequence if batches else end
            cursor.move_to(min(found, end))
        batches.clear()
        return None

    def _keep(self, batch: Batch) -> None:
        """Keep a batch that the cursor has passed, for messages that wait for their keys."""
        passed = self._passed
        if passed and passed[-1] >= batch.base_sequence:  # the channel was moved back
            passed.clear()
        passed.append(batch.base_sequence)
        if len(passed) > 2 * _PASSED_BATCHES:
            del passed[:_PASSED_BATCHES]
        self._store.reads_behind = True
        self._store.remember_read([batch])

    def _kept(self, sequence: int) -> Batch | None:
        """Return the batch at the cursor, or before it, if that holds a message and is in memory."""
        if self._batches and self._batches[0].base_sequence <= sequence:
            batch: Batch | None = self._batches[0]
        else:
            index = bisect_right(self._passed, sequence) - 1
            batch = self._store.cached(self._passed[index]) if index >= 0 else None
        return batch if batch is not None and sequence < batch.next_sequence else None

    def holding(self, sequence: int) -> Batch | None:
        """Return the batch that holds a requeued message; None if it is damaged. Raises as `at_cursor`."""
        if self._again and sequence in self._again:
            return self._again.pop(sequence)
        if self._messages.order is not None and (batch := self._kept(sequence)) is not None:
            return batch
        return self._store.batch_holding(sequence)

    def first_since(self, timestamp_ns: int) -> int:
        """Return a sequence before which all messages are older than this time. Raises as `at_cursor`."""
        if self._store.waits_for_disk:
            return self._store.first_since(timestamp_ns)
        if self._since is None or self._since[0] > timestamp_ns:
            self._since_ns = timestamp_ns
            raise ReadWouldWaitError(Path(self._store.name))
        (_, sequence), self._since = self._since, None
        return sequence

    def timestamp_in_memory(self, sequence: int) -> int | None:
        """Return when a message was published, Unix nanoseconds; None if it is not in memory."""
        for batch in self._batches:
            if batch.base_sequence <= sequence < batch.next_sequence:
                return batch.timestamp_ns(sequence - batch.base_sequence)
        return self._store.timestamp_in_memory(sequence)

    def wanted(self) -> Wanted:
        """Return the reads needed after ReadWouldWaitError, or if `others_wait_for_read`. Pass the result to `take`."""
        messages = self._messages
        cursor = messages.cursor.position
        ahead = cursor if messages.fresh > 0 and self.timestamp_in_memory(cursor) is None else None
        again: tuple[int, ...] = ()
        # If the first one is already read, deliver the messages read with it before reading more.
        if messages.requeued.entries and messages.requeued.first not in self._again:
            first = islice(messages.requeued.entries, _READ_AT_ONCE)
            again = tuple([each for each, _, held in first if held is None and not self.in_memory(each)])
        return Wanted(ahead, again, self._since_ns)

    def in_memory(self, sequence: int) -> Batch | None:
        """As `holding`, without reading; None: it is not in memory."""
        batch = self._kept(sequence) if self._messages.order is not None else None
        return self._store.in_memory(sequence) if batch is None else batch

    def take(self, found: Found) -> None:
        """Store the results of reads that are still needed."""
        messages = self._messages
        if not messages.consumers:
            self._since_ns = None
            return  # without consumers nothing is delivered
        if found.wanted.again:
            self._again = found.again.copy()
        first = messages.requeued.first
        if found.error is not None and first in found.wanted.again and first not in found.again:
            messages.put_first_last()  # the next attempt starts with another message
        if found.wanted.since_ns is not None:
            self._since_ns = None
            if found.since is not None:
                self._since = found.wanted.since_ns, found.since
        if found.ahead is not None and messages.cursor.position == found.wanted.ahead:
            self._batches = deque(found.ahead)
            if not found.ahead:  # the messages are damaged, which the log has reported
                messages.cursor.move_to(min(found.end, messages.end))

    def drop_batches(self) -> None:
        """Discard the batches: the last consumer has left."""
        self._batches.clear()
        self._passed.clear()
        self._store.reads_behind = False
        self._again.clear()

    def clear(self) -> None:
        """Discard batches and requests."""
        self.drop_batches()
        self._since = self._since_ns = None
