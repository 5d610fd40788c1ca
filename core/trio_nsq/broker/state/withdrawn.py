"""Withdrawn messages of a channel: neither ready, in flight nor deferred, while the broker moves them."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ...log.record_metadata import Reason
from .batch import Batch
from .version import Version


class WithdrawnMessage(NamedTuple):
    """A withdrawn message.

    Attributes:
        reason: Why its last permitted delivery failed; None if its attempts are not exhausted.
        held: The batch that holds it, if it is only in memory.
    """

    sequence: int
    attempts: int
    reason: Reason | None
    held: Batch | None = None


class WithdrawnMessages:
    """A channel's messages withdrawn from delivery; exhausted ones wait for the dead-letter mover.

    Iterating yields all messages, both taken by the mover and waiting.
    """

    __slots__ = ("_taken", "_version", "_waiting")

    def __init__(self, version: Version) -> None:
        self._version = version
        self._waiting: deque[WithdrawnMessage] = deque()
        self._taken: dict[int, WithdrawnMessage] = {}

    def copy_from(self, other: "WithdrawnMessages") -> None:
        self._waiting, self._taken = other._waiting.copy(), other._taken.copy()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)

    def __iter__(self) -> Iterator[WithdrawnMessage]:
        yield from self._taken.values()
        yield from self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add_exhausted(self, message: WithdrawnMessage) -> None:
        self._waiting.append(message)
        self._version.increment()

    def take(self, at_most: int) -> list[WithdrawnMessage]:
        """Take the messages that have waited longest."""
        found = [self._waiting.popleft() for _ in range(min(at_most, len(self._waiting)))]
        self.hold(found)
        return found

    def take_of(self, sequences: Collection[int]) -> list[WithdrawnMessage]:
        """Take the waiting messages among these."""
        found = [message for message in self._waiting if message.sequence in sequences]
        if found:
            self._waiting = deque(message for message in self._waiting if message.sequence not in sequences)
            self._version.increment()
        return found

    def hold(self, messages: Iterable[WithdrawnMessage]) -> None:
        """Add messages as taken."""
        self._taken.update((message.sequence, message) for message in messages)
        self._version.increment()

    def release(self, messages: Iterable[WithdrawnMessage]) -> list[WithdrawnMessage]:
        """Remove taken messages; returns those that were still here."""
        # Compare by identity: after a seek, a dropped message may have been taken again as a new object.
        released = [message for message in messages if self._taken.get(message.sequence) is message]
        for message in released:
            del self._taken[message.sequence]
        if released:
            self._version.increment()
        return released

    def take_all_waiting(self) -> list[WithdrawnMessage]:
        waiting = list(self._waiting)
        self._waiting.clear()
        if waiting:
            self._version.increment()
        return waiting

    def clear(self) -> None:
        self._waiting.clear()
        self._taken.clear()
        self._version.increment()
