"""What the broker needs of a log."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from .records import RecordBatch, RecordHeader

READ_BYTES = 256 * 1024
"""How much a reader asks for at a time: large enough that a system call costs little per message."""


class Log(Protocol):
    """One topic's messages, by sequence. One caller appends at a time; others may read meanwhile."""

    @property
    def first_sequence(self) -> int:
        """The oldest sequence still kept; equal to `next_sequence` when there is none."""
        ...

    @property
    def next_sequence(self) -> int:
        """The sequence the next message will get."""
        ...

    @property
    def size_bytes(self) -> int:
        """What the log occupies."""
        ...

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        """Store batches, the first of which starts at `next_sequence`, each where the one before it ended.

        Args:
            batches: At least one.
            sync: Return only when they are on stable storage.

        Raises:
            LogWriteError: None of them is stored, and the log is as it was.
        """
        ...

    def sync(self) -> None:
        """Return when all that was appended is on stable storage. Raises LogWriteError."""
        ...

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        """The batches from the one that holds `sequence` on, in order, undamaged ones only.

        At least one if there is one, then more while they fit in `max_bytes` of records. The first begins after
        `sequence` if messages are missing there (damaged, or no longer kept). Empty at the end of the log.

        Raises:
            LogReadError: The operating system refused.
        """
        ...

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        """The headers of all batches from the one that holds `sequence` on. Raises LogReadError."""
        ...

    def discard_before(self, sequence: int) -> None:
        """Allow everything below `sequence` to go; as much as is convenient does."""
        ...

    def close(self) -> None:
        """Give the files back. Nothing else may be called afterwards."""
        ...
