"""A channel: a cursor over its topic's log, and what is not finished below the cursor.

Every message below `cursor` is finished unless it is in flight with a consumer, waiting in `requeued`, or waiting
for its time in `deferred`. So the state of a channel is as small as what is unfinished, however long the log.

Nothing here awaits, reads a clock or touches a socket: `now_ns` comes in, deliveries go out as data.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from ..protocol import is_ephemeral
from .batch import Batch
from .consumer import Consumer, Delivery

if TYPE_CHECKING:
    from .topic import Topic

MAX_GRANT_BYTES = 256 * 1024
"""What one consumer gets in one round of `dispatch`, unless a single message is larger."""
_NS_PER_MS = 1_000_000

Payload = bytes | memoryview
Grant = tuple[Consumer, Payload]


class Channel:
    """One channel of a topic.

    Args:
        topic: Where its messages come from.
        name: Valid, and unique in the topic.
        cursor: The first sequence it will deliver.

    Attributes:
        cursor: The next sequence never delivered.
        paused: Nothing is sent to consumers; everything else goes on.
        message_count, requeue_count, timeout_count: Since the broker started.
        consumers: In the order they came.
    """

    def __init__(self, topic: "Topic", name: str, cursor: int) -> None:
        self.topic = topic
        self.name = name
        self.cursor = cursor
        self.paused = False
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.consumers: dict[Consumer, None] = {}
        self._ready: dict[Consumer, None] = {}
        self._requeued: deque[tuple[int, int]] = deque()  # (sequence, attempts so far)
        self._deferred: list[tuple[int, int, int]] = []  # heap of (due_ns, sequence, attempts so far)
        # Deferred by their publisher, and not yet passed by the cursor: they are in _deferred (or past it) already.
        self._deferred_ahead = 0
        self._skipped: list[tuple[int, int]] = []  # emptied from the topic: [start, end) never delivered here
        # TOUCH near its cap gives a deadline earlier than those made before it: such messages are watched one by one.
        self._capped: list[tuple[int, int, bytes]] = []
        self._batches: deque[Batch] = deque()  # the one at the cursor, and what was read ahead with it
        self._requeued_turn = True

    @property
    def ephemeral(self) -> bool:
        """Whether it goes with its last consumer, and is not kept over a restart."""
        return is_ephemeral(self.name)

    # ------------------------------------------------------------------ what is where

    @property
    def depth(self) -> int:
        """Messages ready to be delivered: neither in flight nor deferred."""
        return self._fresh + len(self._requeued)

    @property
    def _fresh(self) -> int:
        behind = self.topic.distribution_point - self.cursor - self._deferred_ahead
        if self._skipped:
            behind -= sum(end - max(start, self.cursor) for start, end in self._skipped)
        return behind

    @property
    def backend_depth(self) -> int:
        """The part of `depth` that would have to be read from disk."""
        fresh = self._fresh
        return max(0, min(fresh, self.topic.cached_from - self.cursor)) if fresh > 0 else 0

    @property
    def in_flight_count(self) -> int:
        """Messages sent and not answered."""
        return sum(len(consumer.in_flight) for consumer in self.consumers)

    @property
    def deferred_count(self) -> int:
        """Messages waiting for their time."""
        return len(self._deferred)

    def unfinished(self) -> Iterator[tuple[int, int]]:
        """(sequence, attempts) of everything below the cursor that is neither finished nor deferred."""
        yield from self._requeued
        for consumer in self.consumers:
            for message_id, delivery in consumer.in_flight.items():
                yield delivery.sequence_of(message_id), delivery.attempts

    # ------------------------------------------------------------------ what the topic tells

    def arrived(self, count: int) -> None:
        """Note that `count` messages passed the distribution point."""
        self.message_count += count

    def arrived_deferred(self, sequences: range, due_ns: int, *, ahead: bool = True) -> None:
        """Note messages deferred by their publisher; they wait here, and the cursor will pass over them.

        Args:
            ahead: Whether they lie at or past the cursor, as they do unless state is being restored.
        """
        for sequence in sequences:
            heappush(self._deferred, (due_ns, sequence, 0))
        if ahead:
            self._deferred_ahead += len(sequences)

    def skip(self, start: int, end: int) -> None:
        """Never deliver [start, end): the topic was emptied of it before it was distributed."""
        if self.cursor >= start:
            self.cursor = max(self.cursor, end)
        else:
            self._skipped.append((start, end))

    # ------------------------------------------------------------------ consumers

    def add(self, consumer: Consumer) -> None:
        """Let a consumer compete for the messages."""
        self.consumers[consumer] = None

    def remove(self, consumer: Consumer) -> None:
        """Forget a consumer; what it had in flight is to be delivered again at once.

        nsqd lets it wait for its timeout, though nobody can finish it any more.
        """
        if consumer in self.consumers:
            del self.consumers[consumer]
            self._ready.pop(consumer, None)
            for message_id, delivery in consumer.in_flight.items():
                self._requeued.append((delivery.sequence_of(message_id), delivery.attempts))
            consumer.in_flight.clear()

    def refresh(self, consumer: Consumer) -> None:
        """Look again whether a consumer can take messages, after RDY, or a change of `blocked`."""
        if consumer.window > 0 and consumer in self.consumers:
            self._ready.setdefault(consumer)
        else:
            self._ready.pop(consumer, None)

    # ------------------------------------------------------------------ answers

    def finish(self, consumer: Consumer, ids: Iterable[bytes]) -> list[tuple[bytes, str]]:
        """FIN: forget these messages. Returns (id, reason) for each that is not in flight with this consumer."""
        in_flight = consumer.in_flight
        before = len(in_flight)
        failed: list[tuple[bytes, str]] = []
        rest = iter(ids)
        while True:
            try:
                # One C loop over all of them; a KeyError has used up just the id that is not there.
                deque(map(in_flight.pop, rest), maxlen=0)
                break
            except KeyError as exc:
                failed.append((exc.args[0], self._why_not(exc.args[0])))
        consumer.finish_count += before - len(in_flight)
        self.refresh(consumer)
        return failed

    def requeue(self, consumer: Consumer, message_id: bytes, delay_ms: int, now_ns: int) -> str | None:
        """REQ: deliver again after `delay_ms`; 0 is at once. Returns the reason if it is not possible."""
        delivery = consumer.in_flight.pop(message_id, None)
        if delivery is None:
            return self._why_not(message_id)
        sequence = delivery.sequence_of(message_id)
        if delay_ms:
            heappush(self._deferred, (now_ns + delay_ms * _NS_PER_MS, sequence, delivery.attempts))
        else:
            self._requeued.append((sequence, delivery.attempts))
        self.requeue_count += 1
        consumer.requeue_count += 1
        self.refresh(consumer)
        return None

    def touch(
        self, consumer: Consumer, message_id: bytes, now_ns: int, max_msg_timeout_ms: int
    ) -> str | None:
        """TOUCH: begin the in-flight time anew, up to `max_msg_timeout_ms` after the delivery. Returns why not."""
        delivery = consumer.in_flight.get(message_id)
        if delivery is None:
            return self._why_not(message_id)
        latest_ns = delivery.delivered_ns + max_msg_timeout_ms * _NS_PER_MS
        deadline_ns = now_ns + consumer.msg_timeout_ns
        if deadline_ns > latest_ns:
            deadline_ns = latest_ns
            heappush(self._capped, (deadline_ns, id(consumer), message_id))
        del consumer.in_flight[message_id]
        consumer.in_flight[message_id] = delivery.touched(message_id, deadline_ns)
        return None

    def _why_not(self, message_id: bytes) -> str:
        owned = any(message_id in consumer.in_flight for consumer in self.consumers)
        return "client does not own message" if owned else "ID not in flight"

    # ------------------------------------------------------------------ time

    @property
    def next_deadline_ns(self) -> int | None:
        """When `tick` will next have something to do; None if never."""
        times = [t for c in self.consumers if (t := c.next_deadline_ns) is not None]
        if self._deferred:
            times.append(self._deferred[0][0])
        if self._capped:
            times.append(self._capped[0][0])
        return min(times, default=None)

    @property
    def next_due_ns(self) -> int | None:
        """When the first deferred message is due; None if there is none."""
        return self._deferred[0][0] if self._deferred else None

    def tick(self, now_ns: int) -> None:
        """Move what is due: deferred messages whose time has come, deliveries that were not answered in time."""
        while self._deferred and self._deferred[0][0] <= now_ns:
            _, sequence, attempts = heappop(self._deferred)
            self._requeued.append((sequence, attempts))
        watched = set()
        while self._capped and self._capped[0][0] <= now_ns:
            watched.add(heappop(self._capped)[1:])
        for consumer in self.consumers:
            for message_id, delivery in list(_due(consumer, now_ns, watched)):
                del consumer.in_flight[message_id]
                self._requeued.append((delivery.sequence_of(message_id), delivery.attempts))
                self.timeout_count += 1
            self.refresh(consumer)

    # ------------------------------------------------------------------ delivery

    def dispatch(self, now_ns: int) -> list[Grant]:
        """One round of delivery: what is ready, split evenly over the consumers that can take it.

        Returns:
            Frames to be sent, and to whom; empty when there is nothing to send or nobody to send it to. What is
            returned counts as in flight. Call again until it is empty.
        """
        grants: list[Grant] = []
        if self.paused or not self._ready:
            return grants
        depth = self.depth
        if depth <= 0:
            return grants
        share = -(-depth // len(self._ready))
        for consumer in list(self._ready):
            count = min(share, consumer.window)
            payloads = self._take_requeued(consumer, count, now_ns) if self._requeued_next() else None
            if not payloads:
                payloads = self._take_fresh(consumer, count, now_ns)
            if not payloads:
                break
            grants += [(consumer, payload) for payload in payloads]
            # To the end of the line, so that a single message goes to each in turn.
            del self._ready[consumer]
            self.refresh(consumer)
        return grants

    def _requeued_next(self) -> bool:
        """Whether it is the requeued messages' turn: they alternate with fresh ones, so neither starves the other."""
        self._requeued_turn = not self._requeued_turn
        return bool(self._requeued) and (self._requeued_turn or self._fresh <= 0)

    def _take_requeued(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        payloads: list[Payload] = []
        size = 0
        while self._requeued and len(payloads) < count and size < MAX_GRANT_BYTES:
            sequence, attempts = self._requeued[0]
            batch = self.topic.batch_holding(sequence)  # may raise: the message is still in line then
            self._requeued.popleft()
            if batch is None:
                continue  # damaged on disk, and reported by the log
            message_id, frame = batch.frame(sequence - batch.base_sequence, attempts + 1)
            payloads.append(frame)
            size += len(frame)
            self._put_in_flight(consumer, [message_id], sequence, attempts + 1, now_ns)
        return payloads

    def _take_fresh(self, consumer: Consumer, count: int, now_ns: int) -> list[Payload]:
        payloads: list[Payload] = []
        room = MAX_GRANT_BYTES
        while count > 0 and room > 0 and (batch := self._at_cursor()) is not None:
            limit = self._skipped[0][0] if self._skipped else self.topic.distribution_point
            index = self.cursor - batch.base_sequence
            ids, frames = batch.take(index, min(count, limit - self.cursor), room)
            payloads.append(frames)
            self._put_in_flight(consumer, ids, self.cursor, 1, now_ns)
            self.cursor += len(ids)
            count -= len(ids)
            room -= len(frames)
        return payloads

    def _put_in_flight(
        self, consumer: Consumer, ids: list[bytes], sequence: int, attempts: int, now_ns: int
    ) -> None:
        delivery = Delivery(ids, sequence, attempts, now_ns, now_ns + consumer.msg_timeout_ns)
        consumer.in_flight.update(dict.fromkeys(ids, delivery))
        consumer.message_count += len(ids)

    def _at_cursor(self) -> Batch | None:
        """The batch that holds the cursor, once it has passed over what is not for delivery; None at the end."""
        limit = self.topic.distribution_point
        while self.cursor < limit:
            if self._skipped and self.cursor >= self._skipped[0][0]:
                self.cursor = max(self.cursor, self._skipped.pop(0)[1])
                continue
            while self._batches and self._batches[0].next_sequence <= self.cursor:
                self._batches.popleft()
            if not self._batches or self._batches[0].base_sequence > self.cursor:
                self._batches = deque(self.topic.fetch(self.cursor))
                if not self._batches:
                    self.cursor = limit  # damaged up to the end, and reported by the log
                    break
            batch = self._batches[0]
            if batch.base_sequence > self.cursor:
                self.cursor = min(batch.base_sequence, limit)
            elif batch.due_ns:
                passed = min(batch.next_sequence, limit) - self.cursor
                self.cursor += passed
                self._deferred_ahead -= passed
            else:
                return batch
        self._batches.clear()
        return None

    # ------------------------------------------------------------------ operators

    def empty(self) -> None:
        """Drop everything: ready, in flight and deferred. Counters are kept."""
        self.cursor = self.topic.distribution_point
        self._requeued.clear()
        self._deferred.clear()
        self._capped.clear()
        self._skipped.clear()
        self._batches.clear()
        self._deferred_ahead = 0
        for consumer in self.consumers:
            consumer.in_flight.clear()
            self.refresh(consumer)

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> dict[str, Any]:
        """The channel as JSON data, with lists of their own: it may be written while the channel goes on.

        Keys: name, paused, cursor, deferred_ahead, skipped [[start, end]], unfinished [[sequence, attempts]],
        deferred [[due_ns, sequence, attempts]].
        """
        return {
            "name": self.name,
            "paused": self.paused,
            "cursor": self.cursor,
            "deferred_ahead": self._deferred_ahead,
            "skipped": list(self._skipped),
            "unfinished": sorted(self.unfinished()),
            "deferred": sorted(self._deferred),
        }

    @classmethod
    def restore(cls, topic: "Topic", state: dict[str, Any], log_end: int) -> "Channel":
        """The channel of a snapshot.

        Args:
            log_end: The log's next sequence; the snapshot may be ahead of it, after a power cut with
                `--sync=interval`, and is then cut back to it.

        Raises:
            KeyError, TypeError, ValueError: `state` is not a snapshot.
        """
        channel = cls(topic, str(state["name"]), min(int(state["cursor"]), log_end))
        channel.paused = bool(state["paused"])
        channel._deferred_ahead = int(state["deferred_ahead"]) if int(state["cursor"]) <= log_end else 0
        channel._skipped = [(int(a), min(int(b), log_end)) for a, b in state["skipped"] if a < log_end]
        channel._requeued.extend((int(s), int(n)) for s, n in state["unfinished"] if s < log_end)
        channel._deferred = [(int(t), int(s), int(n)) for t, s, n in state["deferred"] if s < log_end]
        heapify(channel._deferred)
        return channel


def _due(
    consumer: Consumer, now_ns: int, watched: set[tuple[int, bytes]]
) -> Iterator[tuple[bytes, Delivery]]:
    """What is in flight past its deadline: the head of the line, and the watched ones wherever they stand."""
    head: set[bytes] = set()
    for message_id, delivery in consumer.in_flight.items():
        if delivery.deadline_ns > now_ns:
            break
        head.add(message_id)
        yield message_id, delivery
    for owner, message_id in watched:
        if owner == id(consumer) and message_id not in head:
            found = consumer.in_flight.get(message_id)
            if found is not None and found.deadline_ns <= now_ns:
                yield message_id, found
