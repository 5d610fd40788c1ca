"""The newest file operations of a leader, numbered, for the members that follow it."""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from ..platform.compiled import mypyc_attr
from .journal import Position
from .operations import Kind, encode, split


class FormerOperations(NamedTuple):
    """What a new leader knows of the operations of the leader before, which it followed.

    Attributes:
        position: All operations up to this one are in its folder.
        newest: The last of them, in order, as `encode` makes them; other followers may lack them.
    """

    position: Position
    newest: Sequence[bytes]


class TooFarBehind(Exception):
    """Operations that a member lacks are no longer kept: it must catch up anew."""


@mypyc_attr(allow_interpreted_subclasses=True)  # a test delays an operation
class OperationStream:
    """The operations of one epoch, as bytes. Thread-safe.

    Args:
        most_bytes: How many bytes of operations are kept. A member that lacks older ones has lost its place.
        former: Their numbers go on after these; None: they begin with 1.

    Attributes:
        last_number: The number of the newest operation; 0: none yet.
        former: The position of `former`.
        on_append: Each is called after each operation, in the thread that added it; must not block.
    """

    def __init__(self, most_bytes: int, former: FormerOperations | None = None) -> None:
        self.last_number: int = 0
        self.former: Position | None = None
        self.on_append: list[Callable[[], None]] = []
        self._most_bytes = most_bytes
        self._lock = Lock()
        # The size of all up to this one, and its pieces.
        self._operations: deque[tuple[int, Sequence[bytes]]] = deque()
        self._bytes = self._dropped_bytes = 0
        if former is not None:
            self.former = former.position
            self.last_number = former.position.number
            for some in former.newest:
                for operation in split(some):
                    self._bytes += len(operation)
                    self._operations.append((self._bytes, (operation,)))

    def append(
        self, kind: Kind, path: bytes, position: int = 0, to: bytes = b"", data: Sequence[bytes] = ()
    ) -> None:
        """Add an operation. Operations of one file must be added in the order in which they are done."""
        with self._lock:
            number = self.last_number + 1
            pieces = encode(number, kind, path, position, to, data)
            self._bytes += sum(map(len, pieces))
            self._operations.append((self._bytes, pieces))
            while self._bytes - self._dropped_bytes > self._most_bytes:
                self._dropped_bytes = self._operations.popleft()[0]
            self.last_number = number
        for call in self.on_append:
            call()

    def forget(self, number: int) -> None:
        """Keep operations up to this one no longer."""
        with self._lock:
            while self._operations and self._first_kept <= number:
                self._dropped_bytes = self._operations.popleft()[0]

    @property
    def kept_bytes(self) -> int:
        """How many bytes are kept."""
        return self._bytes - self._dropped_bytes

    def bytes_after(self, number: int) -> int:
        """Return the size of all operations after this one; only of those that are kept, if they are not all."""
        with self._lock:
            return self._bytes - self._end_of(number)

    def _end_of(self, number: int) -> int:
        """The size of all operations up to this one; of those that are dropped, if it is one of them."""
        first = self._first_kept
        return self._operations[number - first][0] if number >= first else self._dropped_bytes

    def has_after(self, number: int) -> bool:
        """Whether all operations after this one are kept."""
        with self._lock:
            return self._first_kept <= number + 1 <= self.last_number + 1

    @property
    def _first_kept(self) -> int:
        return self.last_number - len(self._operations) + 1

    def after(self, number: int, most_bytes: int) -> tuple[int, list[bytes]]:
        """Return the operations after a number, in order: at least one if there is any, and about this many bytes.

        Returns:
            The number of the last one, and their pieces.

        Raises:
            TooFarBehind: Not all of them are kept.
        """
        found: list[bytes] = []
        with self._lock:
            first = self._first_kept
            if number + 1 < first:
                raise TooFarBehind
            index, upto = number + 1 - first, self._end_of(number) + most_bytes
            end = upto - most_bytes
            while index < len(self._operations) and (not found or end < upto):
                end, pieces = self._operations[index]
                found += pieces
                index += 1
            return first + index - 1, found
