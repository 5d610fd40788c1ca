"""What waits until the members of a cluster, and the archive, have an operation."""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from ..platform.boot_clock import boot_time_s
from .stream import OperationStream

T = TypeVar("T")

_UNCERTAIN = "another member may lead: the coordinator did not confirm in time that this member leads"


class ReplicationBarrier(Generic[T]):
    """The members, and the archive, that an OK waits for, and what waits for them. Without any, nothing waits.

    Once it is fenced, nothing waits any longer, and nothing may be acknowledged.

    Args:
        operations: All operations of this member.
        on_fenced: Called when it is fenced.
        certain_until: Returns the time of the clock until which no other member can lead; None: this member does not
            lead.
        clock: A clock that also runs while the machine sleeps.

    Attributes:
        stored: For each such member: the number of the last operation that it has durably.
        archived: The number of the last operation in the archive; None: nothing waits for an archive.
        fenced_because: Why this member no longer leads; empty while it leads.
        held_because: Why nothing is reached for now; empty otherwise.
        on_reached: Called with all that waits no longer, in the order of the requests; not within `request`.
    """

    def __init__(
        self,
        operations: OperationStream,
        on_fenced: Callable[[], None],
        certain_until: Callable[[], float | None] = lambda: inf,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        self.stored: dict[str, int] = {}
        self.archived: int | None = None
        self.fenced_because: str = ""
        self.held_because: str = ""
        self._held: dict[str, str] = {}
        self.on_reached: Callable[[list[T]], None] = lambda reached: None
        self._operations = operations
        self._on_fenced = on_fenced
        self._certain_until = certain_until
        self._clock = clock
        self._waiting: deque[tuple[int, T]] = deque()

    def check(self) -> None:
        """Fence unless this member certainly leads. Call it before an acknowledgement.

        A process that was stopped for a while finds out here, before any other task runs.
        """
        if not self.fenced_because:
            until_s = self._certain_until()
            if until_s is None or self._clock() >= until_s:
                self.fence(_UNCERTAIN)

    def fence(self, reason: str) -> None:
        """Let nothing be acknowledged from now on: this member no longer leads."""
        if not self.fenced_because:
            self.fenced_because = reason
            self._on_fenced()
            self._reach()

    def hold(self, by: str, reason: str) -> bool:
        """Let nothing be reached until this is called with an empty reason.

        Args:
            by: Who calls it; each has one reason.

        Returns:
            Whether that is another reason than before.
        """
        if reason == self._held.get(by, ""):
            return False
        self._held[by] = reason
        self.held_because = next(filter(None, self._held.values()), "")
        self._reach()
        return True

    @property
    def is_waited_for(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def request(self, what: T) -> bool:
        """Have something wait until each member has all operations so far.

        Returns:
            False: It is reached already, and does not wait.
        """
        number = self._operations.last_number
        if self.fenced_because or (not self._waiting and number <= self._reached):
            return False
        self._waiting.append((number, what))
        return True

    @property
    def _reached(self) -> int:
        """The number up to which all that is waited for have all operations; -1 while it is held."""
        if self.held_because:
            return -1
        reached = min(self.stored.values(), default=self._operations.last_number)
        return reached if self.archived is None else min(reached, self.archived)

    def add(self, member: str, number: int) -> None:
        """Wait for a member from now on, which has all operations up to this one."""
        self.stored[member] = number

    def store(self, member: str, number: int) -> None:
        """Record how far a member is. One that nothing waits for changes nothing."""
        if member in self.stored and number > self.stored[member]:
            self.stored[member] = number
            self._reach()

    def archive(self, number: int) -> None:
        """Record how far the archive is, if it is waited for."""
        if self.archived is not None and number > self.archived:
            self.archived = number
            self._reach()

    def remove(self, member: str) -> None:
        """Wait for a member no longer."""
        if self.stored.pop(member, None) is not None:
            self._reach()

    def _reach(self) -> None:
        upto, reached = self._reached, list[T]()
        while self._waiting and (self._waiting[0][0] <= upto or self.fenced_because):
            reached.append(self._waiting.popleft()[1])
        if reached:
            self.on_reached(reached)
