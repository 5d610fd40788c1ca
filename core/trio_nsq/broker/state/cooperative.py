"""Work on a channel that is done in steps: a channel may have a million messages, and other clients wait meanwhile."""

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import Any, TypeVar

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
