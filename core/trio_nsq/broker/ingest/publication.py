"""What is published together: by one command, and, of one topic, by one write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..log.records import HEADER_BYTES, MAX_RECORD_BYTES, MAX_RECORD_MESSAGES
from ..protocol import MessageSet
from .errors import PublishRefused


@dataclass(slots=True)
class Publication:
    """What one command publishes.

    Attributes:
        sets: The messages, in order, at least one: sets of any size. Each takes at least one record of the log, unless
            the publication has only one, and shares its record with others. `SetsForRecords` makes sets that fill one.
        due_ns: When it may be delivered, Unix nanoseconds; 0: at once.
        metadata: What the broker has to know of it besides, see `record_metadata.py`; empty: nothing.
    """

    sets: Sequence[MessageSet]
    due_ns: int = 0
    metadata: bytes = b""

    @property
    def count(self) -> int:
        """How many messages, at least 1."""
        return sum([len(messages.sizes) for messages in self.sets])

    @property
    def record_bytes(self) -> int:
        """What it takes in the log at most: if it shares its record with none."""
        size = len(self.metadata)
        for messages in self.sets:
            own = HEADER_BYTES + len(messages.data)
            if own > MAX_RECORD_BYTES or len(messages.sizes) > MAX_RECORD_MESSAGES:
                # Of two neighbouring records that have fewer messages than they may, one is more than half full.
                own += HEADER_BYTES * (
                    len(messages.sizes) // MAX_RECORD_MESSAGES + 2 * own // MAX_RECORD_BYTES
                )
            size += own
        return size


class SetsForRecords:
    """Gathers messages, in order, into sets that fit one record each, and that are as large as they may be.

    A million messages that are taken apart here in steps need not be when they are written.
    """

    def __init__(self) -> None:
        self._sets: list[MessageSet] = []
        self._last: list[MessageSet] = []
        self._count = self._bytes = 0

    def add(self, messages: MessageSet) -> None:
        """Add some messages behind the others."""
        for piece in messages.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES):
            self._count += len(piece.sizes)
            self._bytes += len(piece.data)
            if self._last and (self._count > MAX_RECORD_MESSAGES or self._bytes > MAX_RECORD_BYTES):
                self._end_last()
                self._count, self._bytes = len(piece.sizes), len(piece.data)
            self._last.append(piece)

    def take(self) -> list[MessageSet]:
        """The sets; none if there are no messages."""
        if self._last:
            self._end_last()
        return self._sets

    def _end_last(self) -> None:
        self._sets.append(MessageSet.join(self._last))
        self._last = []


class Group:
    """Publications of one topic that will be stored by one write.

    Attributes:
        publications: What to store, in order.
        size: Bytes of their records, if none shares its own.
        on_complete: Called when they are stored, or are not, in order.
    """

    __slots__ = ("on_complete", "publications", "size")

    def __init__(self) -> None:
        self.publications: list[Publication] = []
        self.size = 0
        self.on_complete: list[Callable[[PublishRefused | None], None]] = []

    @property
    def messages(self) -> int:
        """How many they are."""
        return sum([publication.count for publication in self.publications])

    def complete(self, error: PublishRefused | None) -> None:
        """Tell all who published that it is stored, or why not."""
        for on_complete in self.on_complete:
            on_complete(error)
