"""The batches that a channel delivers next, and what has to be read from disk to have them."""

from collections import deque
from itertools import islice
from pathlib import Path

from ...log import ReadWouldWaitError
from .batch import Batch
from .channel_messages import ChannelMessages
from .message_store import Found, MessageStore, Wanted

_READ_AT_ONCE = 64
"""So many messages are looked up on disk together to be delivered again."""


class ReadAhead:
    """What one channel has read."""

    __slots__ = ("_again", "_batches", "_messages", "_since", "_since_ns", "_store")

    def __init__(self, store: MessageStore, messages: ChannelMessages) -> None:
        self._store = store
        self._messages = messages
        self._batches: deque[Batch] = deque()  # the one at the cursor, and what was read ahead with it
        # The batches that hold some of the requeued messages; None: it is damaged.
        self._again: dict[int, Batch | None] = {}
        # A time that was asked for, see `Wanted.since_ns`; and one that is known, with the first sequence from then on.
        self._since_ns: int | None = None
        self._since: tuple[int, int] | None = None

    def at_cursor(self) -> Batch | None:
        """The batch that holds the cursor, once it has passed over what is missing; None at the end.

        Raises LogReadError; that is ReadWouldWaitError unless the store waits for the disk.
        """
        messages, batches = self._messages, self._batches
        cursor, end = messages.cursor, messages.end
        while cursor.position < end:
            while batches and batches[0].next_sequence <= cursor.position:
                batches.popleft()
            if not batches:
                batches.extend(self._store.fetch(cursor.position))
            if batches and batches[0].base_sequence <= cursor.position:
                return batches[0]
            # Damaged up to the next batch, or to the end, and reported by the log; or dropped by a full memory.
            found = batches[0].base_sequence if batches else end
            cursor.move_to(min(found, end))
        batches.clear()
        return None

    def holding(self, sequence: int) -> Batch | None:
        """The batch that holds a requeued message; None: it is damaged. Raises LogReadError, as `at_cursor`."""
        if self._again and sequence in self._again:
            return self._again.pop(sequence)
        return self._store.batch_holding(sequence)

    def first_since(self, timestamp_ns: int) -> int:
        """A sequence before which all was published before this time. Raises LogReadError, as `at_cursor`."""
        if self._store.waits_for_disk:
            return self._store.first_since(timestamp_ns)
        if self._since is None or self._since[0] > timestamp_ns:
            self._since_ns = timestamp_ns
            raise ReadWouldWaitError(Path(self._store.name))
        (_, sequence), self._since = self._since, None
        return sequence

    def timestamp_in_memory(self, sequence: int) -> int | None:
        """When a message was published, Unix nanoseconds; None if only the log could tell."""
        for batch in self._batches:
            if batch.base_sequence <= sequence < batch.next_sequence:
                return batch.timestamp_ns(sequence - batch.base_sequence)
        return self._store.timestamp_in_memory(sequence)

    def wanted(self) -> Wanted:
        """What has to be read after ReadWouldWaitError, or when `others_wait_for_read`; then `take`."""
        messages, in_memory = self._messages, self._store.in_memory
        cursor = messages.cursor.position
        ahead = cursor if messages.fresh > 0 and self.timestamp_in_memory(cursor) is None else None
        again: tuple[int, ...] = ()
        # If the first is there, what was read with it is still to be delivered, before more is read.
        if messages.requeued.entries and messages.requeued.first not in self._again:
            first = islice(messages.requeued.entries, _READ_AT_ONCE)
            again = tuple([each for each, _, held in first if held is None and not in_memory(each)])
        return Wanted(ahead, again, self._since_ns)

    def take(self, found: Found) -> None:
        """Take what was read, as far as it is still wanted."""
        messages = self._messages
        if not messages.consumers:
            self._since_ns = None
            return  # nobody will ask for it
        if found.wanted.again:
            self._again = found.again.copy()
        first = messages.requeued.first
        if found.error is not None and first in found.wanted.again and first not in found.again:
            messages.requeued.put_first_last()  # the next attempt is another message's
        if found.wanted.since_ns is not None:
            self._since_ns = None
            if found.since is not None:
                self._since = found.wanted.since_ns, found.since
        if found.ahead is not None and messages.cursor.position == found.wanted.ahead:
            self._batches = deque(found.ahead)
            if not found.ahead:  # damaged up to there, and reported by the log
                messages.cursor.move_to(min(found.end, messages.end))

    def drop_batches(self) -> None:
        """Forget the batches: nobody will ask for them."""
        self._batches.clear()
        self._again.clear()

    def clear(self) -> None:
        """Forget everything, also what was asked for."""
        self.drop_batches()
        self._since = self._since_ns = None
