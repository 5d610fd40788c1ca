"""What the broker needs of a log."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .records import RawRecord, RecordBatch, RecordHeader

READ_BYTES = 256 * 1024
"""How much a reader asks for at a time: large enough that a system call costs little per message."""
READ_SOON_BYTES = 1024 * 1024
"""So much is read in advance where a reader has to wait for the disk."""


class LogFileFacts(Protocol):
    """One file of a log.

    Attributes:
        base_sequence, next_sequence: Where it begins, and where it ends.
        size: Bytes.
        created_ns: When it was begun, Unix nanoseconds.
        first_ns: When the first message was published, Unix nanoseconds; 0 if there is none. Of the last file only.
    """

    @property
    def base_sequence(self) -> int: ...
    @property
    def next_sequence(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def created_ns(self) -> int: ...
    @property
    def first_ns(self) -> int: ...

    def last_ns(self) -> int:
        """When the last readable message was published, Unix nanoseconds; 0 if there is none.

        Reads where it is not known yet. Raises LogReadError.
        """
        ...


class Log(Protocol):
    """One topic's messages, by sequence.

    One caller writes, commits and takes back; meanwhile others may read, sync and discard. What is written is numbered,
    and readers see none of it before it is committed: a broker that acknowledges only what is on stable storage writes,
    syncs, commits, acknowledges and delivers, in this order.
    """

    @property
    def first_sequence(self) -> int:
        """The oldest sequence still kept; equal to `next_sequence` when there is none."""
        ...

    @property
    def next_sequence(self) -> int:
        """The sequence after the last committed message."""
        ...

    @property
    def written_sequence(self) -> int:
        """The sequence that the next written message gets; the same as `next_sequence` when all is committed."""
        ...

    @property
    def writes(self) -> int:
        """How often something was written since the log was opened: it never goes back. Any thread may look."""
        ...

    @property
    def size_bytes(self) -> int:
        """What the log occupies."""
        ...

    @property
    def files(self) -> Sequence[LogFileFacts]:
        """Its files, the oldest first; none for a log in memory. The last is the one that grows."""
        ...

    def bytes_from(self, sequence: int) -> int:
        """How many bytes lie from `sequence` on: about, for it is told without reading."""
        ...

    def last_bytes(self, size: int) -> int:
        """The sequence from which on about so many bytes lie, or fewer: told without reading."""
        ...

    def begins_file(self, size: int) -> bool:
        """Whether so many bytes of records need a new file, which has to wait for the disk: see `begin_file`."""
        ...

    def begin_file(self) -> None:
        """Begin a new file: what is written next goes there. All that is written must be committed.

        What was written before is on stable storage then. Waits for the disk; nothing is written meanwhile.

        Raises:
            LogWriteError: It has not begun.
        """
        ...

    def write(self, batches: Sequence[RecordBatch]) -> None:
        """Write batches behind all that is written, the first of which starts at `written_sequence`.

        A crash of the machine may lose them until the next `sync`. If `begins_file`, call `begin_file` before.

        Raises:
            LogWriteError: None of them is stored, and the log is as it was. Should the broker die before another
                write succeeds, they may be found stored after all.
            ValueError: They do not begin at `written_sequence`, or have gaps.
        """
        ...

    def commit(self, sequence: int) -> None:
        """Let readers see what is written below a sequence, where a write ended."""
        ...

    def take_back(self) -> None:
        """Forget all that is written and not committed. Not while a sync is under way.

        If the disk refuses, the bytes stay in the file until the next write: a broker that dies before may find them.
        """
        ...

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        """Write batches, sync if asked, and commit. All that was written before must be committed.

        Args:
            batches: At least one.
            sync: Return only when they are on stable storage.

        Raises:
            LogWriteError, ValueError: As `write`.
        """
        ...

    def sync(self) -> None:
        """Return when all that was written before the call is on stable storage.

        Raises:
            LogWriteError: It is not yet. What is committed remains readable, and the next sync makes up for it.
        """
        ...

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        """The batches from the one that holds `sequence` on, in order, undamaged ones only.

        At least one if there is one, then more while they fit in `max_bytes` of records; fewer where a file ends, or
        when they are many and small.
        The first begins after `sequence` if messages are missing there (damaged, or no longer kept). Empty when
        nothing is left: at the end of the log, or before damage that reaches up to it.

        Raises:
            LogReadError: The operating system refused.
        """
        ...

    def read_now(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        """The same without waiting for the disk; maybe fewer. Only for the thread that runs the event loop.

        Raises:
            ReadWouldWaitError: The first of them is not in memory, or it has to be found on the disk.
            LogReadError: The log was closed.
        """
        ...

    def read_soon(self, sequence: int) -> None:
        """Let the machine begin to read on from `sequence`, where a `read` has just ended, without waiting for it."""
        ...

    def read_raw(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RawRecord]:
        """The same as they lie on disk. They may turn out to be no sets of messages. Raises LogReadError."""
        ...

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        """The headers of all batches from the one that holds `sequence` on, but for what is discarded meanwhile.

        Raises:
            LogReadError: The operating system refused.
        """
        ...

    def roll(self) -> None:
        """Begin a new file, so that the last one can be discarded in its time; nothing else may append meanwhile.

        Raises:
            LogWriteError: It has not begun.
        """
        ...

    @property
    def has_carried_forward(self) -> bool:
        """Whether any message was carried forward and is still kept."""
        ...

    def read_carried_forward(self, sequence: int) -> list[RecordBatch]:
        """The record with this message that was carried forward; empty if it was not, or is damaged.

        Look here when `read` has not got the message: it is carried forward before the file that has it goes.

        Raises:
            LogReadError: The operating system refused.
        """
        ...

    def carry_forward(
        self, sequences: Sequence[int], max_bytes: int, keeps_metadata: Callable[[bytes], bool] = bool
    ) -> bool:
        """Copy messages aside, durably, so that the files that hold them may be discarded.

        What was carried forward before and is not among them is forgotten.

        Args:
            sequences: Ascending. Without any, all that was carried forward is forgotten.
            max_bytes: Of the records that hold them.
            keeps_metadata: Whether metadata goes with its messages, all of them then; else they go alone, without it.

        Returns:
            False if they would be more bytes; nothing is done then.

        Raises:
            LogError: The operating system refused; nothing is done then.
        """
        ...

    def discard_before(self, sequence: int) -> None:
        """Allow everything below `sequence` to go; as much as is convenient does."""
        ...

    def close(self) -> None:
        """Give the files back. Nothing else may be called afterwards."""
        ...


def check_order(batches: Sequence[RecordBatch], next_sequence: int) -> None:
    """Raise ValueError unless these batches continue a log that ends before `next_sequence`."""
    for batch in batches:
        if batch.base_sequence != next_sequence:
            raise ValueError(f"a batch begins at sequence {batch.base_sequence}, not at {next_sequence}")
        next_sequence = batch.next_sequence
