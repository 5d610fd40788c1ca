"""The queue of received messages of a consumer whose messages other threads take.

The event loop's thread owns the queue. It lends the messages to other threads: they stand in a `deque`, from which any
thread takes one without asking, because that is a single atomic call. Before the loop takes messages itself, for a
batch or a handler, it takes back those that are lent. Lent messages count as received and unanswered like all others.
"""

from collections import deque
from threading import TIMEOUT_MAX
from time import monotonic

from ..client.consuming import message as client_message
from ..client.consuming.receive_queue import ReceiveQueue
from ..event_loop import runtime
from .message import Message, MessageBatch
from .portal import Portal
from .waiting import Lock, new_lock


class SharedQueue(ReceiveQueue):
    """A `ReceiveQueue` from which other threads take messages.

    Attributes:
        portal: To the thread of the event loop; set before the consumer is opened.
    """

    portal: Portal

    def __init__(self) -> None:
        super().__init__()
        self._lent: deque[Message] = deque()  # if there are some, `_batches` is empty
        self._returned: deque[Message] = deque()
        self._lends = False  # lend what arrives; no: threads wait for batches, not for messages
        self._waiting: deque[Lock] = deque()  # a lock for each thread that waits; released to wake it

    # ------------------------------------------------------------------ in other threads

    def take_lent(self) -> Message | None:
        """Take the oldest message that is lent; None: there is none."""
        self.portal.check_process()
        while self._lent:
            try:
                message = self._lent.popleft()
            except IndexError:  # another thread was faster
                break
            if self._waiting and self._lent:
                self._wake_one()
            if message.connected:  # otherwise the broker delivers it again
                return message
        return None

    def wait_for_message(self, timeout_s: float) -> Message | None:
        """Take the oldest message, or wait for one. None: none arrived in this time, or the queue is closed."""
        message = self.take_lent()
        if message is None:
            now = monotonic()
            give_up_at = now + timeout_s
            if not self._lends or self._batches:
                self.portal.run_sync(self.lend)
                message = self.take_lent()
            while message is None and now < give_up_at and not self.closed:
                self._wait_for_lent(give_up_at - now)
                message = self.take_lent()
                now = monotonic()
        return message

    def return_lent(self, message: Message) -> None:
        """Return a message that `Consumer.run` must see: only `take_message` takes it, before all others."""
        self._returned.append(message)

    def _wait_for_lent(self, timeout_s: float) -> None:
        lock = new_lock()
        try:
            self._waiting.append(lock)  # before looking, so that what comes afterwards releases the lock
            if self._lent or self.closed:
                return
            if not self._lends or self._batches:
                self.portal.post(self.lend)
            lock.acquire(timeout=min(timeout_s, TIMEOUT_MAX))
        except BaseException:  # interrupted, perhaps after another thread has woken this one for a message
            self._stop_waiting(lock)
            if self._lent:
                self._wake_one()
            raise
        finally:
            self._stop_waiting(lock)

    def _stop_waiting(self, lock: Lock) -> None:
        try:
            self._waiting.remove(lock)
        except ValueError:
            pass  # it was woken

    def _wake_one(self) -> None:
        try:
            self._waiting.popleft().release()
        except IndexError:
            pass

    # ------------------------------------------------------------------ in the event loop's thread

    def lend(self) -> None:
        """Lend all messages, and those that arrive, until the loop takes one itself and no thread waits for one."""
        self._lends = True
        while self._batches:
            batch, start = self._batches.popleft(), self._offset
            self._offset = 0
            shared = MessageBatch(batch, self.portal)
            self._lent.extend(
                [Message(shared, batch, index, index) for index in range(start, len(batch.ids))]
            )
        self.available: int = 0
        if self._lent:
            self._wake_one()

    def _take_back(self) -> None:
        """Take back the messages that are lent; stop lending unless threads wait for messages."""
        self._lends = bool(self._waiting)
        lent = self._lent
        begun: tuple[client_message.MessageBatch, int, int] | None = None  # one batch, from, up to
        while lent or begun is not None:
            try:
                message = lent.popleft()
            except IndexError:
                message = None
            if begun is not None:
                batch, start, stop = begun
                if message is not None and message._batch is batch and message._index == stop:
                    begun = batch, start, stop + 1
                    continue
                self._add_back(batch, start, stop)
                begun = None
            if message is not None:
                batch, start = message._batch, message._index
                begun = batch, start, start + 1

    def _add_back(self, batch: client_message.MessageBatch, start: int, stop: int) -> None:
        if batch.connected:
            is_whole = stop - start == batch.unanswered_count == len(batch)
            self._batches.append(batch if is_whole else batch._split_off(start, stop))
            self.available += stop - start

    def _lend_rest(self) -> None:
        if self._lends:
            self.lend()

    def put(self, batch: client_message.MessageBatch) -> None:
        super().put(batch)
        if not self.closed:
            self._lend_rest()

    def take_message(self) -> client_message.Message | None:
        try:
            return self._returned.popleft()
        except IndexError:
            pass
        return self.take_lent() or super().take_message()

    def put_returned_back(self) -> None:
        """Have every taker find the messages that were returned, once no `Consumer.run` takes them."""
        while self._returned:
            self.put_back(self._returned.pop())

    def take_batch(self, max_messages: int | None) -> client_message.MessageBatch | None:
        self._take_back()
        batch = super().take_batch(max_messages)
        self._lend_rest()
        return batch

    def put_back(self, message: client_message.Message) -> None:
        self._take_back()
        super().put_back(message)
        self._lend_rest()

    def close(self, error: Exception | None = None) -> None:
        super().close(error)
        self.shut()

    def shut(self) -> None:
        """Close the queue for the other threads. May also be called once the event loop has ended."""
        self.closed = True
        self._lent.clear()
        self._returned.clear()
        for _ in range(len(self._waiting)):
            self._wake_one()

    @property
    def is_awaited(self) -> bool:
        return super().is_awaited or (bool(self._waiting) and not self._lent)

    async def wait(self) -> None:
        if self._lent or self._returned:
            await runtime.checkpoint()
        else:
            await super().wait()
