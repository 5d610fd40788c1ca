"""The times at which channels or topics are next due."""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_MAX_STALE = 100
"""Deadlines of forgotten items that may stay in the heap, in addition to half of its size."""


class DeadlineHeap(Generic[_Item]):
    """A priority queue of due times. A forgotten item must not be watched again."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Item]] = []  # (at_ns, a number that decides ties, item)
        # The times in the heap, by item. A time is added only if it is earlier than all others of its item, so the
        # lists descend and the last entry is due first.
        self._times: dict[_Item, list[int]] = {}
        self._made = 0
        self._stale = 0  # deadlines of forgotten items in the heap

    @property
    def next_ns(self) -> int | None:
        """The earliest due time; None if there is no deadline."""
        return self._heap[0][0] if self._heap else None

    def watch(self, item: _Item, at_ns: int | None) -> bool:
        """Add a deadline for an item, unless it has an earlier one; None adds none.

        Returns:
            Whether this deadline is now the earliest of all.
        """
        if at_ns is None:
            return False
        times = self._times.setdefault(item, [])
        if times and at_ns >= times[-1]:
            return False
        times.append(at_ns)
        self._made += 1
        heappush(self._heap, (at_ns, self._made, item))
        return self._heap[0][1] == self._made

    def take_due(self, now_ns: int) -> _Item | None:
        """Remove the earliest deadline that is due, and return its item; None if no deadline is due."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, item = heappop(self._heap)
            times = self._times.get(item)
            if times is None:
                self._stale -= 1
                continue
            times.pop()
            if not times:
                del self._times[item]
            return item
        return None

    def take_all_due(self, now_ns: int) -> list[_Item]:
        """Remove all due deadlines, and return their items without duplicates."""
        due: dict[_Item, None] = {}
        while (item := self.take_due(now_ns)) is not None:
            due[item] = None
        return list(due)

    def forget(self, item: _Item) -> None:
        """Discard the deadlines of a deleted item."""
        self._stale += len(self._times.pop(item, ()))
        if self._stale > len(self._heap) // 2 + _MAX_STALE:
            self._heap = [deadline for deadline in self._heap if deadline[2] in self._times]
            heapify(self._heap)
            self._stale = 0
