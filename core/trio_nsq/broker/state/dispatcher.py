"""Dispatch: distributes the ready messages of a channel over its consumers."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Final

from ...log import LogReadError, ReadWouldWaitError
from ...protocol.bulk import FINISH_LINE_BYTES, MESSAGE_FRAME_BYTES
from .batch import Batch
from .channel_messages import ChannelMessages
from .consumer import REGION, ZONE, Consumer
from .deferred import Requeued
from .in_flight_batch import InFlightBatch
from .key_order import KeyOrder
from .keyed_send import KeyedSend
from .rate_limit import RateLimit
from .read_ahead import ReadAhead
from .timeouts import Timeouts
from .topic_view import TopicView

MAX_GRANT_BYTES = 256 * 1024  # not Final: tests set it
"""Maximum bytes that one consumer gets in one round of `dispatch`, unless a single message is larger."""
_CONSUMERS_AT_ONCE: Final = 16
_REQUEUED_AT_ONCE: Final = 256
"""Limit on redeliveries per call: each costs Python work, and a call should take a few milliseconds at most."""
_RELEASED_AT_ONCE: Final = 1024
"""The same, for messages that were blocked by their keys: these are delivered together."""
_PASSED_AT_ONCE: Final = 256
"""Limit on consecutive undeliverable records skipped per call, for the same reason."""

_SEQUENCE: Final = itemgetter(0)
_EXAMINED_AT_ONCE: Final = 4096
_EXAMINED_BYTES_AT_ONCE: Final = 1024 * 1024
"""Limits on messages whose keys are read and compared per call, beyond those of the last batch."""

_WAIT_STEPS: Final = 50
"""Messages may wait 1/50 longer than the consumer's output buffer timeout."""
_CONSUMERS_COMPARED: Final = 16
_ROOM_DIVISOR: Final = 8
"""Less than 1/8 of its RDY is little room for a consumer."""

Payload = bytes | memoryview
Grant = tuple[Consumer, Payload]


