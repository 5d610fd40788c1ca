"""Checks what happened to messages with a key that were delivered in order: see `order_operations`.

A delivery is wrong if

- another message of its key is in flight,
- an earlier message of its key has neither been finished, nor become a dead letter, nor been emptied,
- it was finished before, and neither the broker nor the consumer that finished it was killed since.

A message that was requeued with a delay has no place after a move, and one that was in flight or delayed when the order
was set has none until it is delivered again.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KEYS = 40
CERTAIN_S = 1.0
"""A message that was delivered longer ago may have timed out: a busy machine reads it late."""


class Event(NamedTuple):
    """What happened.

    Attributes:
        kind: As consumers tell it; `kill`: a broker was killed or stopped; `dead`: a consumer was killed; `empty`: the
            channel is emptied now, up to `numbers`; `off`, `on`, `move`.
        connection: Of which process, and which one of it.
        numbers: How many messages of each key were published.
    """

    at_ns: int
    kind: str
    connection: tuple[int, int] = (0, 0)
    key: int = 0
    number: int = 0
    numbers: tuple[int, ...] = ()


@dataclass
class Key:
    """What is known of a key at one moment.

    Attributes:
        next: All messages below are finished, dead letters or emptied.
        highest: The last message that was delivered.
        finished: Those above that are.
        maybe: Messages whose FIN may not have reached the broker.
        in_flight: When, and to which connection, messages were delivered that are not answered.
        placeless: Messages without a place in the order.
        delayed: Messages that were requeued with a delay.
        emptied: The number of messages that `empty` has dropped.
        unsure: The broker was killed: what was finished may come again.
    """

    next: int = 0
    highest: int = 0
    finished: set[int] = field(default_factory=set)
    maybe: set[int] = field(default_factory=set)
    in_flight: dict[int, tuple[int, tuple[int, int]]] = field(default_factory=dict)
    placeless: set[int] = field(default_factory=set)
    delayed: set[int] = field(default_factory=set)
    emptied: int = 0
    unsure: bool = False

    def is_done(self, number: int) -> bool:
        return number < self.next or number in self.finished


class Check:
    """Follows the events in the order of their times.

    Attributes:
        dead: The dead letters, keys and numbers.
        wrong: What was wrong, sentences.
        finished: All messages that were finished once.
    """

    def __init__(self, dead: set[tuple[int, int]]) -> None:
        self.dead = dead
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.finished: set[tuple[int, int]] = set()
        self._keys: defaultdict[int, Key] = defaultdict(Key)
        self._strict_from_ns: float = 0
        self._emptied_ns = 0
        self._answers: dict[tuple[int, int], list[Event]] = defaultdict(list)

    def run(self, events: Sequence[Event]) -> None:
        """Check all events."""
        ordered = sorted(events)
        refused = _refused(ordered)
        for event in ordered:
            self.counts[event.kind] += 1
            if event in refused:
                continue
            if event.kind == "D":
                self._deliver(event)
            elif event.kind in "FRW":
                self._answer(event)
            elif event.kind in ("X", "dead"):
                self._lose(event)
            elif event.kind != "E":
                self._operate(event)

    def _deliver(self, event: Event) -> None:
        key, number = self._keys[event.key], event.number
        if number < key.emptied:
            if event.at_ns > self._emptied_ns + 1e9 * CERTAIN_S:
                self.wrong.append(f"{event.key}: {number} came after the channel was emptied")
            return
        is_strict = event.at_ns >= self._strict_from_ns
        if key.unsure:  # the saved state has those from this one on
            again = {*range(number, key.next), *(each for each in key.finished if each >= number)}
            key.maybe |= again
            key.finished -= again
            key.next, key.unsure = min(key.next, number), False
        if is_strict:
            self._check(event, key)
            key.placeless.discard(number)
        else:
            key.placeless.add(number)
        key.maybe.discard(number)
        key.delayed.discard(number)
        key.highest = max(key.highest, number)
        key.in_flight[number] = event.at_ns, event.connection

    def _check(self, event: Event, key: Key) -> None:
        number = event.number
        certain_ns = event.at_ns - 1e9 * CERTAIN_S
        for other, (at_ns, connection) in key.in_flight.items():
            if at_ns > certain_ns and other not in key.placeless:
                self.wrong.append(
                    f"{event.key}: {number} came to {event.connection} while {other} was in flight with {connection}, "
                    f"{(event.at_ns - at_ns) / 1e6:.0f} ms after it"
                )
        if key.is_done(number):
            self.wrong.append(f"{event.key}: {number} came again after it was finished")
        for earlier in range(key.next, number):
            if key.is_done(earlier) or earlier in key.placeless or (event.key, earlier) in self.dead:
                continue
            if earlier in key.maybe:  # it was finished, as a later one comes
                key.maybe.discard(earlier)
                key.finished.add(earlier)
                continue
            self.wrong.append(f"{event.key}: {number} came before {earlier} was finished")
        self._advance(key)

    def _advance(self, key: Key) -> None:
        while key.next in key.finished:
            key.finished.discard(key.next)
            key.next += 1

    def _answer(self, event: Event) -> None:
        key, number = self._keys[event.key], event.number
        key.in_flight.pop(number, None)
        if event.kind == "F":
            self.finished.add((event.key, number))
            key.placeless.discard(number)
            key.finished.add(number)
            self._answers[event.connection].append(event)
            self._advance(key)
        elif event.kind == "W":
            key.delayed.add(number)

    def _lose(self, event: Event) -> None:
        """A connection or a process has ended: its last answers may not have reached the broker."""
        ended = [
            each
            for each in self._answers
            if each == event.connection or (event.kind == "dead" and each[0] == event.connection[0])
        ]
        for connection in ended:
            for answer in self._answers.pop(connection):
                if answer.at_ns > event.at_ns - 5e9:
                    self._doubt(self._keys[answer.key], answer.number)
        for key in self._keys.values():
            for number, (_, connection) in list(key.in_flight.items()):
                if connection == event.connection or (
                    event.kind == "dead" and connection[0] == event.connection[0]
                ):
                    del key.in_flight[number]

    @staticmethod
    def _doubt(key: Key, number: int) -> None:
        if number >= key.emptied and key.is_done(number):
            key.finished |= {*range(number, key.next)}
            key.next = min(key.next, number)
            key.finished.discard(number)
            key.maybe.add(number)

    def _operate(self, event: Event) -> None:
        for number, key in ((each, self._keys[each]) for each in range(KEYS)):
            if event.kind == "kill":
                key.unsure = True
                key.in_flight.clear()
            elif event.kind == "empty":
                key.emptied = key.next = event.numbers[number]
                for some in (key.finished, key.maybe, key.placeless, key.delayed):
                    some.clear()
                key.in_flight.clear()
                key.unsure = False
            elif event.kind == "move":
                key.placeless |= key.delayed
                key.delayed.clear()
            elif event.kind == "on":
                # What was delivered before may be with a consumer that has not told it yet.
                key.placeless |= {each for each in range(key.next, key.highest + 1) if not key.is_done(each)}
        if event.kind == "off":
            self._strict_from_ns = float("inf")
        elif event.kind == "on":
            self._strict_from_ns = event.at_ns + 1e9 * CERTAIN_S
        elif event.kind == "empty":
            self._emptied_ns = event.at_ns


def _refused(events: Sequence[Event]) -> set[Event]:
    """Return the answers that the broker refused: `E` tells it of the last answer of a connection about a message."""
    last: dict[tuple[tuple[int, int], int, int], Event] = {}
    refused = set()
    for event in events:
        about = event.connection, event.key, event.number
        if event.kind == "E" and about in last:
            refused.add(last[about])
        elif event.kind in ("F", "R", "W"):
            last[about] = event
    return refused
