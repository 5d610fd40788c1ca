"""What is done with a channel in steps, for it may have a million messages to look through, and others wait."""

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


class Runs:
    """Spans of sequences, [start, end), that come in parts, and are to be put in order."""

    def __init__(self) -> None:
        self._runs: list[deque[tuple[int, int]]] = []  # ascending within each

    def add(self, part: list[tuple[int, int]]) -> None:
        """Take some spans, which ascend."""
        if self._runs and part and self._runs[-1][-1][1] <= part[0][0]:
            self._runs[-1] += part
        elif part:
            self._runs.append(deque(part))

    def join(self, into: deque[tuple[int, int]]) -> Iterator[None]:
        """Append all of them, ascending and apart from each other, in steps; then there are none here."""
        for step in in_steps(merge(*map(_taken, self._runs))):
            for span in step:
                if into and into[-1][1] >= span[0]:
                    start, end = into.pop()
                    span = start, max(end, span[1])
                into.append(span)
            yield
        self._runs.clear()


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
        self._runs = Runs()  # of holes

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
        for hole_messages in in_steps(
            min(end, self.to) - start for start, end in cursor.holes if start < self.to
        ):
            self.before -= sum(hole_messages)
            yield
        for part in unfinished:
            for sequences in in_steps(part):
                self.before += sum(map(self.to.__gt__, sequences))
                yield
        for block in deferred.blocks():
            self._take(deferred, block)
            yield
        yield from self._runs.join(self.holes)

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
        self._runs.add(list(spans(sorted(part.sequence))))


def _taken(items: deque[_T]) -> Iterator[_T]:
    """All items, of which nothing is left then: to free many of them at once takes time, too."""
    while items:
        yield items.popleft()


def in_steps(items: Iterable[_T]) -> Iterator[list[_T]]:
    """All items, as many at a time as are looked at in a step."""
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
