"""Split messages into batches. The batches do not depend on the pieces in which messages arrive.

A batch is one slice; no Python code runs per message.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from .headers import MAX_HPUB_HEADERS_BYTES, MAX_HPUB_MESSAGES, SIZE_BYTES

MAX_BATCH_BYTES = 1024 * 1024
"""The limit of the bodies of one MPUB, unless a single message is larger. nsqd accepts 5 MiB by default."""
_SIZE_BYTES = 4
"""The size field before each message in an MPUB."""


class Batcher:
    """Splits messages into batches, in order.

    Args:
        max_messages: The most messages in a batch.
        max_bytes: The most bytes of all bodies in a batch; a longer message is sent as a batch by itself.
    """

    def __init__(self, max_messages: int, max_bytes: int = MAX_BATCH_BYTES) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: list[bytes] = []
        self._start = 0  # index of the first message that was not returned

    def __len__(self) -> int:
        """How many messages are not in a batch yet."""
        return len(self._messages) - self._start

    def add(self, messages: list[bytes]) -> Iterator[list[bytes]]:
        """Add messages and yield the full batches."""
        if self:
            messages = self._messages[self._start :] + messages
        self._messages, self._start = messages, 0
        ends = list(accumulate(map(len, messages)))
        before = 0
        while True:
            start = self._start
            stop = min(start + self._max_messages, bisect_right(ends, before + self._max_bytes, lo=start))
            stop = max(stop, start + 1)
            # A batch is full when it has max_messages, or when the next message does not fit.
            if stop > len(messages) or (stop == len(messages) and stop - start < self._max_messages):
                return
            self._start, before = stop, ends[stop - 1]
            yield messages[start:stop]

    def rest(self) -> list[bytes]:
        """Remove and return the remaining messages, as a batch that is not full."""
        batch = self._messages[self._start :]
        self._messages, self._start = [], 0
        return batch


class HeadersBatcher:
    """Splits messages into batches as `Batcher`, within the limits of an HPUB for those that have headers.

    Args:
        max_messages: The most messages in a batch.
        max_bytes: The most bytes in a batch, headers included; a longer message is a batch by itself.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: list[bytes] = []
        self._size = self._headers_bytes = 0

    def __len__(self) -> int:
        """How many messages are not in a batch yet."""
        return len(self._messages)

    def add(self, messages: list[bytes]) -> Iterator[list[bytes]]:
        """Add messages, each after its headers, see `prefix_of`. Yield the full batches."""
        for message in messages:
            more = int.from_bytes(message[:SIZE_BYTES], "big")
            most = self._max_messages
            if more or self._headers_bytes:
                most = min(most, MAX_HPUB_MESSAGES)
            if self._messages and (
                self._size + len(message) > self._max_bytes
                or self._headers_bytes + more > MAX_HPUB_HEADERS_BYTES
                or len(self._messages) >= most
            ):
                yield self.rest()
            self._messages.append(message)
            self._size += len(message)
            self._headers_bytes += more

    def rest(self) -> list[bytes]:
        """Remove and return the remaining messages, as a batch that is not full."""
        batch = self._messages
        self._messages, self._size, self._headers_bytes = [], 0, 0
        return batch


def split_for_mpub(
    bodies: Sequence[bytes], sizes: Iterable[int], max_bytes: int
) -> Iterator[Sequence[bytes]]:
    """Split messages into parts of at most `max_bytes` of an MPUB each; a larger message is a part by itself."""
    ends = list(accumulate(map(_SIZE_BYTES.__add__, sizes)))
    start = before = 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, before + max_bytes, lo=start))
        yield bodies[start:stop]
        start, before = stop, ends[stop - 1]
