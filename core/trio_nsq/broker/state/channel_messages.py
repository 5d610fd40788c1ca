"""Where each message of a channel is that is not finished.

Every message below the cursor is finished unless it is in flight with a consumer, requeued, deferred, or withdrawn
because it was given up, or for an operator (see `WithdrawnMessages`). So the state of a channel is as small as what is
unfinished, however long the log. What lies ahead of the cursor but will not be delivered from there (deferred by its
publisher, or emptied from the topic) is a *hole*: the cursor passes over.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

from .batch import Batch
from .consumer import Consumer
from .cursor import Cursor, spans
from .deferred import DeferredMessages, Requeued
from .in_flight import LOOKED_AT
from .steps import Runs, in_steps
from .topic_view import TopicView
from .version import Version
from .withdrawn import Withdrawn, WithdrawnMessages

_COUNTED = 10_000

State = Literal["requeued", "fresh", "deferred"]
STATES: tuple[State, ...] = ("requeued", "fresh", "deferred")


class Waiting(NamedTuple):
    """A message that a channel is going to deliver.

    Attributes:
        state: `requeued`: it comes again, or its time has come; `fresh`: it was never delivered; `deferred`: it waits
            for its time.
        due_ns: When it may be delivered, Unix nanoseconds; 0: now.
        held: The batch that holds it, if nothing but memory has it.
    """

    state: State
    sequence: int
    attempts: int = 0
    due_ns: int = 0
    held: Batch | None = None


class RequeuedMessages:
    """They are delivered in this order.

    Attributes:
        entries: All of them; changed by this class only.
    """

    __slots__ = ("_version", "entries")

    def __init__(self, version: Version) -> None:
        self.entries: deque[Requeued] = deque()
        self._version = version

    @property
    def first(self) -> int | None:
        return self.entries[0][0] if self.entries else None

    def head(self, count: int) -> list[Requeued]:
        return list(islice(self.entries, count))

    def add(self, entries: Iterable[Requeued]) -> None:
        self.entries.extend(entries)
        self._version.increment()

    def remove_first(self, count: int) -> None:
        for _ in range(count):
            self.entries.popleft()
        self._version.increment()

    def put_first_last(self) -> None:
        """Let the others be delivered before the first."""
        self.entries.rotate(-1)
        self._version.increment()

    def withdraw(self, sequences: Collection[int]) -> list[Requeued]:
        found = [entry for entry in self.entries if entry[0] in sequences]
        if found:
            self.entries = deque(entry for entry in self.entries if entry[0] not in sequences)
            self._version.increment()
        return found

    def clear(self) -> deque[Requeued]:
        """Remove all, and return them: to free many of them takes long."""
        entries, self.entries = self.entries, deque()
        self._version.increment()
        return entries


class ChannelMessages:
    """The unfinished messages of one channel.

    Attributes:
        cursor, requeued, deferred, withdrawn: Where messages are; what is in flight is with the consumers.
        consumers: In the order they came.
        arrivals: The arguments of all calls of `defer` since a `Seek` began; None: there is none.
        expired_count: Messages dropped because they had waited for longer than the topic's `ttl_ms`.
        dropped_count: Those dropped because there were too many.
    """

    def __init__(self, topic: TopicView, cursor: int, version: Version, *, private: bool) -> None:
        self._topic = topic
        self._private = private
        self.cursor = Cursor(cursor, version)
        self.requeued = RequeuedMessages(version)
        self.deferred = DeferredMessages(version)
        self.withdrawn = WithdrawnMessages(version)
        self.consumers: dict[Consumer, None] = {}
        self.arrivals: list[tuple[range, int, Batch | None]] | None = None
        self.expired_count = 0
        self.dropped_count = 0

    # ------------------------------------------------------------------ what is where

    @property
    def end(self) -> int:
        """The sequence up to which messages belong to the channel."""
        return self._topic.end if self._private else self._topic.high_watermark

    @property
    def fresh(self) -> int:
        """Messages ahead of the cursor."""
        topic, cursor = self._topic, self.cursor
        end = topic.end if self._private else topic.high_watermark
        return end - cursor.position - cursor.hole_messages

    @property
    def ready_count(self) -> int:
        topic, cursor = self._topic, self.cursor
        end = topic.end if self._private else topic.high_watermark
        return end - cursor.position - cursor.hole_messages + len(self.requeued.entries)

    @property
    def depth(self) -> int:
        """Messages that are neither in flight nor deferred: ready to be delivered, or withdrawn."""
        return self.ready_count + len(self.withdrawn)

    @property
    def in_flight_count(self) -> int:
        return sum(consumer.in_flight.count for consumer in self.consumers)

    @property
    def limit(self) -> int:
        """How far the cursor can go now: the next hole, or the end of what belongs to the channel."""
        return self.cursor.run_end(self.end)

    def unfinished(self) -> Iterator[tuple[int, int]]:
        """(sequence, attempts) of everything below the cursor that is neither finished nor deferred."""
        for sequence, attempts, _ in self.requeued.entries:
            yield sequence, attempts
        for message in self.withdrawn:
            yield message.sequence, message.attempts
        for consumer in self.consumers:
            for sequence, delivery in consumer.in_flight:
                yield sequence, delivery.attempts

    def unfinished_parts(self) -> Iterator[list[int]]:
        """The sequences of `unfinished`, in parts. Those in flight are read as their turn comes."""
        now = [
            [sequence for sequence, _, _ in self.requeued.entries],
            [message.sequence for message in self.withdrawn],
        ]
        later = ([sequence for sequence, _ in consumer.in_flight] for consumer in list(self.consumers))
        return chain(now, later)

    def waiting_before(self, sequence: int) -> list[int]:
        """The messages before a sequence that are unfinished or deferred, ascending.

        For messages that were carried forward: those ahead of the cursor never are, and are not looked at.
        """
        found = [each for each, _ in self.unfinished() if each < sequence]
        found += self.deferred.sequences_before(sequence)
        return sorted(found)

    @property
    def oldest(self) -> int | None:
        """The lowest sequence that is ready or in flight; None if there is none. Deferred ones do not count.

        It is exact unless more than a thousand messages are to be delivered again, or in flight with one consumer:
        then the lowest of the first thousand of them counts.
        """
        found = [sequence for sequence, _, _ in self.requeued.head(LOOKED_AT)]
        found += [message.sequence for message in islice(self.withdrawn, LOOKED_AT)]
        for consumer in self.consumers:
            if (sequence := consumer.in_flight.oldest) is not None:
                found.append(sequence)
        if self.fresh > 0:
            found.append(self.cursor.position)
        return min(found, default=None)

    def peek(self, state: State) -> Iterator[Waiting]:
        """The messages in this state, in the order of their delivery. To be used up before anything else happens."""
        if state == "requeued":
            for sequence, attempts, held in self.requeued.entries:
                yield Waiting(state, sequence, attempts, 0, held)
        elif state == "deferred":
            for due_ns, sequence, attempts in self.deferred:
                yield Waiting(state, sequence, attempts, due_ns, self.deferred.held(sequence))
        else:
            for start, end in self.cursor.ahead(self.end):
                yield from (Waiting(state, sequence) for sequence in range(start, end))

    def find_waiting(self, sequence: int, found: deque[tuple[int, int]]) -> Iterator[None]:
        """Find where ready and deferred messages lie, in steps. Others may have their turn between them.

        Args:
            sequence: From there on.
            found: Gets [start, end), ascending and apart from each other. What arrives meanwhile may be missing, and
                what is delivered meanwhile may be there.
        """
        runs = Runs()
        # What is due meanwhile goes from the first of these to the second, and is found in one of them.
        for block in self.deferred.blocks():
            runs.add([*spans(sorted(each for each in block.sequence if each >= sequence))])
            yield
        for entries in in_steps(list(self.requeued.entries)):
            runs.add([*spans(sorted(entry[0] for entry in entries if entry[0] >= sequence))])
            yield
        for ahead in in_steps(self.cursor.clone().ahead(self.end)):
            runs.add([(max(start, sequence), end) for start, end in ahead if end > sequence])
            yield
        yield from runs.join(found)

    # ------------------------------------------------------------------ messages that need not be delivered

    def defer(self, sequences: range, due_ns: int, held: Batch | None) -> None:
        """Let messages that were deferred by their publisher wait here; the cursor will pass over them."""
        self.deferred.add(due_ns, sequences, 0, held)
        self.cursor.skip(sequences.start, sequences.stop)
        if self.arrivals is not None:
            self.arrivals.append((sequences, due_ns, held))

    def pass_over(self, sequence: int) -> int:
        """Drop what is ready and was never delivered below `sequence`; returns how many messages that were."""
        before = self.fresh
        self.cursor.move_to(min(sequence, self.end))
        return before - self.fresh

    def expire_before(self, sequence: int) -> None:
        """As `pass_over`, for messages that have waited for too long."""
        self.expired_count += self.pass_over(sequence)

    def drop_before(self, sequence: int) -> None:
        """As `pass_over`, to make room."""
        self.dropped_count += self.pass_over(sequence)

    def drop_oldest(self, count: int) -> None:
        """Drop so many of the messages that are ready: those that come again first, for they are the oldest."""
        again = min(count, len(self.requeued.entries))
        if again:
            self.requeued.remove_first(again)
        self.dropped_count += again
        self.drop_before(self.cursor.after(count - again))

    def count_before(self, sequence: int, *, requeued: bool) -> int:
        """How many messages `pass_over` would drop; with `requeued` also those below `sequence` that come again.

        Of many that come again, `_COUNTED` are looked at.
        """
        fresh = self.cursor.count_before(min(sequence, self.end))
        if not requeued:
            return fresh
        if sequence >= self.cursor.position:  # whatever comes again is older than the cursor
            return fresh + len(self.requeued.entries)
        return fresh + sum(each[0] < sequence for each in self.requeued.head(_COUNTED))

    # ------------------------------------------------------------------ operators

    def withdraw(
        self, sequences: Collection[int], holding: Callable[[int], Batch | None] | None
    ) -> list[Withdrawn]:
        """Withdraw those of these messages that are not in flight, and return them.

        Args:
            holding: Gives the batch that holds a message, if nothing but memory has it. None: the log has them all.
        """
        wanted = set(sequences)
        found = [Withdrawn(*entry[:2], None, entry[2]) for entry in self.requeued.withdraw(wanted)]
        found += self.withdrawn.take_of(wanted)
        found += [
            Withdrawn(sequence, attempts, None, held)
            for sequence, attempts, held in self.deferred.withdraw(wanted)
        ]
        wanted.difference_update([message.sequence for message in found])
        if fresh := self.cursor.ahead_among(sorted(wanted), self.end):
            self.cursor.skip_among(fresh)
            held = map(holding, fresh) if holding is not None else [None] * len(fresh)
            found += [Withdrawn(each, 0, None, batch) for each, batch in zip(fresh, held, strict=True)]
        if found:
            self.withdrawn.hold(found)
        return found

    def unanswered_before(self, sequence: int) -> list[Requeued]:
        """The messages before a sequence that are requeued or in flight."""
        found = [entry for entry in self.requeued.entries if entry[0] < sequence]
        for consumer in self.consumers:
            found += [
                (each, sent.attempts, sent.held) for each, sent in consumer.in_flight if each < sequence
            ]
        return found

    def clear(self) -> list[deque[Any]]:
        """Drop everything: ready, in flight and deferred. What is returned is to be forgotten, see `forget`."""
        forgotten: list[deque[Any]] = [self.requeued.clear(), self.cursor.restart(self.end)]
        self.deferred.clear()
        self.withdrawn.clear()
        for consumer in self.consumers:
            consumer.in_flight.clear()
        return forgotten
