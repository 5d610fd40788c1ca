"""When channels or topics have to be looked at next, though nothing happens to them."""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_DEAD_ALARMS = 100
"""So many alarms of forgotten items may stay until they ring, however few others there are."""


class Alarms(Generic[_Item]):
    """Times at which items are due. An item that is forgotten must not be watched again."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Item]] = []  # (at_ns, a number that decides ties, item)
        # The times in the heap of each item that has any. A new one is added only if it comes before them all, so they
        # descend, and the last is the first to ring.
        self._times: dict[_Item, list[int]] = {}
        self._made = 0
        self._dead = 0  # alarms of forgotten items in the heap

    @property
    def next_ns(self) -> int | None:
        """When `take_due` next has something; None: never."""
        return self._heap[0][0] if self._heap else None

    def watch(self, item: _Item, at_ns: int | None) -> bool:
        """Have an item due at `at_ns`, if it is not before; None: never. Returns whether nothing is due before that."""
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
        """Remove an alarm that is due, and return its item; None if there is none."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, item = heappop(self._heap)
            times = self._times.get(item)
            if times is None:
                self._dead -= 1
                continue
            times.pop()
            if not times:
                del self._times[item]
            return item
        return None

    def take_all_due(self, now_ns: int) -> list[_Item]:
        """Remove all alarms that are due, and return their items, each once."""
        due: dict[_Item, None] = {}
        while (item := self.take_due(now_ns)) is not None:
            due[item] = None
        return list(due)

    def forget(self, item: _Item) -> None:
        """Ring no alarm of an item that is deleted."""
        self._dead += len(self._times.pop(item, ()))
        if self._dead > len(self._heap) // 2 + _DEAD_ALARMS:
            self._heap = [alarm for alarm in self._heap if alarm[2] in self._times]
            heapify(self._heap)
            self._dead = 0
