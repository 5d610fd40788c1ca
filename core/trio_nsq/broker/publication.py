"""What is published together: by one command, and, of one topic, by one write."""

from collections.abc import Callable
from dataclasses import dataclass

from ..log.records import HEADER_BYTES, MAX_RECORD_BYTES, MAX_RECORD_MESSAGES
from ..protocol import MessageSet
from .errors import PublishRefused

_ONE_RECORD_BYTES = min(5 * MAX_RECORD_MESSAGES, MAX_RECORD_BYTES)
"""So few bytes are one record, however small the messages."""


@dataclass(slots=True)
class Publication:
    """What one command publishes.

    Attributes:
        messages: A set of messages.
        due_ns: When it may be delivered, Unix nanoseconds; 0: at once.
        note: What the broker has to know of it besides, see `note.py`; empty: nothing.
    """

    messages: MessageSet
    due_ns: int = 0
    note: bytes = b""

    @property
    def record_bytes(self) -> int:
        """What it takes in the log at most: if it shares its record with none."""
        size = HEADER_BYTES + len(self.messages.data) + len(self.note)
        if size > _ONE_RECORD_BYTES:
            # Of two neighbouring records that have fewer messages than they may, one is more than half full.
            size += HEADER_BYTES * (len(self.messages) // MAX_RECORD_MESSAGES + 2 * size // MAX_RECORD_BYTES)
        return size


class Group:
    """Publications of one topic that will be stored by one write.

    Attributes:
        publications: What to store, in order.
        size: Bytes of their records, if none shares its own.
        then: Whom to tell, in order.
    """

    __slots__ = ("publications", "size", "then")

    def __init__(self) -> None:
        self.publications: list[Publication] = []
        self.size = 0
        self.then: list[Callable[[PublishRefused | None], None]] = []

    @property
    def messages(self) -> int:
        """How many they are."""
        return sum([len(publication.messages) for publication in self.publications])

    def finish(self, error: PublishRefused | None) -> None:
        """Tell all who published that it is stored, or why not."""
        for then in self.then:
            then(error)
