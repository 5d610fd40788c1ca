"""The interface of a log, which `DiskLog` and `MemoryLog` implement."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .records import RawRecord, RecordBatch, RecordHeader, UnsyncedPart

READ_BYTES = 256 * 1024
"""The default size of a read: large enough that a system call costs little per message."""
PREFETCH_BYTES = 1024 * 1024
"""Size of the read-ahead after a reader had to wait for the disk."""


class LogFileFacts(Protocol):
    """One file of a log.

    Attributes:
        base_sequence, next_sequence: Its first sequence, and the one after its last.
        size: Bytes.
        created_ns: When it was created, Unix nanoseconds.
        first_ns: When its first message was published, Unix nanoseconds; 0 if there is none. Only for the last file.
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
        """Return when its last readable message was published, Unix nanoseconds; 0 if there is none.

        Reads the file if the time is not known yet. Raises LogReadError.
        """


class ArchivedFileFacts(Protocol):
    """One file that only an archive has. Attributes as of `LogFileFacts`; `last_ns` of its last message."""

    @property
    def base_sequence(self) -> int: ...
    @property
    def next_sequence(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def first_ns(self) -> int: ...
    @property
    def last_ns(self) -> int: ...


class LogFileStart(Protocol):
    """As `LogFileFacts`."""

    @property
    def base_sequence(self) -> int: ...


class TimedLog(Protocol):
    """The part of a log that tells when messages were published. Methods as of `Log`."""

    @property
    def first_sequence(self) -> int: ...
    @property
    def next_sequence(self) -> int: ...
    @property
    def files(self) -> Sequence[LogFileStart]: ...
    @property
    def archived_files(self) -> Sequence[ArchivedFileFacts]: ...
    def headers(self, sequence: int) -> Iterator[RecordHeader]: ...


DiskWork = Callable[[], Callable[[], None]]
"""Work for the disk, made in the log's thread. Any thread may call it: it changes no log, and blocks. The log's thread
then calls what it returns, which changes the log. Raises LogError: nothing is to be changed."""


class Rotation(Protocol):
    """The beginning of a new file of a log, in three steps.

    The log's thread calls `use`. Any thread may call the others, which change no log and block.
    """

    def create(self) -> None:
        """Create the file. Raises LogError: the other steps must not follow."""

    def use(self) -> None:
        """Let the next writes go to it."""

    def finish(self) -> None:
        """Save what belongs to the file before, while the next one is written to. Logs its errors; may be left out."""


class NothingToRotate:
    """The `Rotation` of a log without files."""

    def create(self) -> None:
        """Nothing to do."""

    def use(self) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        """Nothing to do."""


class SyncPoint(Protocol):
    """Where the writes of a log end: a sync that begins later makes them stable. It does not change."""

    def sync(self) -> None:
        """Return when all writes up to here are on stable storage. Any thread may call it; it changes no log.

        Raises:
            LogWriteError: They are not.
        """


class NothingToSync:
    """The `SyncPoint` of a log without a file."""

    def sync(self) -> None:
        """Nothing to do."""


class Log(Protocol):
    """The messages of one topic, by sequence.

    One thread has the log, and only it changes the log. Others may read, do `DiskWork`, and sync to a `SyncPoint`.
    Readers see messages only after the commit. A broker that acknowledges only messages on stable storage writes,
    syncs, commits, acknowledges and delivers, in this order.
    """

    @property
    def incarnation(self) -> bytes | None:
        """16 random bytes that no other log has; None before the first message. A copy of the folder has the same."""

    @property
    def first_sequence(self) -> int:
        """The sequence of the oldest message; equal to `next_sequence` if there is none."""

    @property
    def disk_first_sequence(self) -> int:
        """The sequence of the oldest message that can be read without an archive; as `first_sequence` otherwise."""

    @property
    def archived_files(self) -> Sequence[ArchivedFileFacts]:
        """The files that only an archive has, the oldest first: messages before `disk_first_sequence`.

        Reads of them raise ReadWouldWaitError, except in threads that wait for archives.
        """

    @property
    def archived_bytes(self) -> int:
        """The size of these files."""

    @property
    def discardable_before(self) -> int:
        """Files that end at this sequence or before can be discarded: an archive has them, or there is no archive."""

    @property
    def next_sequence(self) -> int:
        """The sequence after the last committed message."""

    @property
    def written_sequence(self) -> int:
        """The sequence of the next message to write; equal to `next_sequence` if everything is committed."""

    @property
    def writes(self) -> int:
        """Number of successful writes since the log was opened; never decreases."""

    @property
    def failed_syncs(self) -> int:
        """How many syncs have failed since the log was opened. The kernel may have dropped what they were to store."""

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that the next sync stores."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def files(self) -> Sequence[LogFileFacts]:
        """Its files, the oldest first; none for a log in memory. Messages are appended to the last."""

    def bytes_from(self, sequence: int) -> int:
        """Estimate the bytes from `sequence` on, without reading."""

    def last_bytes(self, size: int) -> int:
        """Estimate the sequence from which on the log has at most `size` bytes, without reading."""

    def needs_rotation(self, size: int) -> bool:
        """Whether a write of `size` bytes needs a new file first: see `rotation`."""

    @property
    def wants_sync(self) -> bool:
        """Whether to sync now even if no schedule asks for it: much is unsynced, or the next file must wait for it."""

    def rotation(self) -> Rotation:
        """Begin a new file for the next writes.

        All writes must be synced, so that only the last file can be torn, and committed, and none may come before
        `Rotation.use`.
        """

    def write(self, batches: Sequence[RecordBatch]) -> None:
        """Write batches at the end; the first begins at `written_sequence`.

        A crash of the machine may lose them until the next sync. If `needs_rotation`, use `rotation` before.

        Raises:
            LogWriteError: No batch is stored, and the log is unchanged. A crash can bring the batches back while
                `has_unsynced_cut`.
            ValueError: The batches do not begin at `written_sequence`, or have gaps.
        """

    def commit(self, sequence: int) -> None:
        """Make messages before this sequence, at which a write ended, visible to readers."""

    def rollback(self) -> None:
        """Remove the uncommitted writes. Not during a sync.

        A crash can bring them back while `has_unsynced_cut`.
        """

    @property
    def has_unsynced_cut(self) -> bool:
        """Whether a crash can bring back what was not stored: a failed write, or what `rollback` removed.

        Their removal failed, then `finish_cut` tries again; or it needs a sync.
        """

    def finish_cut(self) -> None:
        """Remove what an earlier attempt failed to remove, and all that the log has written ahead.

        Raises:
            LogWriteError: It is still there.
        """

    def pending_wal(self) -> UnsyncedPart | None:
        """Return the uncommitted writes that no write-ahead log has, see `mark_in_wal`. Not during a sync.

        Returns:
            None if a write-ahead log cannot take them: the log must be synced itself. `size` is 0 if there are none.
        """

    def mark_in_wal(self) -> None:
        """Record that a write-ahead log has what `pending_wal` returned last; without a write in between."""

    def append(self, batches: Sequence[RecordBatch], *, sync: bool) -> None:
        """Write batches, sync if requested, and commit. All earlier writes must be committed.

        Args:
            batches: At least one.
            sync: Return only when the batches are on stable storage.

        Raises:
            LogWriteError, ValueError: As `write`.
        """

    def sync_point(self) -> SyncPoint:
        """Return where the writes end, for a sync in a thread. Pass its result to `end_sync` before the next one."""

    def end_sync(self, point: SyncPoint, error: Exception | None) -> Exception | None:
        """Record the result of a sync.

        Returns:
            Why the writes up to the point are not on stable storage; None if they are. If a sync failed after the point
            was made, they are not, whatever the result: the kernel may have dropped them.
        """

    def read(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        """Read the undamaged batches from the one that holds `sequence` on, in order.

        Returns at least one batch if there is one, and up to `max_bytes` of records; fewer at the end of a file, or if
        the records are many and small. The first begins after `sequence` if messages are missing there, damaged or
        discarded. Empty at the end of the log, or before damage that reaches to the end.

        Raises:
            LogReadError: The operating system failed to read.
        """

    def read_cached(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RecordBatch]:
        """As `read`, without waiting for the disk; may return fewer batches. Only for the event loop's thread.

        Raises:
            ReadWouldWaitError: The first batch is not in memory, or must be located on the disk.
            LogReadError: The log was closed.
        """

    def prefetch(self, sequence: int) -> None:
        """Start reading ahead from `sequence`, at which a `read` has just ended, without waiting."""

    def read_raw(self, sequence: int, max_bytes: int = READ_BYTES) -> list[RawRecord]:
        """As `read`, encoded as on disk. A payload may not be a valid message set. Raises LogReadError."""

    def headers(self, sequence: int) -> Iterator[RecordHeader]:
        """Yield the headers of all batches from the one that holds `sequence` on, except those discarded meanwhile.

        Raises:
            LogReadError: The operating system failed to read.
        """

    @property
    def has_carried_forward(self) -> bool:
        """Whether there is a carried-forward segment."""

    def read_carried_forward(self, sequence: int) -> list[RecordBatch]:
        """Read the record with this message from the carried-forward segment; empty if missing or damaged.

        Call it after `read` did not return the message: a message is carried forward before its file is discarded.

        Raises:
            LogReadError: The operating system failed to read.
        """

    def carry_forward(
        self, sequences: Sequence[int], max_bytes: int, keeps_metadata: Callable[[bytes], bool] = bool
    ) -> Callable[[], Callable[[], None] | None]:
        """Durably replace the carried-forward segment by one with these messages. Their files can then be discarded.

        Args:
            sequences: Ascending. If empty, the carried-forward segment is removed.
            max_bytes: Maximum size of the records that hold the messages.
            keeps_metadata: Whether a record with this metadata is copied whole. Otherwise its messages are copied one
                by one, without the metadata.

        Returns:
            As `DiskWork`, which returns None if the records are larger; nothing is to be changed then.
        """

    def discard_before(self, sequence: int) -> None:
        """Discard messages before `sequence`, as far as that is cheap, and no others. Blocks. Raises LogWriteError."""

    def discard_first(self, sequence: int) -> DiskWork | None:
        """Discard the first file, as `discard_before`; None if it must be kept, or is not archived yet."""

    def forget_archived(self, sequence: int) -> DiskWork | None:
        """Forget the archived files that end at this sequence or before; None: there are none."""

    def close(self) -> None:
        """Close the files. The log must not be used afterwards."""


def check_order(batches: Sequence[RecordBatch], next_sequence: int) -> None:
    """Raise ValueError unless these batches continue a log that ends before `next_sequence`."""
    for batch in batches:
        if batch.base_sequence != next_sequence:
            raise ValueError(f"a batch begins at sequence {batch.base_sequence}, not at {next_sequence}")
        next_sequence = batch.next_sequence


def sequence_at(log: TimedLog, timestamp_ns: int) -> int:
    """Return the first sequence that was published at this time or later; the end of the log if there is none.

    Bisects over files and then over sequences, because timestamps ascend. If the clock was set back, they do not, and
    several sequences can match: a message published at this time or later that follows a readable one published
    earlier. Then this returns any of them.

    Raises:
        LogReadError: The operating system failed to read.
    """

    def is_late(sequence: int) -> bool:
        if sequence in known_ns:
            return known_ns[sequence] >= timestamp_ns
        header = next(log.headers(sequence), None)
        return header is None or header.timestamp_ns >= timestamp_ns

    first, end = log.first_sequence, log.next_sequence
    known_ns = {file.base_sequence: file.first_ns for file in log.archived_files}
    # Finding the beginning of a file does not need its index, which may not be in memory.
    files = (*log.archived_files, *log.files)
    starts = [file.base_sequence for file in files if first < file.base_sequence < end]
    late = bisect_left(starts, True, key=is_late)
    low = starts[late - 1] if late else first
    high = starts[late] if late < len(starts) else end
    return low + bisect_left(range(low, high), True, key=is_late)
