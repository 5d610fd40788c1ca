"""What waits until the members of a cluster have an operation."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ReplicationBarrier(Generic[T]):
    """The members that an OK waits for, and what waits for them. Without members, nothing waits.

    Args:
        on_reached: Called with all that was reached, in the order of the requests; not within `request`.

    Attributes:
        stored: For each such member: the number of the last operation that it has durably.
    """

    def __init__(self, on_reached: Callable[[list[T]], None]) -> None:
        self.stored: dict[str, int] = {}
        self._on_reached = on_reached
        self._waiting: deque[tuple[int, T]] = deque()
        self._last = 0

    def request(self, number: int, what: T) -> bool:
        """Have something wait until each member has all operations up to this one.

        Args:
            number: Not lower than that of an earlier request.

        Returns:
            False: It is reached already, and does not wait.
        """
        assert number >= self._last, "requests come in order"
        self._last = number
        if not self._waiting and number <= self.reached(number):
            return False
        self._waiting.append((number, what))
        return True

    def reached(self, last_number: int) -> int:
        """Return the number up to which each member has all operations; without members, `last_number`."""
        return min(self.stored.values(), default=last_number)

    def add(self, member: str, number: int) -> None:
        """Wait for a member from now on, which has all operations up to this one."""
        self.stored[member] = number

    def store(self, member: str, number: int) -> None:
        """Record how far a member is. One that nothing waits for changes nothing."""
        if member in self.stored and number > self.stored[member]:
            self.stored[member] = number
            self._reach()

    def remove(self, member: str) -> None:
        """Wait for a member no longer."""
        if self.stored.pop(member, None) is not None:
            self._reach()

    def _reach(self) -> None:
        upto, reached = self.reached(self._last), list[T]()
        while self._waiting and self._waiting[0][0] <= upto:
            reached.append(self._waiting.popleft()[1])
        if reached:
            self._on_reached(reached)
