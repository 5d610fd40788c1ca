"""A channel: a cursor over its topic's log, and what is not finished below the cursor.

Every message below the cursor is finished unless it is in flight with a consumer, requeued, deferred, or withdrawn
because it was given up, or for an operator (see `WithdrawnMessages`). So the state of a channel is as small as what is
unfinished, however long the log. What lies ahead of the cursor but will
not be delivered from there (deferred by its publisher, or emptied from the topic) is a *hole*: the cursor passes over.

Nothing here awaits, reads a clock or touches a socket: `now_ns` comes in, deliveries go out as data.
"""

import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from ...log import LogReadError, ReadWouldWaitError
from ...protocol import is_ephemeral
from ...protocol.commands import FINISH_LINE_BYTES
from ...protocol.frames import MESSAGE_FRAME_BYTES
from .batch import Batch
from .channel_state import ChannelState
from .consumer import Consumer
from .cursor import Cursor, spans
from .deferred import DeferredMessages
from .in_flight import LOOKED_AT, Delivery
from .message_store import MessageStore
from .moving import Preparation, Runs, forget, in_steps
from .quantiles import RecentSketch
from .record_metadata import Reason
from .seeking import Move, State, Waiting
from .settings import ChannelSettings, SettingsError, change
from .topic_view import TopicView
from .wanted import Found, Wanted
from .withdrawn import Withdrawn, WithdrawnMessages

MAX_GRANT_BYTES = 256 * 1024
"""What one consumer gets in one round of `dispatch`, unless a single message is larger."""
_NS_PER_MS = 1_000_000
_WAIT_STEPS = 50
"""Messages may wait longer than a consumer has said by a fiftieth of that."""
_CONSUMERS_AT_ONCE = 16
_COUNTED = 10_000
_REQUEUED_AT_ONCE = 256
"""Redeliveries cost work for each message. A call of `dispatch` takes a few milliseconds at the very most."""
_IDS_LOOKED_AT = 64
_OWNERS_LOOKED_AT = 8
"""Of so many messages that a client cannot answer for, it is told whether one of so many consumers has them."""
_READ_AT_ONCE = 64
"""So many messages are looked up on disk together to be delivered again."""
_PASSED_AT_ONCE = 256
"""So many records in a row that it is not to deliver are passed over at once, for the same reason."""

Payload = bytes | memoryview
Grant = tuple[Consumer, Payload]


