"""The queue of received messages of a consumer, from all its connections, in order of arrival.

It needs no limit of its own: brokers send at most max_in_flight messages before some are answered.
"""

from collections import deque

from ...event_loop import runtime
from .message import Acknowledger, CombinedBatch, Message, MessageBatch


class ReceiveQueue:
    """A queue of batches; the consumer takes whole batches, parts of them, or single messages.

    Attributes:
        closed: The queue is closed and empty.
        error: Why the queue was closed; None: the consumer was closed, or the queue is open.
        available: How many messages are in the queue.
    """

    def __init__(self) -> None:
        self.closed: bool = False
        self.error: Exception | None = None
        self.available: int = 0
        self._batches: deque[MessageBatch] = deque()
        self._offset = 0  # messages of the first batch that are taken
        self._changed = runtime.Event()
        self._more: runtime.Event | None = None  # set when more arrives, if a task waits for that

    def put(self, batch: MessageBatch) -> None:
        """Add a batch, unless the queue is closed."""
        if not self.closed:
            self._batches.append(batch)
            self.available += len(batch)
            self._notify()

    def take_message(self) -> Message | None:
        """Take the oldest message; None if the queue is empty."""
        if not self._batches:
            return None
        batch, offset = self._batches[0], self._offset
        self.available -= 1
        self._offset = offset + 1
        if self._offset == len(batch.ids):
            self._batches.popleft()
            self._offset = 0
        return Message(batch, offset)

    def take_batch(self, max_messages: int | None) -> MessageBatch | None:
        """Take the oldest batch, or its first `max_messages`; None if the queue is empty."""
        if not self._batches:
            return None
        batch, start = self._batches[0], self._offset
        stop = len(batch) if max_messages is None else min(len(batch), start + max_messages)
        self.available -= stop - start
        self._offset = stop
        if stop == len(batch):
            self._batches.popleft()
            self._offset = 0
        return batch if stop - start == len(batch) else batch._split_off(start, stop)

    def take_combined(self, max_messages: int | None) -> MessageBatch | None:
        """Take all messages, or the first `max_messages`, as one batch; None if the queue is empty."""
        parts = []
        while (part := self.take_batch(max_messages)) is not None:
            parts.append(part)
            if max_messages is not None:
                max_messages -= len(part)
                if not max_messages:
                    break
        return CombinedBatch(parts) if len(parts) > 1 else parts[0] if parts else None

    def put_back(self, message: Message) -> None:
        """Make a message that was taken the next one again, unless it cannot be answered any more."""
        if self.closed or message.answered or not message.connected:
            return
        batch = message._batch._split_off(message._index, message._index + 1)
        if self._offset:  # a batch is taken in part
            partly = self._batches.popleft()
            self._batches.appendleft(partly._split_off(self._offset, len(partly)))
            self._offset = 0
        self._batches.appendleft(batch)
        self.available += 1
        self._notify()

    def discard(self, source: Acknowledger) -> None:
        """Drop the messages of a lost connection: the broker will deliver them again."""
        if self._batches and self._batches[0]._source is source:
            self._offset = 0
        self._batches = deque(batch for batch in self._batches if batch._source is not source)
        self.available = sum(map(len, self._batches)) - self._offset

    def close(self, error: Exception | None = None) -> None:
        """Drop all messages and wake all waiting tasks. The first error is kept."""
        if not self.closed:
            self.error = error
        self.closed = True
        self._batches.clear()
        self._offset = 0
        self.available = 0
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        if self._more is not None:
            self._more.set()
            self._more = None

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for messages, and there are none."""
        return not self._batches and self._changed.is_awaited

    async def wait(self) -> None:
        """Wait until the queue may have a message or is closed. Always a checkpoint."""
        if not self._batches and not self.closed and self._changed.is_set():
            self._changed = runtime.Event()
        await self._changed.wait()

    async def wait_for_more(self) -> None:
        """Wait until the next batch arrives or the queue is closed after this call."""
        if self._more is None:
            self._more = runtime.Event()
        await self._more.wait()