class OutputBuffering:
    """Decides whether a channel's messages wait to be sent together (NSQ protocol: output buffering).

    Unlike nsqd, messages do not wait in a client's buffer: there, no other consumer could get them, and each would
    cost a separate delivery. If a channel has several consumers, the smallest buffer and timeout apply to all.

    Attributes:
        sent_ns: Time of the last send.
        sent_bytes: The topic's `message_bytes` when the channel was last drained; None while messages are ready.
    """

    def __init__(self, topic: TopicView) -> None:
        self._topic = topic
        self._buffers: Counter[tuple[int, int]] = Counter()  # consumers by (bytes, ns)
        self._least_bytes = self._least_ns = 0
        self.sent_ns = 0
        self.sent_bytes: int | None = None

    def count(self, consumer: Consumer, more: int) -> None:
        """Add `more`, 1 or -1, to the number of consumers with this consumer's buffer settings."""
        buffer = consumer.buffer_bytes, consumer.buffer_ns
        before = self._buffers[buffer]
        self._buffers[buffer] = before + more
        if before and before + more:
            return  # others have the same
        self._buffers = +self._buffers
        self._least_bytes = min([size_bytes for size_bytes, _ in self._buffers], default=0)
        self._least_ns = min([time_ns for _, time_ns in self._buffers], default=0)

    def can_wait(self, count: int, ready: dict[Consumer, None]) -> bool:
        """Whether this many ready messages may wait for more.

        As in nsqd, they do not wait if they fill the client's buffer, or if one of the next clients has no room for
        more. Of requeued messages, only the heads of their frames count. They also do not wait if the topic is limited,
        because it could refuse further messages.
        """
        if not self._least_ns or self.sent_bytes is None or self._topic.is_limited:
            return False
        consumers = len(ready)
        frame_bytes = self._topic.message_bytes - self.sent_bytes + count * MESSAGE_FRAME_BYTES
        if frame_bytes >= consumers * self._least_bytes:
            return False
        share = -(-count // consumers)
        compared = _CONSUMERS_COMPARED
        for consumer in ready:
            if consumer.window <= share:
                return False
            compared -= 1
            if not compared:
                break
        return True

    @property
    def is_on(self) -> bool:
        """Whether all consumers allow messages to wait."""
        return self._least_ns > 0

    @property
    def wait_until_ns(self) -> int:
        """End of the wait. It counts from the last send, so a message after a pause is sent at once."""
        # Rounded up to a step, so that one timer serves many channels.
        step_ns = self._least_ns // _WAIT_STEPS
        return -(-(self.sent_ns + self._least_ns) // step_ns) * step_ns


class Dispatcher:
    """Puts messages of one channel in flight.

    Attributes:
        suspended: The channel sends no messages to consumers: it is paused, or its rate limit is reached.
        resumes_ns: When the rate limit allows further deliveries; None: it does not suspend the channel.
        budget_exhausted: The last `dispatch` skipped as many expired, damaged or other channels' messages as one call
            may. Deliverable messages may follow them.
        others_wait_for_read: The last `dispatch` delivered messages, but others must be read from disk first, see
            `ReadAhead.wanted`.
    """

    def __init__(
        self,
        name: str,
        topic: TopicView,
        messages: ChannelMessages,
        read_ahead: ReadAhead,
        timeouts: Timeouts,
        watch: Callable[[int], None],
    ) -> None:
        self.suspended = False
        self.resumes_ns: int | None = None
        self.buffering: OutputBuffering = OutputBuffering(topic)
        self.budget_exhausted: bool = False
        self.others_wait_for_read: bool = False
        self.name = name
        self._topic = topic
        self._messages = messages
        self._read_ahead = read_ahead
        self._timeouts = timeouts
        self._watch = watch
        self._is_paused = False
        self._rate_limit: RateLimit | None = None
        self._ready: dict[Consumer, None] = {}
        # Those of them in the broker's zone, and in its region; both empty if the broker does not know where it is.
        self._ready_in_zone: dict[Consumer, None] = {}
        self._ready_in_region: dict[Consumer, None] = {}
        # Current round: whom it serves, the number of consumers still to serve, and the messages for each.
        self._served: dict[Consumer, None] = self._ready
        self._unserved = 0
        self._share = 0
        self._ahead_ns = 0  # argument of the last `dispatch`
        self._passes_left = 0  # undeliverable batches that the present call may skip

    # ------------------------------------------------------------------ consumers

    def add(self, consumer: Consumer) -> None:
        self.buffering.count(consumer, 1)
        self.refresh(consumer)

    def remove(self, consumer: Consumer) -> None:
        self.buffering.count(consumer, -1)
        self._withdraw(consumer)

    def refresh(self, consumer: Consumer) -> None:
        """Update whether a consumer can take messages, after RDY or a change of `blocked`."""
        if consumer.window <= 0 or consumer not in self._messages.consumers:
            self._withdraw(consumer)
            return
        self._ready.setdefault(consumer)
        if consumer.nearness == ZONE:
            self._ready_in_zone.setdefault(consumer)
        elif consumer.nearness == REGION:
            self._ready_in_region.setdefault(consumer)

    def _withdraw(self, consumer: Consumer) -> None:
        """Remove a consumer from those that can take messages."""
        self._ready.pop(consumer, None)
        if consumer.nearness == ZONE:
            self._ready_in_zone.pop(consumer, None)
        elif consumer.nearness == REGION:
            self._ready_in_region.pop(consumer, None)

    # ------------------------------------------------------------------ suspension

    @property
    def paused(self) -> bool:
        """Whether the channel sends no messages to consumers, whatever its rate limit."""
        return self._is_paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._is_paused = paused
        self._update_suspended()

    def limit_rate(self, per_s: int) -> None:
        """Limit the deliveries per second; 0: without limit."""
        self._rate_limit = RateLimit(per_s) if per_s else None
        self.resumes_ns = None
        self._update_suspended()

    def resume(self, now_ns: int) -> None:
        """End the suspension by the rate limit, if it is time."""
        if self.resumes_ns is not None and self.resumes_ns <= now_ns:
            self.resumes_ns = None
            self._update_suspended()

    def _suspend(self, limit: RateLimit) -> None:
        """Suspend the channel until its rate limit allows the deliveries of its ready messages, or a burst."""
        self.resumes_ns = limit.next_ns(max(1, self._messages.ready_count))
        self._update_suspended()
        self._watch(self.resumes_ns)

    def _update_suspended(self) -> None:
        self.suspended = self._is_paused or self.resumes_ns is not None

    # ------------------------------------------------------------------ readiness

    @property
    def has_ready_consumer(self) -> bool:
        """Whether a consumer can take messages."""
        return bool(self._ready) and not self.suspended

    @property
    def can_deliver(self) -> bool:
        return bool(self._ready) and not self.suspended and self._messages.ready_count > 0

    @property
    def _nearest(self) -> dict[Consumer, None]:
        """The consumers that the next round serves."""
        return self._ready_in_zone or self._ready_in_region or self._ready

    @property
    def can_wait(self) -> bool:
        """Whether deliverable messages may wait for more, until `buffering.wait_until_ns`."""
        order = self._messages.order
        if order is not None and order.has_released:
            return False  # no further message of these keys can come and fill a buffer
        return self.buffering.can_wait(self._messages.ready_count, self._nearest)

    @property
    def has_little_room(self) -> bool:
        """Whether the next consumers have most of their RDY in flight, and allow messages to wait."""
        if not self.buffering.is_on:
            return False
        for consumer in islice(self._nearest, _CONSUMERS_COMPARED):
            if consumer.window * _ROOM_DIVISOR >= consumer.ready_count:
                return False
        return True

    # ------------------------------------------------------------------ delivery

    def dispatch(self, now_ns: int, ahead_ns: int = 0) -> list[Grant]:
        """Run one round of delivery: split the ready messages evenly over the nearest consumers that can take them.

        With many consumers, a round takes several calls. If messages are left, the next round serves consumers that are
        less near.

        Args:
            now_ns: Unix nanoseconds, from a clock that never steps.
            ahead_ns: How far the clock of the messages' timestamps, which can be set, is ahead of it.

        Returns:
            Consumers and the frames to send them; empty if no message or no consumer is ready. The messages count as
            in flight. Call again until the result is empty, and again later if `budget_exhausted` is set.

        Raises:
            LogReadError: The operating system failed to read. No message was put in flight, and none is lost.
            ReadWouldWaitError: The next messages must be read from disk first, see `ReadAhead.wanted`. No message was
                put in flight, and none is lost.
        """
        grants: list[Grant] = []
        self.budget_exhausted = self.others_wait_for_read = False
        self._ahead_ns = ahead_ns
        messages = self._messages
        if not self._ready or self.suspended or (depth := messages.ready_count) <= 0:
            return grants
        limit, allowed = self._rate_limit, 0
        if limit is not None:
            if not (allowed := limit.available(now_ns)):
                self._suspend(limit)
                return grants
            depth = min(depth, allowed)
        ready = self._nearest
        if ready is not self._served:
            self._served, self._unserved = ready, 0
        if not self._unserved:
            self._unserved = min(len(ready), depth)
            # A rate limit ends each round: rounded up, the first consumers would always get more than the last ones.
            self._share = -(-depth // len(ready)) if limit is None else max(1, depth // len(ready))
        served = list(islice(ready, min(self._unserved, _CONSUMERS_AT_ONCE)))
        self._unserved -= len(served)
        for consumer in served:
            wanted, before = min(self._share, consumer.window), consumer.in_flight.count
            if limit is not None and (wanted := min(wanted, allowed)) <= 0:
                self._unserved = 0
                break
            try:
                payloads = self._take(consumer, wanted, now_ns)
            except LogReadError:
                if grants:
                    break  # the granted messages must be sent; the next call raises the error again
                raise
            if not payloads:
                self._unserved = 0
                break
            grants += [(consumer, payload) for payload in payloads]
            if limit is not None:
                taken = consumer.in_flight.count - before
                allowed -= taken
                limit.take(taken)
            # Move the consumer to the end of the queue, so that single messages alternate between consumers.
            self._withdraw(consumer)
            self.refresh(consumer)
        self.buffering.sent_bytes = None if messages.ready_count else self._topic.message_bytes
        if grants:
            self.buffering.sent_ns = now_ns
        if limit is not None and allowed <= 0 and messages.ready_count:
            self._suspend(limit)
        return grants

    def _take(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        """Take requeued or fresh messages in alternation, so that neither kind starves the other.

        Each consumer alternates separately. A shared alternation could fall into step with one consumer, which would
        then get all messages that it requeued.
        """
        if not self._messages.requeued.entries:
            consumer.requeued_turn = True
            return self._take_fresh(consumer, count, now_ns)
        order = self._messages.order
        requeued_first = consumer.requeued_turn or self._messages.fresh <= 0
        if order is not None and (order.has_released or order.has_unread):
            requeued_first = True
        consumer.requeued_turn = not requeued_first
        takers = (self._take_fresh, self._take_requeued)
        error: LogReadError | None = None
        # If one kind is damaged or cannot be read, deliver the other.
        for take in reversed(takers) if requeued_first else takers:
            try:
                if payloads := take(consumer, count, now_ns):
                    # Otherwise these would not be read while the other kind suffices.
                    self.others_wait_for_read |= isinstance(error, ReadWouldWaitError)
                    return payloads
            except LogReadError as exc:
                error = exc
        if error is not None:
            raise error
        return []

    def _put_in_flight(self, consumer: Consumer, delivery: InFlightBatch) -> None:
        consumer.in_flight.put(delivery)
        consumer.message_count += delivery.left
        self._timeouts.add_delivery(delivery.deadline_ns)

    # ------------------------------------------------------------------ requeued messages

    def _take_requeued(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        requeued, order = self._messages.requeued, self._messages.order
        if (
            order is not None
            and order.has_released
            and (payloads := self._take_released(order, consumer, count, now_ns))
        ):
            return payloads
        left: list[int] = []  # messages that leave the channel here
        frames: list[bytes] = []
        room = MAX_GRANT_BYTES
        ttl_ns = self._topic.ttl_ns
        oldest_ns = now_ns + self._ahead_ns - ttl_ns
        deadline_ns = now_ns + consumer.msg_timeout_ns
        measured = bool(self._topic.e2e_window_ns)
        count = min(count, _REQUEUED_AT_ONCE)
        done = 0  # messages to remove from the head of the queue
        try:
            for entry in islice(requeued.entries, _REQUEUED_AT_ONCE):
                sequence, attempts, held = entry
                if len(frames) >= count:
                    break
                batch = self._read_ahead.holding(sequence) if held is None else held
                if batch is None:
                    done += 1  # damaged on disk, and reported by the log
                    left.append(sequence)
                    continue
                index = sequence - batch.base_sequence
                if ttl_ns and batch.timestamp_ns(index) < oldest_ns:
                    done += 1
                    left.append(sequence)
                    self._messages.expired_count += 1
                    continue
                message_id, frame = batch.frame(index, attempts + 1, consumer.wants_headers)
                if frames and len(frame) > room:
                    break
                if order is not None and not order.admit(entry, batch):
                    done += 1
                    continue
                if consumer.sample is not None and not consumer.sample():
                    done += 1
                    left.append(sequence)
                    continue
                done += 1
                frames.append(frame)
                room -= len(frame)
                timestamp_ns = batch.timestamp_ns(index) if measured else 0
                line = b"FIN %s\n" % message_id
                keys = [order.take_key(sequence)] if order is not None else None
                self._put_in_flight(
                    consumer,
                    InFlightBatch(
                        line, sequence, attempts + 1, now_ns, deadline_ns, held, timestamp_ns, None, keys
                    ),
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
                self._messages.put_first_last()  # the next attempt starts with another message
                raise
        finally:
            if done:
                requeued.remove_first(done)
            if left and order is not None and (freed := order.drop(left)):
                requeued.add(freed)
                self.budget_exhausted |= not frames  # these have not been looked at
        return [b"".join(frames)] if frames else []

    def _take_released(self, order: KeyOrder, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        """As `_take_requeued`, for those at the head that were blocked until now: all of a batch at once.

        Returns nothing if that is not possible.
        """
        requeued = self._messages.requeued
        if self._topic.ttl_ns or consumer.sample is not None:
            return []
        head = order.first_released(requeued.entries, min(count, _RELEASED_AT_ONCE))
        # So that messages which must be read do not wait for as long as others are in memory.
        if not head or (head[0][2] is None and self._read_ahead.in_memory(head[0][0]) is None):
            return []
        taken_count = len(head)
        head.sort(key=_SEQUENCE)
        send = KeyedSend(consumer, self._topic, now_ns, MAX_GRANT_BYTES)
        left: list[Requeued] = []
        at = 0
        while at < len(head) and send.room > 0:
            first, _, held = head[at]
            batch = self._read_ahead.in_memory(first) if held is None else held
            if batch is None:
                left.append(head[at])
                at += 1
                continue
            base, end = batch.base_sequence, at + 1
            while end < len(head) and head[end][0] < batch.next_sequence:
                end += 1
            sequences = [sequence for sequence, _, _ in head[at:end]]
            keys = order.send_released(sequences)
            fit = send.add(batch, [each - base for each in sequences], keys)
            at += fit
            if at < end:
                order.keep_released(sequences[fit:], keys[fit:])
                break
        requeued.replace_first(taken_count, left + head[at:])
        return self._put_together(consumer, send)

    def _put_together(self, consumer: Consumer, send: KeyedSend) -> list[Payload]:
        """Put messages in flight, and return their frames."""
        deliveries, frames = send.take()
        for delivery in deliveries:
            self._put_in_flight(consumer, delivery)
        return [*frames]

    # ------------------------------------------------------------------ fresh messages

    def _batch_at_cursor(self, now_ns: int, *, has_some: bool) -> Batch | None:
        """Return the next batch that can be delivered; None at the end, or if `budget_exhausted`.

        Raises LogReadError, unless the caller `has_some` messages already: the next call raises it again.
        """
        while True:
            try:
                batch = self._read_ahead.at_cursor()
                if batch is None or not self._passes(batch, now_ns):
                    return batch
            except LogReadError:
                if has_some:
                    return None
                raise
            self._passes_left -= 1
            if not self._passes_left:
                self.budget_exhausted = True
                return None

    def _take_fresh(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        self._passes_left = _PASSED_AT_ONCE
        if (order := self._messages.order) is not None:
            return self._take_by_key(order, consumer, count, now_ns)
        payloads: list[Payload] = []
        room = MAX_GRANT_BYTES
        messages = self._messages
        cursor = messages.cursor
        while count > 0 and room > 0:
            batch = self._batch_at_cursor(now_ns, has_some=bool(payloads))
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
            lines, frames = batch.take(first - batch.base_sequence, wanted, room, consumer.wants_headers)
            if payloads and len(frames) > room and consumer.sample is None:  # each message is sampled once
                break
            payloads.append(frames)
            taken = len(lines) // FINISH_LINE_BYTES
            self._put_run(consumer, batch, lines, first, now_ns)
            cursor.move_to(first + taken)
            count -= taken
            room -= len(frames)
        return payloads

    def _put_run(self, consumer: Consumer, batch: Batch, lines: bytes, first: int, now_ns: int) -> None:
        """Put fresh messages of a batch in flight."""
        held, deadline_ns = batch if self._topic.ephemeral else None, now_ns + consumer.msg_timeout_ns
        if not self._topic.e2e_window_ns:
            self._put_in_flight(consumer, InFlightBatch(lines, first, 1, now_ns, deadline_ns, held))
            return
        # One delivery per timestamp; large records have only one.
        at, count = 0, len(lines) // FINISH_LINE_BYTES
        for timestamp_ns, same in batch.timestamps_ns(first - batch.base_sequence, count):
            run = lines[at * FINISH_LINE_BYTES : (at + same) * FINISH_LINE_BYTES]
            self._put_in_flight(
                consumer, InFlightBatch(run, first + at, 1, now_ns, deadline_ns, held, timestamp_ns)
            )
            at += same

    def _take_by_key(self, order: KeyOrder, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        """As `_take_fresh`, in a channel with an order: block the messages whose keys are held."""
        send = KeyedSend(consumer, self._topic, now_ns, MAX_GRANT_BYTES)
        examined = examined_bytes = 0
        messages, cursor = self._messages, self._messages.cursor
        while count > 0 and send.room > 0 and not order.has_unread and not order.is_full:
            if examined >= _EXAMINED_AT_ONCE or examined_bytes >= _EXAMINED_BYTES_AT_ONCE:
                self.budget_exhausted = True
                break
            batch = self._batch_at_cursor(now_ns, has_some=not send.is_empty)
            if batch is None:
                break
            keys, base = order.keys_of(batch), batch.base_sequence
            at, end = cursor.position - base, min(batch.next_sequence, messages.limit) - base
            fit = batch.end_within(at, end, send.room, consumer.wants_headers)
            if fit == at and not send.is_empty:
                break
            end = max(fit, at + 1) if consumer.sample is None else at + 1  # each message is sampled once
            indexes, stop = order.hold(keys, at, end, count, batch, is_only_in_memory=self._topic.ephemeral)
            examined += stop - at
            examined_bytes += batch.size_bytes * (stop - at) // len(batch)
            cursor.move_to(base + stop)
            if not indexes:
                continue
            if consumer.sample is not None and not consumer.sample():
                order.give_back(keys[at])
                continue
            count -= send.add(batch, indexes, list(map(keys.__getitem__, indexes)))
        return self._put_together(consumer, send)

    def _passes(self, batch: Batch, now_ns: int) -> bool:
        """Skip the batch at the cursor if it is expired, deferred or for another channel. Raises LogReadError."""
        if self._topic.ttl_ns and self._pass_expired(batch, now_ns + self._ahead_ns - self._topic.ttl_ns):
            return True
        if batch.due_ns > now_ns + self._ahead_ns:
            self._put_off(batch)
        elif batch.channel not in (None, self.name):
            self._messages.cursor.move_to(min(batch.next_sequence, self._messages.limit))
        else:
            return False
        return True

    def _pass_expired(self, batch: Batch, oldest_ns: int) -> bool:
        """Drop messages published before a time, if the cursor is at such a message. Raises LogReadError."""
        index = self._messages.cursor.position - batch.base_sequence
        if batch.timestamp_ns(index) >= oldest_ns:
            return False
        if batch.timestamp_ns(len(batch) - 1) < oldest_ns:
            sequence = batch.next_sequence
            if self._read_ahead.timestamp_in_memory(sequence) is None:
                # Gigabytes may be expired: search the end instead of reading all of them.
                sequence = max(sequence, self._read_ahead.first_since(oldest_ns))
        else:
            at = range(len(batch))
            sequence = batch.base_sequence + bisect_left(at, oldest_ns, index, key=batch.timestamp_ns)
        self._messages.expire_before(sequence)
        return True

    def _put_off(self, batch: Batch) -> None:
        """Defer the messages at the cursor until they are due. Needed after a seek to before their publication."""
        messages = self._messages
        held = batch if self._topic.ephemeral else None
        end = min(batch.next_sequence, messages.limit)
        if batch.channel in (None, self.name):
            due_ns = batch.due_ns - self._ahead_ns
            messages.deferred.add(due_ns, range(messages.cursor.position, end), 0, held)
        messages.cursor.move_to(end)
