"""Delivery: which messages of a channel go to which of its consumers."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import islice

from ...log import LogReadError, ReadWouldWaitError
from ...protocol.commands import FINISH_LINE_BYTES
from ...protocol.frames import MESSAGE_FRAME_BYTES
from .batch import Batch
from .channel_messages import ChannelMessages
from .consumer import Consumer
from .in_flight import Delivery
from .read_ahead import ReadAhead
from .timeouts import Timeouts
from .topic_view import TopicView

MAX_GRANT_BYTES = 256 * 1024
"""What one consumer gets in one round of `dispatch`, unless a single message is larger."""
_CONSUMERS_AT_ONCE = 16
_REQUEUED_AT_ONCE = 256
"""Redeliveries cost work for each message. A call of `dispatch` takes a few milliseconds at the very most."""
_PASSED_AT_ONCE = 256
"""So many records in a row that it is not to deliver are passed over at once, for the same reason."""

_WAIT_STEPS = 50
"""Messages may wait longer than a consumer has said by a fiftieth of that."""
_CONSUMERS_COMPARED = 16

Payload = bytes | memoryview
Grant = tuple[Consumer, Payload]


class OutputBuffering:
    """Whether messages wait for more, to be sent together (NSQ protocol: output buffering). One for a channel.

    Unlike nsqd, messages do not wait in the client's buffer, where nobody else could have them, and where each would
    cost a delivery of its own. Where there are several consumers, all have the patience of the least patient.

    Attributes:
        sent_ns: When something was sent last.
        sent_bytes: The topic's `message_bytes` when there was nothing left to be sent; None while there is.
    """

    def __init__(self, topic: TopicView) -> None:
        self._topic = topic
        self._buffers: Counter[tuple[int, int]] = Counter()  # how many consumers have which
        self._least_bytes = self._least_ns = 0
        self.sent_ns = 0
        self.sent_bytes: int | None = None

    def count(self, consumer: Consumer, more: int) -> None:
        """Count a consumer's buffer once more, or once less."""
        self._buffers[consumer.buffer_bytes, consumer.buffer_ns] += more
        self._buffers = +self._buffers
        self._least_bytes = min([size_bytes for size_bytes, _ in self._buffers], default=0)
        self._least_ns = min([time_ns for _, time_ns in self._buffers], default=0)

    def can_wait(self, fresh: int, ready: dict[Consumer, None]) -> bool:
        """Whether so many fresh messages may wait for more.

        As in nsqd they may not when they fill the client's buffer, or are as many as one of the next clients can take;
        nor where there may be no room for what comes next.
        """
        if not self._least_ns or self.sent_bytes is None or self._topic.is_limited:
            return False
        consumers = len(ready)
        frame_bytes = self._topic.message_bytes - self.sent_bytes + fresh * MESSAGE_FRAME_BYTES
        if frame_bytes >= consumers * self._least_bytes:
            return False
        share = -(-fresh // consumers)
        next_ones: Iterable[Consumer] = islice(ready, _CONSUMERS_COMPARED)
        return share < min([consumer.window for consumer in next_ones])

    @property
    def wait_until_ns(self) -> int:
        """Until when they may: so long after something was sent, so that a message after a pause goes at once."""
        # Many channels are to be served when a timer wakes for one.
        step_ns = self._least_ns // _WAIT_STEPS
        return -(-(self.sent_ns + self._least_ns) // step_ns) * step_ns


class Dispatcher:
    """Puts messages of one channel in flight.

    Attributes:
        paused: Nothing is sent to consumers.
        budget_exhausted: The last `dispatch` passed over as many messages as one call may, because they are too old,
            damaged, or for others. There may be more behind them.
        others_wait_for_read: The last `dispatch` could deliver something, but other messages have to be read from disk
            first, see `ReadAhead.wanted`.
    """

    def __init__(
        self,
        name: str,
        topic: TopicView,
        messages: ChannelMessages,
        read_ahead: ReadAhead,
        timeouts: Timeouts,
    ) -> None:
        self.paused = False
        self.buffering = OutputBuffering(topic)
        self.budget_exhausted = False
        self.others_wait_for_read = False
        self.name = name
        self._topic = topic
        self._messages = messages
        self._read_ahead = read_ahead
        self._timeouts = timeouts
        self._ready: dict[Consumer, None] = {}
        # Of the round of delivery that is under way: how many consumers are still to be served, and with how much.
        self._unserved = 0
        self._share = 0
        self._ahead_ns = 0  # as `dispatch` was told

    # ------------------------------------------------------------------ consumers

    def add(self, consumer: Consumer) -> None:
        self.buffering.count(consumer, 1)
        self.refresh(consumer)

    def remove(self, consumer: Consumer) -> None:
        self.buffering.count(consumer, -1)
        self._ready.pop(consumer, None)

    def refresh(self, consumer: Consumer) -> None:
        """Look again whether a consumer can take messages, after RDY, or a change of `blocked`."""
        if consumer.window > 0 and consumer in self._messages.consumers:
            self._ready.setdefault(consumer)
        else:
            self._ready.pop(consumer, None)

    # ------------------------------------------------------------------ whether there is something to do

    @property
    def has_ready_consumer(self) -> bool:
        """Some consumer could take messages if there were any."""
        return bool(self._ready) and not self.paused

    @property
    def can_deliver(self) -> bool:
        return bool(self._ready) and not self.paused and self._messages.ready_count > 0

    @property
    def can_wait(self) -> bool:
        """Messages that can be delivered may wait for more, to be sent with them: see `buffering.wait_until_ns`.

        What comes again does not wait.
        """
        buffering, messages = self.buffering, self._messages
        if buffering.sent_bytes is None or messages.requeued.entries:
            return False
        return buffering.can_wait(messages.fresh, self._ready)

    # ------------------------------------------------------------------ delivery

    def dispatch(self, now_ns: int, ahead_ns: int = 0) -> list[Grant]:
        """A round of delivery: what is ready, split evenly over the consumers that can take it.

        Many consumers are served a few at a time, by several calls.

        Args:
            now_ns: Unix nanoseconds, by a clock that never steps.
            ahead_ns: By how much that of the messages' timestamps, which can be set, is ahead of it.

        Returns:
            Frames to be sent, and to whom; empty when there is nothing to send or nobody to send it to. What is
            returned counts as in flight. Call again until it is empty, and later if the `budget_exhausted`.

        Raises:
            LogReadError: The operating system refused. Nothing was put in flight, and nothing is lost.
            ReadWouldWaitError: The next messages have to be read from disk first, see `ReadAhead.wanted`. Likewise.
        """
        grants: list[Grant] = []
        self.budget_exhausted = self.others_wait_for_read = False
        self._ahead_ns = ahead_ns
        ready, messages = self._ready, self._messages
        if not ready or self.paused or (depth := messages.ready_count) <= 0:
            return grants
        if not self._unserved:
            self._unserved = min(len(ready), depth)
            self._share = -(-depth // len(ready))
        served = list(islice(ready, min(self._unserved, _CONSUMERS_AT_ONCE)))
        self._unserved -= len(served)
        for consumer in served:
            try:
                payloads = self._take(consumer, min(self._share, consumer.window), now_ns)
            except LogReadError:
                if grants:
                    break  # what is granted has to be sent; the next call meets the error again
                raise
            if not payloads:
                self._unserved = 0
                break
            grants += [(consumer, payload) for payload in payloads]
            # To the end of the line, so that a single message goes to each in turn.
            del ready[consumer]
            self.refresh(consumer)
        self.buffering.sent_bytes = None if messages.ready_count else self._topic.message_bytes
        if grants:
            self.buffering.sent_ns = now_ns
        return grants

    def _take(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        """Requeued messages and fresh ones alternate, so that neither starves the other.

        They do so for each consumer by itself: a turn that went round all of them could fall in step with one, which
        would then get back all that it requeues.
        """
        if not self._messages.requeued.entries:
            consumer.requeued_turn = True
            return self._take_fresh(consumer, count, now_ns)
        requeued_first = consumer.requeued_turn or self._messages.fresh <= 0
        consumer.requeued_turn = not requeued_first
        takers = (self._take_fresh, self._take_requeued)
        error: LogReadError | None = None
        # What is damaged or cannot be read does not hold back the other kind.
        for take in reversed(takers) if requeued_first else takers:
            try:
                if payloads := take(consumer, count, now_ns):
                    # Or nobody would read these while there are enough of the other kind.
                    self.others_wait_for_read |= isinstance(error, ReadWouldWaitError)
                    return payloads
            except LogReadError as exc:
                error = exc
        if error is not None:
            raise error
        return []

    def _put_in_flight(self, consumer: Consumer, delivery: Delivery) -> None:
        consumer.in_flight.put(delivery)
        consumer.message_count += delivery.left
        timeouts = self._timeouts
        if timeouts.first_ns is None or delivery.deadline_ns < timeouts.first_ns:
            timeouts.first_ns = delivery.deadline_ns

    # ------------------------------------------------------------------ requeued messages

    def _take_requeued(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        requeued = self._messages.requeued
        frames: list[bytes] = []
        room = MAX_GRANT_BYTES
        ttl_ns = self._topic.ttl_ns
        oldest_ns = now_ns + self._ahead_ns - ttl_ns
        deadline_ns = now_ns + consumer.msg_timeout_ns
        measured = bool(self._topic.e2e_window_ns)
        count = min(count, _REQUEUED_AT_ONCE)
        done = 0  # messages that are not to be delivered again any more
        try:
            for sequence, attempts, held in islice(requeued.entries, _REQUEUED_AT_ONCE):
                if len(frames) >= count:
                    break
                batch = self._read_ahead.holding(sequence) if held is None else held
                if batch is None:
                    done += 1  # damaged on disk, and reported by the log
                    continue
                index = sequence - batch.base_sequence
                if ttl_ns and batch.timestamp_ns(index) < oldest_ns:
                    done += 1
                    self._messages.expired_count += 1
                    continue
                if consumer.sample is not None and not consumer.sample():
                    done += 1
                    continue
                message_id, frame = batch.frame(index, attempts + 1)
                if frames and len(frame) > room:
                    break
                done += 1
                frames.append(frame)
                room -= len(frame)
                timestamp_ns = batch.timestamp_ns(index) if measured else 0
                line = b"FIN %s\n" % message_id
                self._put_in_flight(
                    consumer, Delivery(line, sequence, attempts + 1, now_ns, deadline_ns, held, timestamp_ns)
                )
            else:
                self.budget_exhausted = len(requeued.entries) > done and len(frames) < count
        except ReadWouldWaitError:
            if not frames:
                raise
        except LogReadError:
            if not frames:
                requeued.remove_first(done)
                done = 0
                requeued.put_first_last()  # the next attempt is another message's
                raise
        finally:
            if done:
                requeued.remove_first(done)
        return [b"".join(frames)] if frames else []

    # ------------------------------------------------------------------ fresh messages

    def _take_fresh(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        payloads: list[Payload] = []
        room = MAX_GRANT_BYTES
        passes = _PASSED_AT_ONCE
        topic, messages = self._topic, self._messages
        cursor = messages.cursor
        deadline_ns = now_ns + consumer.msg_timeout_ns
        while count > 0 and room > 0:
            try:
                batch = self._read_ahead.at_cursor()
                if batch is not None and self._passes(batch, now_ns):
                    passes -= 1
                    if not passes:
                        self.budget_exhausted = True
                        break
                    continue
            except LogReadError:
                if payloads:
                    break
                raise
            if batch is None:
                break
            first, limit = cursor.position, messages.limit
            wanted = min(count, limit - first)
            if consumer.sample is not None:
                end = min(batch.next_sequence, limit)
                while first < end and not consumer.sample():
                    first += 1
                cursor.move_to(first)
                if first == end:
                    continue
                wanted = 1
            lines, frames = batch.take(first - batch.base_sequence, wanted, room)
            if payloads and len(frames) > room and consumer.sample is None:  # each message is sampled once
                break
            payloads.append(frames)
            held = batch if topic.ephemeral else None
            taken = len(lines) // FINISH_LINE_BYTES
            if not topic.e2e_window_ns:
                self._put_in_flight(consumer, Delivery(lines, first, 1, now_ns, deadline_ns, held))
            else:  # a delivery for each timestamp, of which there is but one if records are large
                at = 0
                for timestamp_ns, same in batch.timestamps_ns(first - batch.base_sequence, taken):
                    run = lines[at * FINISH_LINE_BYTES : (at + same) * FINISH_LINE_BYTES]
                    self._put_in_flight(
                        consumer, Delivery(run, first + at, 1, now_ns, deadline_ns, held, timestamp_ns)
                    )
                    at += same
            cursor.move_to(first + taken)
            count -= taken
            room -= len(frames)
        return payloads

    def _passes(self, batch: Batch, now_ns: int) -> bool:
        """Pass over what is at the cursor, if it is too old, for later or for others. Raises LogReadError."""
        if self._topic.ttl_ns and self._pass_expired(batch, now_ns + self._ahead_ns - self._topic.ttl_ns):
            return True
        if batch.due_ns > now_ns:
            self._put_off(batch)
        elif batch.channel not in (None, self.name):
            self._messages.cursor.move_to(min(batch.next_sequence, self._messages.limit))
        else:
            return False
        return True

    def _pass_expired(self, batch: Batch, oldest_ns: int) -> bool:
        """Drop what was published before a time, if that is what is at the cursor. Raises LogReadError."""
        index = self._messages.cursor.position - batch.base_sequence
        if batch.timestamp_ns(index) >= oldest_ns:
            return False
        if batch.timestamp_ns(len(batch) - 1) < oldest_ns:
            sequence = batch.next_sequence
            if self._read_ahead.timestamp_in_memory(sequence) is None:
                # There may be gigabytes of it, which it would take long to read.
                sequence = max(sequence, self._read_ahead.first_since(oldest_ns))
        else:
            at = range(len(batch))
            sequence = batch.base_sequence + bisect_left(at, oldest_ns, index, key=batch.timestamp_ns)
        self._messages.expire_before(sequence)
        return True

    def _put_off(self, batch: Batch) -> None:
        """Let messages at the cursor wait for their time: the channel was moved back to before they were published."""
        messages = self._messages
        held = batch if self._topic.ephemeral else None
        end = min(batch.next_sequence, messages.limit)
        if batch.channel in (None, self.name):
            messages.deferred.add(batch.due_ns, range(messages.cursor.position, end), 0, held)
        messages.cursor.move_to(end)
