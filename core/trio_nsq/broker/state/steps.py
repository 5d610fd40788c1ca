"""Work on a channel that is done in steps: a channel may have a million messages, and other clients wait meanwhile."""

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
"""Messages examined in one step, which takes about 0.1 ms."""


class Runs:
    """Collects spans of sequences, [start, end), and merges them in order."""

    def __init__(self) -> None:
        self._runs: list[deque[tuple[int, int]]] = []  # each is ascending

    def add(self, part: list[tuple[int, int]]) -> None:
        """Add spans, in ascending order."""
        if self._runs and part and self._runs[-1][-1][1] <= part[0][0]:
            self._runs[-1] += part
        elif part:
            self._runs.append(deque(part))

    def join(self, into: deque[tuple[int, int]]) -> Iterator[None]:
        """Append all spans to `into`, ascending and merged, in steps. Afterwards this holds none."""
        for step in in_steps(merge(*map(_taken, self._runs))):
            for span in step:
                if into and into[-1][1] >= span[0]:
                    start, end = into.pop()
                    span = start, max(end, span[1])
                into.append(span)
            yield
        self._runs.clear()


class Preparation:
    """Computes the state that a channel will have after a seek, in steps.

    The channel keeps working meanwhile. Changes to messages from `to` on do not matter: the channel delivers all of
    them again. New deferred messages do matter: the channel reports them with `record_arrived`.

    Args:
        to: The sequence that the channel moves to.
        point: The first sequence that had not arrived when this began; messages from there on are in `late`.
        keeps_before: The channel keeps its unfinished messages before `to`.
        now_ns: Messages due by then count as ready, Unix nanoseconds.

    Attributes:
        deferred: Deferred messages from `to` on.
        holes, hole_messages: The holes of the channel's new `Cursor`, and how many messages are in them.
        before: Unfinished messages before `to`.
        late: Deferred messages that arrived since this began, as `record_arrived` was given them.
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
        self._runs = Runs()  # of the new holes

    def record_arrived(self, sequences: range, due_ns: int, held: Batch | None) -> None:
        """Note deferred messages that the channel just got."""
        self.late.append((sequences, due_ns, held))

    def steps(
        self, cursor: Cursor, deferred: DeferredMessages, unfinished: Iterable[Iterable[int]]
    ) -> Iterator[None]:
        """Do the work; the event loop may serve others between two steps.

        Args:
            cursor: Of the channel.
            deferred: Of the channel.
            unfinished: Sequences of messages that are neither ahead of the cursor nor deferred. They come in parts;
                each part is read after the one before it is done.
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
    """Yield the items and remove each one: freeing a million at once would block the event loop."""
    while items:
        yield items.popleft()


def in_steps(items: Iterable[_T]) -> Iterator[list[_T]]:
    """Yield the items in lists of at most one step's size."""
    rest = iter(items)
    while step := list(islice(rest, _STEP_MESSAGES)):
        yield step


def forget(what: Iterable[deque[Any]]) -> Iterator[None]:
    """Empty these queues in steps: freeing a million objects at once would block the event loop."""
    for entries in what:
        while entries:
            for _ in range(min(len(entries), _STEP_MESSAGES)):
                entries.popleft()
            yield
