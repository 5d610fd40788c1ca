"""A move: the unfinished messages of a topic go to another broker, each exactly once per channel.

A move has a *stream* for each durable channel, and one for the messages that the topic has not distributed. A stream's
messages are sent in ascending sequence, in groups; the target stores each group in one record, with the stream's name
as the producer and the group's last sequence as the number (see `Producers`). So the target knows how far a stream is
stored, and the source needs no record of what it has sent: after a crash of either broker, or of the program that
carries the messages, the stream continues after the target's number.

This requires that a stream never gains a message at or below a sequence that was sent:

- The topic distributes nothing during a move, and its durable channels deliver nothing.
- A channel's stream begins when no message is in flight or withdrawn (on its way to a dead-letter topic).
- Messages from the topic's `end` at the beginning of the move on are not in it. The log is synced up to this end, so
  that no power cut lets other messages have these sequences.
- The id of a move is random and part of the saved state, so that a restored backup, or a new topic with this name,
  starts another move.

The saved state need not be current: a restart drops the messages up to the target's number again.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import merge
from typing import Any

from .cooperative import in_steps
from .deferred import Block
from .waiting_messages import WaitingMessages

_DROP_AT_LEAST = 2000


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one topic.

    Attributes:
        id: 16 random hex digits.
        to: The target's address, as the operator gave it.
        end: Messages from this sequence on do not belong to the move.
        began_ns: When it began, Unix nanoseconds.
    """

    id: str
    to: str
    end: int
    began_ns: int

    def producer(self, channel: str | None) -> str:
        """Return the name of a stream at the target; None: the stream of messages that no channel has."""
        if channel is None:
            return f"move-{self.id}"
        return f"move-{self.id}-{sha256(channel.encode()).hexdigest()[:16]}"

    def state(self, moved: int) -> dict[str, Any]:
        """Return the JSON to save; `moved` is of the stream of messages that no channel has."""
        return {"id": self.id, "to": self.to, "end": self.end, "began_ns": self.began_ns, "moved": moved}

    @classmethod
    def restore(cls, state: dict[str, Any], log_end: int) -> "Move":
        """Load a saved state. Raises KeyError, TypeError, ValueError."""
        return cls(
            str(state["id"]), str(state["to"]), min(int(state["end"]), log_end), int(state["began_ns"])
        )


Run = tuple[int, int, int, str | None]
"""Messages of a stream with the same place: [start, end), their due time (0: now), and the only channel that gets them
(None: all of the topic)."""


@dataclass(slots=True, eq=False)
class MovePlan:
    """The messages of a stream that are not confirmed, ascending.

    Attributes:
        spans: Their sequences, [start, end).
        split: Splits a span into runs.
        left: Their number.
    """

    spans: deque[tuple[int, int]]
    split: Callable[[int, int], Iterator[Run]]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = sum(end - start for start, end in self.spans)

    def drop_through(self, sequence: int) -> int:
        """Remove the messages up to this sequence, and return their number."""
        before = self.left
        while self.spans and self.spans[0][0] <= sequence:
            start, end = self.spans.popleft()
            if end > sequence + 1:
                self.spans.appendleft((sequence + 1, end))
                end = sequence + 1
            self.left -= end - start
        return before - self.left


class MoveStream:
    """One stream of a move. While a channel has one, it delivers nothing.

    Attributes:
        moved: The target has all messages up to this sequence; -1: nothing is confirmed.
        is_fixed: The saved state says that the stream has begun: nothing is in flight any more.
        plan: What is left to send; None: not computed. Code that drops messages of the stream resets it.
    """

    __slots__ = ("_undropped", "is_fixed", "moved", "plan")

    def __init__(self, moved: int = -1, *, is_fixed: bool = False) -> None:
        self.moved: int = moved
        self.is_fixed: bool = is_fixed
        self.plan: MovePlan | None = None
        self._undropped = 0

    def confirm(self, sequence: int) -> None:
        """Record that the target has all messages up to this sequence, durably."""
        if sequence > self.moved:
            self.moved = sequence
            if self.plan is not None:
                self._undropped += self.plan.drop_through(sequence)

    def drops_now(self, waiting: int) -> bool:
        """Whether to search the `waiting` messages for moved ones. Each search looks at all, so there are few."""
        if self._undropped < max(_DROP_AT_LEAST, waiting // 4):
            return False
        self._undropped = 0
        return True


@dataclass(slots=True, eq=False)
class ChannelSplit:
    """Splits the spans of one channel by the due times of its deferred messages, which `load` reads in steps."""

    channel: str
    _sequences: "array[int]" = field(default_factory=lambda: array("Q"))
    _due_ns: "array[int]" = field(default_factory=lambda: array("Q"))

    def load(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Sort the deferred messages by sequence, in steps."""
        ordered: list[list[tuple[int, int]]] = []
        for block in blocks:
            ordered.append(sorted(zip(block.sequence, block.due_ns, strict=True)))
            yield
        for step in in_steps(merge(*ordered)):
            self._sequences.extend([sequence for sequence, _ in step])
            self._due_ns.extend([due_ns for _, due_ns in step])
            yield

    def runs(self, start: int, end: int) -> Iterator[Run]:
        sequences, due_ns = self._sequences, self._due_ns
        at = bisect_left(sequences, start)
        while start < end:
            following = min(end, sequences[at]) if at < len(sequences) else end
            if following > start:
                yield start, following, 0, self.channel
                start = following
                continue
            stop, due = start, due_ns[at]
            while stop < end and at < len(sequences) and (sequences[at], due_ns[at]) == (stop, due):
                stop, at = stop + 1, at + 1
            yield start, stop, due, self.channel
            start = stop


def topic_runs(
    waiting: WaitingMessages, channels: Callable[[str], bool]
) -> Callable[[int, int], Iterator[Run]]:
    """Return a function that splits spans of undistributed messages.

    Args:
        waiting: Must not change; messages before a sequence may be removed.
        channels: Whether the topic has a channel. Messages for another one would be dropped, and are left out.
    """

    def runs(start: int, end: int) -> Iterator[Run]:
        for each in waiting.between(start, end):
            if each.sequences.start > start:
                yield start, each.sequences.start, 0, None
            start, stop = max(start, each.sequences.start), min(end, each.sequences.stop)
            if each.channel is None or channels(each.channel):
                yield start, stop, each.due_ns, each.channel
            start = stop
        if start < end:
            yield start, end, 0, None

    return runs
