"""Preparing to move a channel: in steps, for it may have a million messages to look through, and others wait."""

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import Any, TypeVar

from .batch import Batch
from .cursor import Cursor, spans
from .deferred import Block, DeferredMessages

_T = TypeVar("_T")
_STEP_MESSAGES = 1000
"""As many are looked at in a step: it takes about a tenth of a millisecond."""


class Preparation:
    """What a channel is going to have once it is moved.

    The channel goes on meanwhile. What changes in those of its messages that are moved to does not matter: they are
    delivered anew whatever becomes of them. What is new has to be told, by `note_arrived`.

    Args:
        to: The sequence it is moved to.
        point: What begins there, or after it, has arrived since.
        keeps_before: It keeps what it has of messages before that.
        now_ns: What is due by then does not wait.

    Attributes:
        deferred: Messages from `to` on that wait for their time.
        holes, hole_messages: Those as a `Cursor` has them.
        before: How many unfinished messages there are before `to`.
        late: What has arrived since it began.
    """

    def __init__(self, to: int, point: int, keeps_before: bool, now_ns: int) -> None:
        self.to = to
        self.point = point
        self.keeps_before = keeps_before
        self.now_ns = now_ns
        self.deferred = DeferredMessages()
        self.holes: deque[tuple[int, int]] = deque()
        self.hole_messages = 0
        self.before = 0
        self.late: list[tuple[range, int, Batch | None]] = []
        self._runs: list[list[tuple[int, int]]] = []  # holes, ascending within each

    def note_arrived(self, sequences: range, due_ns: int, held: Batch | None) -> None:
        """The channel was given deferred messages."""
        self.late.append((sequences, due_ns, held))

    def steps(
        self, cursor: Cursor, deferred: DeferredMessages, unfinished: Iterable[Iterable[int]]
    ) -> Iterator[None]:
        """Do all of it; between two steps others may have their turn.

        `unfinished` are the sequences of what is neither ahead of the cursor nor deferred, in parts, each looked at
        when the one before is done with.
        """
        self.before = max(0, self.to - cursor.position)
        for hole_messages in _in_steps(
            min(end, self.to) - start for start, end in cursor.holes if start < self.to
        ):
            self.before -= sum(hole_messages)
            yield
        for part in unfinished:
            for sequences in _in_steps(part):
                self.before += sum(map(self.to.__gt__, sequences))
                yield
        for block in deferred.blocks():
            self._take(deferred, block)
            yield
        yield from self._join()

    def _take(self, deferred: DeferredMessages, block: Block) -> None:
        to = self.to
        if block.highest < to:
            self.before += len(block)
            return
        if block.lowest < to:
            self.before += sum(map(to.__gt__, block.sequence))
        wanted = [
            due_ns > self.now_ns and to <= sequence < self.point and not attempts
            for due_ns, sequence, attempts in zip(block.due_ns, block.sequence, block.attempts, strict=True)
        ]
        part, held = deferred.selected(block, wanted)
        if not part:
            return
        self.deferred.append(part, held)
        self.hole_messages += len(part)
        holes = list(spans(sorted(part.sequence)))
        if self._runs and self._runs[-1][-1][1] <= holes[0][0]:
            self._runs[-1] += holes
        else:
            self._runs.append(holes)

    def _join(self) -> Iterator[None]:
        for step in _in_steps(merge(*self._runs)):
            for start, end in step:
                if self.holes and self.holes[-1][1] == start:
                    start, _ = self.holes.pop()
                self.holes.append((start, end))
            yield
        self._runs.clear()


def _in_steps(items: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while step := list(islice(rest, _STEP_MESSAGES)):
        yield step


def forget(what: Iterable[deque[Any]]) -> Iterator[None]:
    """Let go of what nobody needs any more, in steps: to free a million objects takes time, too."""
    for entries in what:
        while entries:
            for _ in range(min(len(entries), _STEP_MESSAGES)):
                entries.popleft()
            yield
