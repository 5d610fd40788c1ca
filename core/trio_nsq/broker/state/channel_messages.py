"""The unfinished messages of a channel, by state.

Every message below the cursor is finished unless it is in flight, requeued, deferred or withdrawn (see
`WithdrawnMessages`). So the size of a channel's state depends on the number of unfinished messages, not on the length
of the log. A range ahead of the cursor that the channel does not deliver from there (deferred by the producer, or
emptied from the topic) is a *hole*: the cursor skips it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from .batch import Batch
from .consumer import Consumer
from .cooperative import Runs, in_steps
from .cursor import Cursor, spans
from .deferred import DeferredMessages, Requeued
from .in_flight import OLDEST_SEARCH_LIMIT
from .in_flight_batch import InFlightCopy
from .key_order import KeyOrder
from .message_keys import MessageKeys
from .topic_view import TopicView
from .version import Version
from .withdrawn import WithdrawnMessage, WithdrawnMessages

_COUNTED: Final = 10_000
_SEQUENCE: Final = itemgetter(0)
MAX_PREFETCHED: Final = 100_000
"""The number of messages in `prefetched`. Beyond it, all deliveries count of the one that was returned longest ago."""

State = Literal["requeued", "fresh", "deferred"]
STATES: tuple[State, ...] = ("requeued", "fresh", "deferred")


class PeekedMessage(NamedTuple):
    """A message that a channel will deliver.

    Attributes:
        state: `requeued`: waits for redelivery, its deferral has ended, or it waits for its key, see `KeyOrder`;
            `fresh`: was never delivered; `deferred`: is not due yet.
        due_ns: Earliest delivery time, Unix nanoseconds; 0: now.
        held: The batch that holds it, if it is only in memory.
    """

    state: State
    sequence: int
    attempts: int = 0
    due_ns: int = 0
    held: Batch | None = None


class RequeuedMessages:
    """The queue of messages to redeliver, in delivery order.

    Attributes:
        entries: All messages; only this class changes it.
    """

    __slots__ = ("_is_shared", "_version", "entries")

    def __init__(self, version: Version) -> None:
        self.entries: deque[Requeued] = deque()
        self._version = version
        self._is_shared = False

    def share(self, other: "RequeuedMessages") -> None:
        """Have the messages of another queue, which must not change meanwhile; only `add` may add to this one.

        They are copied only then: a copy of a million messages would block the event loop.
        """
        self.entries, self._is_shared = other.entries, True

    @property
    def first(self) -> int | None:
        return self.entries[0][0] if self.entries else None

    def head(self, count: int) -> list[Requeued]:
        return list(islice(self.entries, count))

    def add(self, entries: Iterable[Requeued]) -> None:
        if self._is_shared:
            self.entries, self._is_shared = self.entries.copy(), False
        self.entries.extend(entries)
        self._version.increment()

    def remove_first(self, count: int) -> None:
        if count == len(self.entries):
            self.entries.clear()
        else:
            for _ in range(count):
                self.entries.popleft()
        self._version.increment()

    def replace_first(self, count: int, entries: list[Requeued]) -> None:
        """Put these messages in the place of the first ones."""
        self.remove_first(count)
        self.entries.extendleft(reversed(entries))

    def put_first_last(self) -> None:
        """Move the first message to the end of the queue."""
        self.entries.rotate(-1)
        self._version.increment()

    def sort(self) -> None:
        """Order the messages by sequence."""
        self.entries = deque(sorted(self.entries, key=_SEQUENCE))
        self._is_shared = False
        self._version.increment()

    def keep_after(self, sequence: int) -> None:
        """Remove the messages up to this sequence."""
        self.entries = deque(entry for entry in self.entries if entry[0] > sequence)
        self._version.increment()

    def withdraw(self, sequences: Collection[int]) -> list[Requeued]:
        found = [entry for entry in self.entries if entry[0] in sequences]
        if found:
            self.entries = deque(entry for entry in self.entries if entry[0] not in sequences)
            self._version.increment()
        return found

    def clear(self) -> deque[Requeued]:
        """Remove and return all messages. The caller frees them in steps, because freeing many blocks the loop."""
        entries, self.entries = self.entries, deque()
        self._version.increment()
        return entries


class ChannelMessages:
    """The unfinished messages of one channel.

    Args:
        watch: As for `DeferredMessages`. Also called, with 0, if messages may have become ready by a change that no
            delivery follows by itself: then the owner delivers soon.

    Attributes:
        cursor, requeued, deferred, withdrawn: Messages by state; consumers hold the messages in flight.
        order: The keys, and the messages that wait for them; None: the channel has no order. Set by `set_order`.
        consumers: In the order of subscription.
        arrivals: The arguments of all calls of `defer` since a `Seek` began; None without a seek.
        prefetched: By sequence, how many deliveries of a message ended before a client began it, as far as the broker
            knows. They are no failed attempts. Finished messages stay here until there are too many.
        expired_count: Messages dropped because they were older than the topic's `ttl_ms`.
        dropped_count: Messages dropped to keep the topic within its limits.
    """

    def __init__(
        self, topic: TopicView, cursor: int, version: Version, watch: Callable[[int], None], *, private: bool
    ) -> None:
        self._topic = topic
        self._private = private
        self.cursor: Cursor = Cursor(cursor, version)
        self.requeued: RequeuedMessages = RequeuedMessages(version)
        self.deferred: DeferredMessages = DeferredMessages(version, watch)
        self.withdrawn: WithdrawnMessages = WithdrawnMessages(version)
        self.order: KeyOrder | None = None
        self._version = version
        self._watch = watch
        self.consumers: dict[Consumer, None] = {}
        self.arrivals: list[tuple[range, int, Batch | None]] | None = None
        self.prefetched: dict[int, int] = {}
        self.expired_count: int = 0
        self.dropped_count: int = 0
        self._in_flight: tuple[InFlightCopy, ...] = ()  # of `copy_from`

    def copy_from(self, other: "ChannelMessages") -> None:
        """Have the same messages as another channel, to see what a change does. Those in flight are read-only."""
        self.cursor = other.cursor.clone()
        self.requeued.share(other.requeued)
        self.deferred = other.deferred.clone()
        self.withdrawn.copy_from(other.withdrawn)
        self.order = other.order.copy() if other.order is not None else None
        self.prefetched = other.prefetched.copy()
        self._in_flight = other.in_flight

    # ------------------------------------------------------------------ counts and positions

    @property
    def end(self) -> int:
        """The sequence up to which messages belong to the channel."""
        return self._topic.end if self._private else self._topic.high_watermark

    @property
    def fresh(self) -> int:
        """Number of messages ahead of the cursor."""
        topic, cursor = self._topic, self.cursor
        end = topic.end if self._private else topic.high_watermark
        return end - cursor.position - cursor.hole_messages

    @property
    def ready_count(self) -> int:
        topic, cursor = self._topic, self.cursor
        end = topic.end if self._private else topic.high_watermark
        return end - cursor.position - cursor.hole_messages + len(self.requeued.entries)

    @property
    def blocked_count(self) -> int:
        """Number of messages that wait for their keys."""
        return self.order.blocked_count if self.order is not None else 0

    @property
    def droppable_count(self) -> int:
        """Number of messages that `drop_oldest` can drop."""
        return self.ready_count + self.blocked_count

    @property
    def depth(self) -> int:
        """Messages that are neither in flight nor deferred: ready to be delivered, blocked, or withdrawn."""
        depth = self.ready_count + len(self.withdrawn)
        return depth if self.order is None else depth + self.order.blocked_count

    @property
    def in_flight_count(self) -> int:
        count = 0
        for consumer in self.consumers:  # no generator: thousands of consumers and channels are counted
            count += consumer.in_flight.count
        return count

    @property
    def in_flight(self) -> tuple[InFlightCopy, ...]:
        """Snapshots of the messages in flight, one for each consumer that has some."""
        # No generator: with 10,000 channels, objects for empty parts would cost time.
        return self._in_flight or tuple(
            [each.in_flight.copy() for each in self.consumers if each.in_flight.count]
        )

    @property
    def limit(self) -> int:
        """The sequence up to which the channel can deliver: the next hole, or the channel's end."""
        return self.cursor.run_end(self.end)

    def unfinished(self) -> Iterator[tuple[int, int]]:
        """Yield (sequence, attempts) of every message below the cursor that is neither finished nor deferred."""
        for sequence, attempts, _ in self.requeued.entries:
            yield sequence, attempts
        if self.order is not None:
            for sequence, attempts, _ in self.order.blocked():
                yield sequence, attempts
        for message in self.withdrawn:
            yield message.sequence, message.attempts
        for consumer in self.consumers:
            for sequence, delivery in consumer.in_flight:
                yield sequence, delivery.attempts

    def unfinished_parts(self) -> Iterator[list[int]]:
        """Yield the sequences of `unfinished`, in parts. Reads each consumer's messages in flight only when needed."""
        now = [
            [sequence for sequence, _, _ in self.requeued.entries],
            [message.sequence for message in self.withdrawn],
        ]
        if self.order is not None:
            now.append([sequence for sequence, _, _ in self.order.blocked()])
        later = ([sequence for sequence, _ in consumer.in_flight] for consumer in list(self.consumers))
        return chain(now, later)

    def waiting_before(self, sequence: int) -> list[int]:
        """Return the unfinished and deferred messages before a sequence, ascending.

        Used for carried-forward messages, which are never ahead of the cursor: messages ahead of it are left out.
        """
        found = [each for each, _ in self.unfinished() if each < sequence]
        found += self.deferred.sequences_before(sequence)
        return sorted(found)

    @property
    def oldest(self) -> int | None:
        """The lowest sequence that is ready or in flight, not deferred; None if there is none.

        Examines at most 1000 requeued messages, 1000 keys, and 1000 deliveries per consumer; with more, it is an
        estimate.
        """
        if not self.depth and not self.in_flight_count:
            return None  # as in most of thousands of channels
        found = [sequence for sequence, _, _ in self.requeued.head(OLDEST_SEARCH_LIMIT)]
        found += [message.sequence for message in islice(self.withdrawn, OLDEST_SEARCH_LIMIT)]
        if self.order is not None:
            found += self.order.first_blocked(OLDEST_SEARCH_LIMIT)
        for consumer in self.consumers:
            if consumer.in_flight.count and (sequence := consumer.in_flight.oldest) is not None:
                found.append(sequence)
        if self.fresh > 0:
            found.append(self.cursor.position)
        return min(found, default=None)

    def peek(self, state: State) -> Iterator[PeekedMessage]:
        """Yield the messages in this state, in delivery order. The channel must not change during the iteration."""
        if state == "requeued":
            blocked = sorted(self.order.blocked(), key=_SEQUENCE) if self.order is not None else []
            for sequence, attempts, held in chain(self.requeued.entries, blocked):
                yield PeekedMessage(state, sequence, attempts, 0, held)
        elif state == "deferred":
            for due_ns, sequence, attempts in self.deferred:
                yield PeekedMessage(state, sequence, attempts, due_ns, self.deferred.held(sequence))
        else:
            for start, end in self.cursor.ahead(self.end):
                yield from (PeekedMessage(state, sequence) for sequence in range(start, end))

    def find_waiting(self, sequence: int, found: deque[tuple[int, int]]) -> Iterator[None]:
        """Find the ranges of ready and deferred messages, in steps; the event loop may serve other tasks between them.

        Args:
            sequence: Lowest sequence to find.
            found: Receives the ranges [start, end), ascending and not adjacent. Messages that arrive meanwhile may be
                missing; messages delivered meanwhile may be included.
        """
        runs = Runs()
        # Deferred messages first: those that become due meanwhile move to the requeued ones, which are read next.
        for block in self.deferred.blocks():
            runs.add([*spans(sorted(each for each in block.sequence if each >= sequence))])
            yield
        blocked = self.order.blocked() if self.order is not None else []
        for entries in in_steps([*self.requeued.entries, *blocked]):
            runs.add([*spans(sorted(entry[0] for entry in entries if entry[0] >= sequence))])
            yield
        for ahead in in_steps(self.cursor.clone().ahead(self.end)):
            runs.add([(max(start, sequence), end) for start, end in ahead if end > sequence])
            yield
        yield from runs.join(found)

    # ------------------------------------------------------------------ deferring and dropping

    def defer(self, sequences: range, due_ns: int, held: Batch | None) -> None:
        """Add messages that their producer deferred; the cursor will skip them."""
        self.deferred.add(due_ns, sequences, 0, held)
        self.cursor.skip(sequences.start, sequences.stop)
        if self.arrivals is not None:
            self.arrivals.append((sequences, due_ns, held))

    def pass_over(self, sequence: int) -> int:
        """Drop the fresh messages below `sequence`, and return their number."""
        before = self.fresh
        self.cursor.move_to(min(sequence, self.end))
        return before - self.fresh

    def expire_before(self, sequence: int) -> None:
        """As `pass_over`, for messages older than the TTL."""
        self.expired_count += self.pass_over(sequence)

    def drop_before(self, sequence: int) -> None:
        """As `pass_over`, to make room."""
        self.dropped_count += self.pass_over(sequence)

    def drop_oldest(self, count: int) -> None:
        """Drop `count` ready or blocked messages: first the requeued ones, which are the oldest, then blocked ones."""
        again = min(count, len(self.requeued.entries))
        if again:
            dropped = [sequence for sequence, _, _ in self.requeued.head(again)]
            self.requeued.remove_first(again)
            self.release(dropped)
        if self.order is not None:
            if self.order.is_full:
                self._watch(0)  # the cursor goes on
            again += self.order.drop_oldest(count - again)
        self.dropped_count += again
        self.drop_before(self.cursor.after(count - again))

    def drop_moved(self, sequence: int, *, now: bool) -> None:
        """Drop the messages up to this sequence, which another broker has.

        The requeued and deferred ones only if `now`: that examines all of them.
        """
        self.cursor.move_to(min(sequence + 1, self.end))
        if now:
            self.requeued.keep_after(sequence)
            self.deferred.drop_through(sequence)
            if self.order is not None:
                self.order.drop_through(sequence)

    def count_before(self, sequence: int, *, requeued: bool) -> int:
        """Count the messages that `pass_over` would drop; with `requeued`, also the requeued and blocked ones below.

        Examines at most `_COUNTED` requeued messages.
        """
        fresh = self.cursor.count_before(min(sequence, self.end))
        if not requeued:
            return fresh
        if sequence >= self.cursor.position:  # every requeued message is below the cursor
            return fresh + len(self.requeued.entries) + self.blocked_count
        blocked = self.order.blocked() if self.order is not None else []
        again = chain(self.requeued.head(_COUNTED), blocked)
        return fresh + sum(each[0] < sequence for each in again)

    # ------------------------------------------------------------------ operators

    def withdraw(
        self, sequences: Collection[int], holding: Callable[[int], Batch | None] | None
    ) -> list[WithdrawnMessage]:
        """Withdraw and return the messages among these that are not in flight.

        Args:
            holding: Returns the batch that holds a message that is only in memory. None: all are in the log.
        """
        wanted = set(sequences)
        waiting = self.requeued.withdraw(wanted)
        if self.order is not None:
            waiting += self.order.withdraw(wanted)
            self.release(self.order.released(wanted))
            self._watch(0)  # fresh messages may have waited for the keys of these, or for fewer blocked ones
        found = [WithdrawnMessage(*entry[:2], None, entry[2]) for entry in waiting]
        found += self.withdrawn.take_of(wanted)
        found += [
            WithdrawnMessage(sequence, attempts, None, held)
            for sequence, attempts, held in self.deferred.withdraw(wanted)
        ]
        wanted.difference_update([message.sequence for message in found])
        if fresh := self.cursor.ahead_among(sorted(wanted), self.end):
            self.cursor.skip_among(fresh)
            held = map(holding, fresh) if holding is not None else [None] * len(fresh)
            found += [WithdrawnMessage(each, 0, None, batch) for each, batch in zip(fresh, held, strict=True)]
        if found:
            self.withdrawn.hold(found)
        return found

    def failed_attempts(self, sequence: int, attempts: int) -> int:
        """Return how many of a message's deliveries may have failed: those that a client may have begun."""
        return attempts - self.prefetched.get(sequence, 0) if self.prefetched else attempts

    def add_prefetched(self, sequence: int) -> None:
        """Record that the last delivery of a message has ended before a client began it."""
        prefetched = self.prefetched
        prefetched[sequence] = prefetched.pop(sequence, 0) + 1
        if len(prefetched) > MAX_PREFETCHED:
            del prefetched[next(iter(prefetched))]

    def unanswered_before(self, sequence: int) -> list[Requeued]:
        """Return the messages before a sequence that are requeued, blocked or in flight."""
        blocked = self.order.blocked() if self.order is not None else []
        found = [entry for entry in chain(self.requeued.entries, blocked) if entry[0] < sequence]
        for consumer in self.consumers:
            found += [
                (each, sent.attempts, sent.held) for each, sent in consumer.in_flight if each < sequence
            ]
        return found

    # ------------------------------------------------------------------ order by key

    def set_order(self, keys: MessageKeys | None) -> None:
        """Have or end an order by key. Messages that are in flight or deferred by REQ now are not part of it."""
        blocked = self.order.blocked() if self.order is not None else []
        for consumer in self.consumers:
            consumer.in_flight.forget_keys()
        self.order = KeyOrder(keys, self._version) if keys is not None else None
        self.requeued.add(blocked)
        self.order_requeued()

    def read_keys_again(self) -> None:
        """Find the order anew, after messages have left that held keys."""
        if self.order is not None:
            sent = [
                delivery.key_of(sequence)
                for consumer in self.consumers
                for sequence, delivery in consumer.in_flight
            ]
            self.requeued.add(self.order.take_all(sent, self.deferred.sequences()))
            self.order_requeued()
            self._watch(0)

    def order_requeued(self) -> None:
        """Let the requeued messages, whose keys are not known, be delivered by sequence and before fresh ones."""
        if self.order is not None and self.requeued.entries:
            self.requeued.sort()
            self.order.must_read([sequence for sequence, _, _ in self.requeued.entries])

    def release(self, sequences: Iterable[int]) -> None:
        """Release the keys of messages that were not in flight and have left the channel."""
        if self.order is not None and (freed := self.order.drop(sequences)):
            self.requeued.add(freed)
            self._watch(0)

    def put_first_last(self) -> None:
        """Move the first requeued message, which cannot be read, to the end of the queue."""
        if self.order is not None and (first := self.requeued.first) is not None:
            self.order.skip_unreadable(first)
        self.requeued.put_first_last()

    def clear(self) -> list[deque[Any]]:
        """Drop all messages: ready, in flight and deferred. Pass the returned queues to `forget`."""
        self.prefetched.clear()
        forgotten: list[deque[Any]] = [self.requeued.clear(), self.cursor.restart(self.end)]
        self.deferred.clear()
        self.withdrawn.clear()
        if self.order is not None:
            self.order.clear()
        self._in_flight = ()
        for consumer in self.consumers:
            consumer.in_flight.clear()
        return forgotten
