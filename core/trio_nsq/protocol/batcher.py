"""Cutting messages into batches; where is decided by the messages alone, not by the pieces in which they come.

A batch is cut by one slice; nothing here runs once per message.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

MAX_BATCH_BYTES = 1024 * 1024
"""Of bodies in one MPUB, unless a single message has more. nsqd takes 5 MiB in all by default."""


class Batcher:
    """Cuts messages into batches, in order.

    Args:
        max_messages: Of one batch.
        max_bytes: Of the bodies of one batch; a longer message is a batch of its own.
    """

    def __init__(self, max_messages: int, max_bytes: int = MAX_BATCH_BYTES) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: list[bytes] = []
        self._start = 0  # those before it have left

    def __len__(self) -> int:
        """How many messages wait for more to join them."""
        return len(self._messages) - self._start

    def add(self, messages: list[bytes]) -> Iterator[list[bytes]]:
        """Take in messages and yield the batches that are full with them."""
        if self:
            messages = self._messages[self._start :] + messages
        self._messages, self._start = messages, 0
        ends = list(accumulate(map(len, messages)))
        before = 0
        while True:
            start = self._start
            stop = min(start + self._max_messages, bisect_right(ends, before + self._max_bytes, lo=start))
            stop = max(stop, start + 1)
            # Full when it has its number, or when the next message would not fit in.
            if stop > len(messages) or (stop == len(messages) and stop - start < self._max_messages):
                return
            self._start, before = stop, ends[stop - 1]
            yield messages[start:stop]

    def rest(self) -> list[bytes]:
        """What waits, as a batch that is not full; it no longer waits."""
        batch = self._messages[self._start :]
        self._messages, self._start = [], 0
        return batch