class Channel:
    """One channel of a topic.

    Args:
        topic: What it knows of its topic.
        store: Where its messages come from.
        name: Valid, and unique in the topic.
        cursor: The first sequence it will deliver.
        private: See below.

    Attributes:
        private: It shows what is published from its beginning on to whoever asked for that, and counts for nothing
            else: see `Topic`. It is ephemeral.
        message_count, finish_count, requeue_count, timeout_count: Since the broker started.
        expired_count: Messages dropped since then because they had waited for longer than the topic's `ttl_ms`.
        dropped_count: Those dropped because there were too many.
        dead_letter_count: Those that went to the dead-letter topic.
        given_up_count: Those dropped after their last attempt, because there is no such topic.
        e2e_latency: Nanoseconds from publish to FIN, of late; None if that is not measured.
        consumers: In the order they came.
        ephemeral: It goes with its last consumer, and is not kept over a restart.
        settings: Those in force.
        budget_exhausted: The last `dispatch` passed over as many messages as one call may, because they are too old,
            damaged, or for others. There may be more behind them.
        others_wait_for_read: The last `dispatch` could deliver something, but other messages have to be read from disk
            first, see `wanted`.
    """

    def __init__(
        self, topic: TopicView, store: MessageStore, name: str, cursor: int, *, private: bool = False
    ) -> None:
        self.topic = topic
        self.store = store
        self.name = name
        self.private = private
        self.message_count = 0
        self.finish_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.expired_count = 0
        self.dropped_count = 0
        self.dead_letter_count = 0
        self.given_up_count = 0
        self.budget_exhausted = False
        self.others_wait_for_read = False
        self.consumers: dict[Consumer, None] = {}
        self.ephemeral = is_ephemeral(name)
        self.e2e_latency = RecentSketch(topic.e2e_window_ns) if topic.e2e_window_ns else None
        self._ready: dict[Consumer, None] = {}
        # Of the round of delivery that is under way: how many consumers are still to be served, and with how much.
        self._unserved = 0
        self._share = 0
        self._buffers: Counter[tuple[int, int]] = Counter()  # how many consumers have which
        self._buffer_bytes = self._buffer_ns = 0  # the least of any consumer's
        self._sent_ns = 0  # when something was sent last
        # The topic's `message_bytes` when there was nothing left to be sent; None while there is.
        self._sent_bytes: int | None = None
        self._ahead_ns = 0  # as `dispatch` was told
        # Each entry ends with the batch that holds the message if nothing but memory has it, see `Delivery.held`.
        self._requeued: deque[tuple[int, int, Batch | None]] = deque()  # (sequence, attempts so far, held)
        self._deferred = DeferredMessages()
        self._withdrawn = WithdrawnMessages()
        self._cursor = Cursor(cursor)
        # The first deadline at the head of any consumer's deliveries, or earlier.
        self._next_timeout_ns: int | None = None
        # TOUCH near its cap gives a deadline earlier than those made before it: such messages are watched one by
        # one. A heap of (deadline_ns, a number that decides ties, consumer, message id).
        self._capped: list[tuple[int, int, Consumer, bytes]] = []
        self._capped_count = 0
        self._batches: deque[Batch] = deque()  # the one at the cursor, and what was read ahead with it
        self._again: dict[
            int, Batch | None
        ] = {}  # the batches that hold some of `_requeued`; None: it is damaged
        # A time that was asked for, see `Wanted.since_ns`; and one that is known, with the first sequence from then on.
        self._since_ns: int | None = None
        self._since: tuple[int, int] | None = None
        self._paused = False
        self.settings = ChannelSettings()
        self._changes: dict[str, Any] = {}  # settings of its own, by name
        self._preparation: Preparation | None = None  # of a move that is under way
        self._state: ChannelState | None = None  # as `state` gave it, unless something has changed since

    # ------------------------------------------------------------------ what is where

    @property
    def cursor(self) -> int:
        """The next sequence never delivered."""
        return self._cursor.position

    @property
    def _point(self) -> int:
        """The sequence up to which messages belong to it."""
        return self.topic.end if self.private else self.topic.high_watermark

    @property
    def depth(self) -> int:
        """Messages that are neither in flight nor deferred: ready to be delivered, or withdrawn."""
        return self.ready_count + len(self._withdrawn)

    @property
    def ready_count(self) -> int:
        """Messages ready to be delivered."""
        return self._fresh + len(self._requeued)

    @property
    def paused(self) -> bool:
        """Nothing is sent to consumers; everything else goes on."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._state = None

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings, by name; None goes back to the default. Raises SettingsError, and nothing is changed."""
        self.settings, self._changes = self._changed_settings(changes)
        self._state = None
        for message in self._withdrawn.take_all_waiting():
            self._come_back(message)

    def settings_with(self, changes: Mapping[str, Any]) -> ChannelSettings:
        """The settings that `configure` would put in force. Raises SettingsError."""
        return self._changed_settings(changes)[0]

    def would_drop(self, settings: ChannelSettings) -> int:
        """Count the messages that other settings would drop at once: dead letters that are not moved yet."""
        if not settings.max_attempts or settings.dead_letter_topic:
            return 0
        return self._withdrawn.given_up_after(settings.max_attempts)

    def _changed_settings(self, changes: Mapping[str, Any]) -> tuple[ChannelSettings, dict[str, Any]]:
        settings, said = change(ChannelSettings(), self._changes, changes)
        if settings.dead_letter_topic == self.topic.name:
            raise SettingsError("dead_letter_topic is the topic itself; its dead letters would come back")
        return settings, said

    @property
    def has_ready_consumer(self) -> bool:
        """Some consumer could take messages if there were any."""
        return bool(self._ready) and not self._paused

    @property
    def can_deliver(self) -> bool:
        """Some consumer could take messages, and there are some."""
        return bool(self._ready) and not self._paused and self.ready_count > 0

    @property
    def has_work(self) -> bool:
        """Something can be delivered, or is to be moved to the dead-letter topic."""
        return self.can_deliver or self._withdrawn.waiting > 0

    @property
    def _fresh(self) -> int:
        # As `_point`, without its call: asked for several times for each delivery.
        point = self.topic.end if self.private else self.topic.high_watermark
        return point - self._cursor.position - self._cursor.hole_messages

    @property
    def backend_depth(self) -> int:
        """The part of `depth` that would have to be read from disk."""
        fresh = self._fresh
        return max(0, min(fresh, self.store.cached_from - self.cursor)) if fresh > 0 else 0

    @property
    def in_flight_count(self) -> int:
        """Messages sent and not answered."""
        return sum(consumer.in_flight.count for consumer in self.consumers)

    @property
    def deferred_count(self) -> int:
        """Messages waiting for their time."""
        return len(self._deferred)

    def unfinished(self) -> Iterator[tuple[int, int]]:
        """(sequence, attempts) of everything below the cursor that is neither finished nor deferred."""
        for sequence, attempts, _ in self._requeued:
            yield sequence, attempts
        for message in self._withdrawn:
            yield message.sequence, message.attempts
        for consumer in self.consumers:
            for sequence, delivery in consumer.in_flight:
                yield sequence, delivery.attempts

    def waiting_before(self, sequence: int) -> list[int]:
        """What is unfinished or deferred, and lies before a sequence, ascending.

        For messages that were carried forward: what lies ahead of the cursor never is, and not looked at.
        """
        found = [each for each, _ in self.unfinished() if each < sequence]
        found += self._deferred.sequences_before(sequence)
        return sorted(found)

    @property
    def oldest_unfinished(self) -> int | None:
        """The lowest sequence that is ready or in flight; None if there is none. Deferred ones do not count.

        It is exact unless more than a thousand messages are lined up to be delivered again, or in flight with one
        consumer: then the lowest of the first thousand of them counts.
        """
        found = [sequence for sequence, _, _ in islice(self._requeued, LOOKED_AT)]
        found += [message.sequence for message in islice(self._withdrawn, LOOKED_AT)]
        for consumer in self.consumers:
            if (sequence := consumer.in_flight.oldest) is not None:
                found.append(sequence)
        if self._fresh > 0:
            found.append(self.cursor)
        return min(found, default=None)

    def timestamp_in_memory(self, sequence: int) -> int | None:
        """When a message was published, Unix nanoseconds; None if only the log could tell."""
        for batch in self._batches:
            if batch.base_sequence <= sequence < batch.next_sequence:
                return batch.timestamp_ns(sequence - batch.base_sequence)
        return self.store.timestamp_in_memory(sequence)

    # ------------------------------------------------------------------ what the topic tells

    def arrived(self, count: int) -> None:
        """Note that `count` messages belong to it from now on."""
        self.message_count += count

    def arrived_deferred(self, sequences: range, due_ns: int, held: Batch | None = None) -> None:
        """Note messages deferred by their publisher; they wait here, and the cursor will pass over them.

        Args:
            sequences: Past all that were passed to this method or to `skip` before.
            due_ns: When they are to be delivered.
            held: The batch that holds them, if nothing but memory has it.
        """
        self._state = None
        self._deferred.add(due_ns, sequences, 0, held)
        self.skip(sequences.start, sequences.stop)
        if self._preparation is not None:
            self._preparation.record_arrived(sequences, due_ns, held)

    def skip(self, start: int, end: int) -> None:
        """Let the cursor pass over [start, end). See `arrived_deferred` for the order of calls."""
        if self._cursor.skip(start, end):  # what was dropped from the topic is passed over already
            self._state = None

    def move_to(self, sequence: int) -> None:
        """Move the cursor up to `sequence`, and on over the hole there if there is one."""
        self._state = None
        self._cursor.move_to(sequence)

    def pass_over(self, sequence: int) -> int:
        """Drop what is ready and was never delivered below `sequence`; returns how many messages that were."""
        before = self._fresh
        self.move_to(min(sequence, self._point))
        return before - self._fresh

    def expire_before(self, sequence: int) -> None:
        """As `pass_over`, for messages that have waited too long."""
        self.expired_count += self.pass_over(sequence)

    def drop_before(self, sequence: int) -> None:
        """As `pass_over`, to make room."""
        self.dropped_count += self.pass_over(sequence)

    def count_before(self, sequence: int, *, requeued: bool) -> int:
        """How many messages `pass_over` would drop; with `requeued` also those below `sequence` that come again.

        Of many that come again, `_COUNTED` are looked at.
        """
        fresh = self._cursor.count_before(min(sequence, self._point))
        if not requeued:
            return fresh
        if sequence >= self.cursor:  # whatever comes again is older than the cursor
            return fresh + len(self._requeued)
        return fresh + sum(each[0] < sequence for each in islice(self._requeued, _COUNTED))

    def drop_oldest(self, count: int) -> None:
        """Drop so many of the messages that are ready: those that come again first, for they are the oldest."""
        self._state = None
        again = min(count, len(self._requeued))
        for _ in range(again):
            self._requeued.popleft()
        self.dropped_count += again
        self.drop_before(self._cursor.after(count - again))

    # ------------------------------------------------------------------ consumers

    def add(self, consumer: Consumer) -> None:
        """Let a consumer compete for the messages."""
        self.consumers[consumer] = None
        self._count_buffer(consumer, 1)
        self.refresh(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Forget a consumer; what it had in flight is to be delivered again at once.

        nsqd lets it wait for its timeout, though nobody can finish it any more.
        """
        if consumer in self.consumers:
            self._state = None
            del self.consumers[consumer]
            self._count_buffer(consumer, -1)
            self._ready.pop(consumer, None)
            if self.settings.max_attempts:
                for sequence, delivery in consumer.in_flight:
                    self._come_back(delivery.returned(sequence, Reason.CONNECTION_LOST))
            else:
                self._requeued += [
                    (sequence, delivery.attempts, delivery.held) for sequence, delivery in consumer.in_flight
                ]
            consumer.in_flight.clear()
            if not self.consumers:
                self._batches.clear()  # nobody will ask for what was read ahead
                self._again.clear()

    def _count_buffer(self, consumer: Consumer, more: int) -> None:
        self._buffers[consumer.buffer_bytes, consumer.buffer_ns] += more
        self._buffers = +self._buffers
        self._buffer_bytes = min([size_bytes for size_bytes, _ in self._buffers], default=0)
        self._buffer_ns = min([time_ns for _, time_ns in self._buffers], default=0)

    def _come_back(self, message: Withdrawn, due_ns: int = 0) -> None:
        """Deliver a message again, at `due_ns` or, if that is 0, as soon as may be; or give it up."""
        sequence, attempts, reason, held = message
        if reason is not None and 0 < self.settings.max_attempts <= attempts:
            if self.settings.dead_letter_topic:
                self._withdrawn.give_up(message)
            else:
                self.given_up_count += 1
        elif due_ns:
            self._deferred.add(due_ns, range(sequence, sequence + 1), attempts, held)
        else:
            self._requeued.append((sequence, attempts, held))

    def refresh(self, consumer: Consumer) -> None:
        """Look again whether a consumer can take messages, after RDY, or a change of `blocked`."""
        if consumer.window > 0 and consumer in self.consumers:
            self._ready.setdefault(consumer)
        else:
            self._ready.pop(consumer, None)

    # ------------------------------------------------------------------ answers

    def finish(self, consumer: Consumer, lines: bytes, now_ns: int) -> list[tuple[bytes, str]]:
        """FIN: forget the messages of these lines. Returns (id, reason) for each that is not in flight there.

        `now_ns` is by the clock of the messages' timestamps.
        """
        self._state = None
        in_flight = consumer.in_flight
        before = in_flight.count
        # Nobody wants to know what was finished but for this.
        finished: Counter[Delivery] | None = None if self.e2e_latency is None else Counter()
        failed = in_flight.finish(lines, finished)
        count = before - in_flight.count
        consumer.finish_count += count
        self.finish_count += count
        if self.e2e_latency is not None and finished is not None:
            for delivery, count in finished.items():
                self.e2e_latency.add(now_ns - delivery.timestamp_ns, count, now_ns)
        self.refresh(consumer)
        return list(zip(failed, self._why_not(failed), strict=True)) if failed else []

    def requeue(self, consumer: Consumer, message_id: bytes, delay_ms: int, now_ns: int) -> str | None:
        """REQ: deliver again after `delay_ms`; 0 is at once. Returns the reason if it is not possible."""
        taken = consumer.in_flight.take(message_id)
        if taken is None:
            return self._why_not([message_id])[0]
        sequence, delivery = taken
        self._state = None
        due_ns = now_ns + delay_ms * _NS_PER_MS if delay_ms else 0
        self._come_back(delivery.returned(sequence, Reason.REQUEUED), due_ns)
        self.requeue_count += 1
        consumer.requeue_count += 1
        self.refresh(consumer)
        return None

    def touch(
        self, consumer: Consumer, message_id: bytes, now_ns: int, max_msg_timeout_ms: int
    ) -> str | None:
        """TOUCH: begin the in-flight time anew, up to `max_msg_timeout_ms` after the delivery. Returns why not.

        It never makes the time shorter, so whoever watches `next_deadline_ns` need not look again.
        """
        delivery = consumer.in_flight.find(message_id)
        if delivery is None:
            return self._why_not([message_id])[0]
        latest_ns = delivery.delivered_ns + max_msg_timeout_ms * _NS_PER_MS
        deadline_ns = now_ns + consumer.msg_timeout_ns
        capped = deadline_ns > latest_ns
        if capped:
            deadline_ns = latest_ns
        if deadline_ns <= delivery.deadline_ns:
            return None
        if capped:
            self._capped_count += 1
            heappush(self._capped, (deadline_ns, self._capped_count, consumer, message_id))
        consumer.in_flight.touch(message_id, deadline_ns)
        return None

    def _why_not(self, ids: list[bytes]) -> list[str]:
        """nsqd's words. Who sends ids that are nobody's may not have everybody's messages searched for them."""
        others = list(islice(self.consumers, _OWNERS_LOOKED_AT))
        owned = {
            each
            for each in islice(ids, _IDS_LOOKED_AT)
            if any(consumer.in_flight.holds(each) for consumer in others)
        }
        return ["client does not own message" if each in owned else "ID not in flight" for each in ids]

    # ------------------------------------------------------------------ time

    @property
    def next_deadline_ns(self) -> int | None:
        """When to call `tick` next; None is never. It may find nothing: what was waited for may be finished."""
        times = [] if self._next_timeout_ns is None else [self._next_timeout_ns]
        if (due_ns := self._deferred.first_due_ns) is not None:
            times.append(due_ns)
        if self._capped:
            times.append(self._capped[0][0])
        return min(times, default=None)

    @property
    def next_due_ns(self) -> int | None:
        """When the first deferred message is due; None if there is none."""
        return self._deferred.first_due_ns

    def tick(self, now_ns: int, at_most: int = sys.maxsize) -> int:
        """Move what is due: deferred messages whose time has come, deliveries that were not answered in time.

        Returns:
            How many messages were moved. If it is `at_most`, more may be due, and `next_deadline_ns` says so.
        """
        self._state = None
        released = self._deferred.release(now_ns, at_most)
        self._requeued += released
        moved = len(released)
        if self._next_timeout_ns is not None and self._next_timeout_ns <= now_ns:
            heads: list[int] = []
            for consumer in self.consumers:
                if due := consumer.in_flight.time_out(now_ns, at_most - moved):
                    self._time_out(consumer, due)
                    moved += len(due)
                if (head_ns := consumer.in_flight.next_deadline_ns) is not None:
                    heads.append(head_ns)
            self._next_timeout_ns = min(heads, default=None)
        while self._capped and self._capped[0][0] <= now_ns and moved < at_most:
            _, _, consumer, message_id = heappop(self._capped)
            delivery = consumer.in_flight.find(message_id)
            if (
                delivery is not None
                and delivery.deadline_ns <= now_ns
                and (taken := consumer.in_flight.take(message_id)) is not None
            ):
                self._time_out(consumer, [taken])
            moved += 1
        return moved

    def _time_out(self, consumer: Consumer, due: list[tuple[int, Delivery]]) -> None:
        for sequence, delivery in due:
            self._come_back(delivery.returned(sequence, Reason.TIMED_OUT))
        self.timeout_count += len(due)
        self.refresh(consumer)

    # ------------------------------------------------------------------ delivery

    @property
    def can_wait(self) -> bool:
        """Messages that can be delivered may wait for more, to be sent with them, for a while: see `wait_until_ns`.

        As in nsqd (NSQ protocol: output buffering) they may not when they fill the client's buffer, or are as many as
        one of the next clients can take. But they do not wait in that buffer, where nobody else could have them, and
        where each would cost a delivery of its own. Where there are several consumers, all have the patience of the
        least patient. What comes again does not wait, nor does anything where there may be no room for what comes next.
        """
        if not self._buffer_ns or self._sent_bytes is None or self._requeued or self.topic.is_limited:
            return False
        count, consumers = self._fresh, len(self._ready)
        frame_bytes = self.topic.message_bytes - self._sent_bytes + count * MESSAGE_FRAME_BYTES
        if frame_bytes >= consumers * self._buffer_bytes:
            return False
        share = -(-count // consumers)
        return share < min([consumer.window for consumer in islice(self._ready, _CONSUMERS_AT_ONCE)])

    @property
    def wait_until_ns(self) -> int:
        """Until when they may: so long after something was sent, so that a message after a pause goes at once."""
        # Many channels are to be served when somebody wakes for one.
        step_ns = self._buffer_ns // _WAIT_STEPS
        return -(-(self._sent_ns + self._buffer_ns) // step_ns) * step_ns

    def dispatch(self, now_ns: int, ahead_ns: int = 0) -> list[Grant]:
        """A round of delivery: what is ready, split evenly over the consumers that can take it.

        Many consumers are served a few at a time, by several calls.

        Args:
            now_ns: Unix nanoseconds, by a clock that never steps.
            ahead_ns: By how much that of the messages' timestamps, which can be set, is ahead of it.

        Returns:
            Frames to be sent, and to whom; empty when there is nothing to send or nobody to send it to. What is
            returned counts as in flight. Call again until it is empty, and later if it `budget_exhausted`.

        Raises:
            LogReadError: The operating system refused. Nothing was put in flight, and nothing is lost.
            ReadWouldWaitError: The next messages have to be read from disk first, see `wanted`. Likewise.
        """
        grants: list[Grant] = []
        self.budget_exhausted = self.others_wait_for_read = False
        self._ahead_ns = ahead_ns
        if not self.can_deliver:
            return grants
        depth = self.ready_count
        self._state = None
        if not self._unserved:
            self._unserved = min(len(self._ready), depth)
            self._share = -(-depth // len(self._ready))
        served = list(islice(self._ready, min(self._unserved, _CONSUMERS_AT_ONCE)))
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
            del self._ready[consumer]
            self.refresh(consumer)
        self._sent_bytes = None if self.ready_count else self.topic.message_bytes
        if grants:
            self._sent_ns = now_ns
        return grants

    def _take(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        """Requeued messages and fresh ones alternate, so that neither starves the other.

        They do so for each consumer by itself: a turn that went round all of them could fall in step with one, which
        would then get back all that it requeues.
        """
        if not self._requeued:
            consumer.requeued_turn = True
            return self._take_fresh(consumer, count, now_ns)
        requeued_first = consumer.requeued_turn or self._fresh <= 0
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

    def _take_requeued(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        frames: list[bytes] = []
        room = MAX_GRANT_BYTES
        ttl_ns = self.topic.ttl_ns
        oldest_ns = now_ns + self._ahead_ns - ttl_ns
        count = min(count, _REQUEUED_AT_ONCE)
        looks = _REQUEUED_AT_ONCE
        while self._requeued and len(frames) < count:
            if not looks:
                self.budget_exhausted = True
                break
            looks -= 1
            sequence, attempts, held = self._requeued[0]
            try:
                batch = held
                if held is None:
                    known = self._again and sequence in self._again
                    batch = self._again.pop(sequence) if known else self.store.batch_holding(sequence)
            except LogReadError as exc:
                if frames:
                    break
                if not isinstance(exc, ReadWouldWaitError):
                    self._requeued.rotate(-1)  # the next attempt is another message's
                raise
            if batch is None:
                self._requeued.popleft()  # damaged on disk, and reported by the log
                continue
            if ttl_ns and batch.timestamp_ns(sequence - batch.base_sequence) < oldest_ns:
                self._requeued.popleft()
                self.expired_count += 1
                continue
            if consumer.sample is not None and not consumer.sample():
                self._requeued.popleft()
                continue
            message_id, frame = batch.frame(sequence - batch.base_sequence, attempts + 1)
            if frames and len(frame) > room:
                break
            self._requeued.popleft()
            frames.append(frame)
            room -= len(frame)
            measured = self.e2e_latency is not None
            timestamp_ns = batch.timestamp_ns(sequence - batch.base_sequence) if measured else 0
            line = b"FIN %s\n" % message_id
            self._put_in_flight(consumer, line, sequence, attempts + 1, now_ns, held, timestamp_ns)
        return [b"".join(frames)] if frames else []

    def _take_fresh(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        payloads: list[Payload] = []
        room = MAX_GRANT_BYTES
        passes = _PASSED_AT_ONCE
        while count > 0 and room > 0:
            try:
                batch = self._at_cursor()
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
            cursor = self._cursor.position
            wanted = min(count, self._limit - cursor)
            if consumer.sample is not None:
                end = min(batch.next_sequence, self._limit)
                while cursor < end and not consumer.sample():
                    cursor += 1
                self.move_to(cursor)
                if cursor == end:
                    continue
                wanted = 1
            lines, frames = batch.take(cursor - batch.base_sequence, wanted, room)
            if payloads and len(frames) > room and consumer.sample is None:  # each message is sampled once
                break
            payloads.append(frames)
            held = batch if self.topic.ephemeral else None
            taken = len(lines) // FINISH_LINE_BYTES
            if self.e2e_latency is None:
                self._put_in_flight(consumer, lines, cursor, 1, now_ns, held)
            else:  # a delivery for each timestamp, of which there is but one if records are large
                at = 0
                for timestamp_ns, same in batch.timestamps_ns(cursor - batch.base_sequence, taken):
                    run = lines[at * FINISH_LINE_BYTES : (at + same) * FINISH_LINE_BYTES]
                    self._put_in_flight(consumer, run, cursor + at, 1, now_ns, held, timestamp_ns)
                    at += same
            self.move_to(cursor + taken)
            count -= taken
            room -= len(frames)
        return payloads

    def _passes(self, batch: Batch, now_ns: int) -> bool:
        """Pass over what is at the cursor, if it is too old, for later or for others. Raises LogReadError."""
        if self.topic.ttl_ns and self._pass_expired(batch, now_ns + self._ahead_ns - self.topic.ttl_ns):
            return True
        if batch.due_ns > now_ns:
            self._put_off(batch)
        elif batch.channel not in (None, self.name):
            self.move_to(min(batch.next_sequence, self._limit))
        else:
            return False
        return True

    def _pass_expired(self, batch: Batch, oldest_ns: int) -> bool:
        """Drop what was published before a time, if that is what is at the cursor. Raises LogReadError."""
        if batch.timestamp_ns(self.cursor - batch.base_sequence) >= oldest_ns:
            return False
        if batch.timestamp_ns(len(batch) - 1) < oldest_ns:
            sequence = batch.next_sequence
            if self.timestamp_in_memory(sequence) is None:
                # There may be gigabytes of it: nobody wants to read that.
                sequence = max(sequence, self._first_since(oldest_ns))
        else:
            first, at = batch.base_sequence, range(len(batch))
            sequence = first + bisect_left(at, oldest_ns, self.cursor - first, key=batch.timestamp_ns)
        self.expire_before(sequence)
        return True

    def _first_since(self, timestamp_ns: int) -> int:
        """A sequence before which all was published before this time. Raises LogReadError."""
        if self.store.waits_for_disk:
            return self.store.first_since(timestamp_ns)
        if self._since is None or self._since[0] > timestamp_ns:
            self._since_ns = timestamp_ns
            raise ReadWouldWaitError(Path(self.topic.name))
        (_, sequence), self._since = self._since, None
        return sequence

    def wanted(self) -> Wanted:
        """What has to be read after ReadWouldWaitError, or when `others_wait_for_read`; then `take_read`."""
        in_memory = self.store.in_memory
        ahead = self.cursor if self._fresh > 0 and self.timestamp_in_memory(self.cursor) is None else None
        again: tuple[int, ...] = ()
        # If the first is there, what was read with it is still to be delivered, before more is read.
        if self._requeued and self._requeued[0][0] not in self._again:
            first = islice(self._requeued, _READ_AT_ONCE)
            again = tuple([each for each, _, held in first if held is None and not in_memory(each)])
        return Wanted(ahead, again, self._since_ns)

    def take_read(self, found: Found) -> None:
        """Take what was read, as far as it is still wanted."""
        if not self.consumers:
            self._since_ns = None
            return  # nobody will ask for it
        if found.wanted.again:
            self._again = found.again.copy()
        first = self._requeued[0][0] if self._requeued else None
        if found.error is not None and first in found.wanted.again and first not in found.again:
            self._requeued.rotate(-1)  # the next attempt is another message's
        if found.wanted.since_ns is not None:
            self._since_ns = None
            if found.since is not None:
                self._since = found.wanted.since_ns, found.since
        if found.ahead is not None and self.cursor == found.wanted.ahead:
            self._batches = deque(found.ahead)
            if not found.ahead:  # damaged up to there, and reported by the log
                self.move_to(min(found.end, self._point))

    def _put_off(self, batch: Batch) -> None:
        """Let messages at the cursor wait for their time: the channel was moved back to before they were published."""
        held = batch if self.topic.ephemeral else None
        end = min(batch.next_sequence, self._limit)
        if batch.channel in (None, self.name):
            self._deferred.add(batch.due_ns, range(self.cursor, end), 0, held)
        self.move_to(end)

    def _put_in_flight(
        self,
        consumer: Consumer,
        lines: bytes,
        sequence: int,
        attempts: int,
        now_ns: int,
        held: Batch | None,
        timestamp_ns: int = 0,
    ) -> None:
        deadline_ns = now_ns + consumer.msg_timeout_ns
        delivery = Delivery(lines, sequence, attempts, now_ns, deadline_ns, held, timestamp_ns)
        consumer.in_flight.put(delivery)
        consumer.message_count += delivery.left
        if self._next_timeout_ns is None or deadline_ns < self._next_timeout_ns:
            self._next_timeout_ns = deadline_ns

    @property
    def _limit(self) -> int:
        """How far the cursor can go now: the next hole, or the end of what belongs to it."""
        return self._cursor.run_end(self._point)

    def _at_cursor(self) -> Batch | None:
        """The batch that holds the cursor, once it has passed over what is missing; None at the end."""
        cursor, batches = self._cursor, self._batches
        while cursor.position < self._point:
            while batches and batches[0].next_sequence <= cursor.position:
                batches.popleft()
            if not batches:
                batches.extend(self.store.fetch(cursor.position))
            if batches and batches[0].base_sequence <= cursor.position:
                return batches[0]
            # Damaged up to the next batch, or to the end, and reported by the log; or dropped by a full memory.
            found = batches[0].base_sequence if batches else self._point
            self.move_to(min(found, self._point))
        self._batches.clear()
        return None

    # ------------------------------------------------------------------ operators

    def empty(self) -> list[deque[Any]]:
        """Drop everything: ready, in flight and deferred. Counters are kept. What is returned is to be forgotten."""
        self._state = None
        forgotten: list[deque[Any]] = [self._requeued, self._cursor.restart(self._point)]
        self._requeued = deque()
        self._deferred = DeferredMessages()
        self._withdrawn.clear()
        self._next_timeout_ns = None
        self._capped.clear()
        self._batches.clear()
        self._again.clear()
        self._since = self._since_ns = None
        self._sent_bytes = None
        for consumer in self.consumers:
            consumer.in_flight.clear()
            self.refresh(consumer)
        return forgotten

    def peek(self, state: State) -> Iterator[Waiting]:
        """The messages in this state, in the order of their delivery. To be used up before anything else happens."""
        if state == "requeued":
            for sequence, attempts, held in self._requeued:
                yield Waiting(state, sequence, attempts, 0, held)
        elif state == "deferred":
            for due_ns, sequence, attempts in self._deferred:
                yield Waiting(state, sequence, attempts, due_ns, self._deferred.held(sequence))
        else:
            for start, end in self._cursor.ahead(self._point):
                yield from (Waiting(state, sequence) for sequence in range(start, end))

    def move_for(self, sequence: int) -> Move:
        """What `seek` would do; takes as long as there are messages in flight, requeued and deferred."""
        preparation = self.prepare(sequence, 0)
        for _ in self.preparing(preparation):
            pass
        self.give_up_move()
        return self.move_of(preparation)

    def seek(self, sequence: int, now_ns: int) -> Move:
        """Begin anew at `sequence`, or at the high watermark if that is lower, as though it had been made there.

        Every message from there on is delivered, attempts counted from 1, whatever has become of it; only those that
        their publisher deferred, and that are not due at `now_ns`, wait for their time. With every message before it
        the channel is done; unless it goes back to the beginning of the log: then it keeps what it has of messages
        that are no longer there. What is in flight cannot be finished any more. Counters are kept.

        This takes as long as `move_for`: see `prepare` for how others can have their turn in between.
        """
        preparation = self.prepare(sequence, now_ns)
        for _ in self.preparing(preparation):
            pass
        move = self.move_of(preparation)
        for _ in self.move(preparation):
            pass
        return move

    def prepare(self, sequence: int, now_ns: int) -> Preparation:
        """Begin to prepare a `seek`: `preparing` goes on, `move_of` tells what comes of it, `move` does it."""
        to = min(sequence, self._point)
        return Preparation(to, self._point, to <= self.store.log.first_sequence, now_ns)

    def preparing(self, preparation: Preparation) -> Iterator[None]:
        """Prepare, in steps. Others may have their turn between them, but for other moves of this channel.

        `move` or `give_up_move` has to follow.
        """
        self._preparation = preparation
        requeued = list(self._requeued)
        unfinished = chain(
            [(sequence for sequence, _, _ in requeued), [message.sequence for message in self._withdrawn]],
            ([sequence for sequence, _ in consumer.in_flight] for consumer in list(self.consumers)),
        )
        return preparation.steps(self._cursor, self._deferred, unfinished)

    def give_up_move(self) -> None:
        """Do not do what was prepared, or is being prepared."""
        self._preparation = None

    def move_of(self, preparation: Preparation) -> Move:
        """What was found out, as of the moment when it was."""
        point, to, in_flight = self._point, preparation.to, self.in_flight_count
        waiting = self.depth + in_flight + self.deferred_count
        skipped = 0 if preparation.keeps_before else preparation.before
        again = max(0, (point - to) - (waiting - preparation.before))
        return Move(self.cursor, to, again, skipped, in_flight)

    def move(self, preparation: Preparation) -> Iterator[None]:
        """Do what was prepared, all of it in the first step; in others to forget what was here before."""
        self.give_up_move()  # nothing more has to be noted for it
        to = preparation.to
        keeps_before = preparation.keeps_before and to > 0
        deferred = preparation.deferred
        if keeps_before:
            deferred.merge(self._deferred.before(to))
        given_up, taken = self._withdrawn.take_all_waiting(), list(self._withdrawn)
        kept: list[tuple[int, int, Batch | None]] = []
        if keeps_before:
            kept = self._unfinished_before(to)
        forgotten = self.empty()
        self._cursor.restart(to, preparation.holes, preparation.hole_messages)
        self._deferred = deferred
        for sequences, due_ns, held in preparation.late:
            self.arrived_deferred(sequences, due_ns, held)
        if keeps_before:
            self._requeued.extend(kept)
            self._withdrawn.hold(message for message in taken if message.sequence < to)
            for message in given_up:
                if message.sequence < to:
                    self._withdrawn.give_up(message)
        yield
        yield from forget(forgotten)

    def _unfinished_before(self, sequence: int) -> list[tuple[int, int, Batch | None]]:
        """What is requeued or in flight, and lies before a sequence; as entries of `_requeued`."""
        found = [entry for entry in self._requeued if entry[0] < sequence]
        for consumer in self.consumers:
            found += [
                (each, sent.attempts, sent.held) for each, sent in consumer.in_flight if each < sequence
            ]
        return found

    # ------------------------------------------------------------------ messages that are withdrawn

    @property
    def given_up(self) -> int:
        """Messages that wait to be taken to the dead-letter topic."""
        return self._withdrawn.waiting

    def take_given_up(self, at_most: int) -> list[Withdrawn]:
        """Take some of these, to move them. Then `dispose` of them, or `put_back` what could not be moved."""
        return self._withdrawn.take(at_most)

    def find_waiting(self, sequence: int, found: deque[tuple[int, int]]) -> Iterator[None]:
        """Find where ready and deferred messages lie, in steps. Others may have their turn between them.

        Args:
            sequence: From there on.
            found: Gets [start, end), ascending and apart from each other. What arrives meanwhile may be missing, and
                what is delivered meanwhile may be there.
        """
        runs = Runs()
        # What is due meanwhile goes from the first of these to the second, and is found in one of them.
        for block in self._deferred.blocks():
            runs.add([*spans(sorted(each for each in block.sequence if each >= sequence))])
            yield
        for entries in in_steps(list(self._requeued)):
            runs.add([*spans(sorted(entry[0] for entry in entries if entry[0] >= sequence))])
            yield
        for ahead in in_steps(self._cursor.clone().ahead(self._point)):
            runs.add([(max(start, sequence), end) for start, end in ahead if end > sequence])
            yield
        yield from runs.join(found)

    def withdraw(self, sequences: Collection[int]) -> list[Withdrawn]:
        """Take those of these messages that are not in flight: nobody gets them meanwhile. Then as above."""
        self._state = None
        wanted = set(sequences)
        found = [Withdrawn(*entry[:2], None, entry[2]) for entry in self._requeued if entry[0] in wanted]
        if found:
            self._requeued = deque(entry for entry in self._requeued if entry[0] not in wanted)
        found += self._withdrawn.take_of(wanted)
        found += [
            Withdrawn(sequence, attempts, None, held)
            for sequence, attempts, held in self._deferred.withdraw(wanted)
        ]
        wanted.difference_update([message.sequence for message in found])
        found += self._withdraw_fresh(sorted(wanted))
        self._withdrawn.hold(found)
        return found

    def _withdraw_fresh(self, wanted: list[int]) -> list[Withdrawn]:
        """Make holes where these are, as far as the cursor is yet to come there."""
        found = self._cursor.ahead_among(wanted, self._point)
        if found:
            self._cursor.skip_among(found)
        ephemeral = self.topic.ephemeral
        held = map(self.store.batch_holding, found) if ephemeral else repeat(None)
        return [Withdrawn(sequence, 0, None, batch) for sequence, batch in zip(found, held, strict=False)]

    def dispose(self, messages: Iterable[Withdrawn]) -> int:
        """Be done with messages that were taken; returns how many of them were not dropped meanwhile."""
        self._state = None
        return len(self._withdrawn.release(messages))

    def dispose_dead_letters(self, messages: Iterable[Withdrawn]) -> None:
        """Be done with messages that were taken, and are in the dead-letter topic now."""
        self.dead_letter_count += self.dispose(messages)

    def put_back(self, messages: Iterable[Withdrawn]) -> None:
        """Have messages again that were taken, but for those that were dropped meanwhile."""
        self._state = None
        for message in self._withdrawn.release(messages):
            self._come_back(message)

    def cancel(self, sequences: Collection[int]) -> list[int]:
        """Drop those of these messages that are deferred, and return them."""
        self._state = None
        return [released.sequence for released in self._deferred.withdraw(sequences)]

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> ChannelState:
        """What has to be kept of it. While nothing of that changes it is the same object each time."""
        if self._state is None:
            self._state = self._make_state()
        return self._state

    def _make_state(
        self,
        paused: bool | None = None,
        changes: dict[str, Any] | None = None,
        cursor: Cursor | None = None,
        deferred: DeferredMessages | None = None,
        withdrawn: Iterable[Withdrawn] | None = None,
    ) -> ChannelState:
        """The state, with these in place of the channel's own."""
        cursor = self._cursor if cursor is None else cursor
        return ChannelState(
            self.name,
            self._paused if paused is None else paused,
            self._changes if changes is None else changes,
            cursor.position,
            # There may be ten thousand channels: what is empty costs nothing, nor the garbage collector anything.
            cursor.holes,
            tuple(self._requeued),
            tuple([consumer.in_flight.copy() for consumer in self.consumers if consumer.in_flight.count]),
            (self._deferred if deferred is None else deferred).copy(),
            tuple(self._withdrawn if withdrawn is None else withdrawn),
        )

    # The state that the channel would have after a change: it is saved before the change is made.

    def state_if_paused(self, paused: bool) -> ChannelState:
        """After setting `paused`."""
        return self._make_state(paused=paused)

    def state_if_configured(self, changes: Mapping[str, Any]) -> ChannelState:
        """After `configure`. Raises SettingsError."""
        return self._make_state(changes=self._changed_settings(changes)[1])

    def state_if_skipped(self, start: int, end: int) -> ChannelState:
        """After `skip`."""
        cursor = self._cursor.clone()
        cursor.skip(start, end)
        return self._make_state(cursor=cursor)

    def state_if_empty(self) -> ChannelState:
        """After `empty`."""
        return ChannelState(self.name, self._paused, self._changes, self.topic.high_watermark)

    def state_if_moved(self, preparation: Preparation) -> ChannelState:
        """After `move`."""
        to = preparation.to
        cursor, deferred = Cursor(to), preparation.deferred.clone()
        cursor.restart(to, preparation.holes.copy(), preparation.hole_messages)
        for sequences, due_ns, held in preparation.late:
            deferred.add(due_ns, sequences, 0, held)
            cursor.skip(sequences.start, sequences.stop)
        kept: list[tuple[int, int, Batch | None]] = []
        withdrawn: list[Withdrawn] = []
        if preparation.keeps_before and to > 0:
            deferred.merge(self._deferred.before(to))
            kept = self._unfinished_before(to)
            withdrawn = [message for message in self._withdrawn if message.sequence < to]
        return ChannelState(
            self.name, self._paused, self._changes, cursor.position,
            cursor.holes, tuple(kept), (), deferred.copy(), tuple(withdrawn),
        )  # fmt: skip

    def state_if_cancelled(self, sequences: Collection[int]) -> ChannelState:
        """After `cancel`."""
        deferred = self._deferred.clone()
        deferred.withdraw(sequences)
        return self._make_state(deferred=deferred)

    def state_if_disposed(self, messages: Iterable[Withdrawn]) -> ChannelState:
        """After `dispose`."""
        gone = {message.sequence for message in messages}
        return self._make_state(
            withdrawn=[message for message in self._withdrawn if message.sequence not in gone]
        )

    @classmethod
    def restore(cls, topic: TopicView, store: MessageStore, state: dict[str, Any], log_end: int) -> "Channel":
        """The channel of a snapshot.

        Args:
            topic, store: As of the class; the high watermark is restored already.
            state: What became of a `ChannelState`, out of JSON.
            log_end: The log's next sequence; the snapshot may be ahead of it, after a power cut with
                `--sync=interval`, and is then cut back to it.

        Raises:
            KeyError, TypeError, ValueError: `state` is not a snapshot.
        """
        channel = cls(topic, store, str(state["name"]), min(int(state["cursor"]), log_end))
        channel.paused = bool(state["paused"])
        channel.configure(state.get("settings", {}))
        for start, end in state["holes"]:
            channel.skip(int(start), min(int(end), log_end))
        # Who had it in flight is gone.
        unfinished = sorted(
            (int(s), int(n), Reason(*given_up) if given_up else Reason.CONNECTION_LOST)
            for s, n, *given_up in state["unfinished"]
            if s < log_end
        )
        for sequence, attempts, reason in unfinished:
            channel._come_back(Withdrawn(sequence, attempts, reason))
        channel._deferred = DeferredMessages.restore(state["deferred"], log_end)
        return channel
