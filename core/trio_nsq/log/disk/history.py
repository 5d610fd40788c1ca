"""The files of a log that only an archive has: retention has deleted them from the disk.

     0                 8         12     16
    +-----------------+---------+------+------------------------------------------------------------------- - -
    | 89 NSQARS 0a    | version | crc  | base_sequence, next_sequence, size, first_ns, last_ns: for each file
    +-----------------+---------+------+------------------------------------------------------------------- - -

All integers are big-endian; the crc covers the bytes after it. The file is in the log's folder, so a topic that is
deleted and created again has another one, and a restored folder knows the same files. It is written before a file is
deleted.
"""

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeVar

from ...platform.checksum import crc32
from ..errors import LogReadError, LogWriteError, ReadWouldWaitError
from ..files import Files
from ..segment.identity import Identity
from ..segment.reader import Segment

logger: logging.Logger = logging.getLogger("trio_nsq.log")

FILE_NAME: Final = "archived"
_MAGIC: Final = b"\x89NSQARS\n"
_VERSION: Final = 1
_HEAD = Struct(">8sII")
_ENTRY = Struct(">5Q")
_MOST_BYTES: Final = 1 << 30
_BASE: Final = attrgetter("base_sequence")
_MOST_ASKED: Final = 64

_T = TypeVar("_T")

_thread = threading.local()


def with_archives(work: Callable[[], _T]) -> _T:
    """Call a function whose reads may wait for archives. Elsewhere they raise `ReadWouldWaitError` instead."""
    before, _thread.waits = _may_wait(), True
    try:
        return work()
    finally:
        _thread.waits = before


def _may_wait() -> bool:
    return getattr(_thread, "waits", False)


class ArchivedFile(NamedTuple):
    """A file that only the archive has.

    Attributes:
        base_sequence, next_sequence: Its first sequence, and the one after its last.
        size: Bytes.
        first_ns, last_ns: When its first and its last message were published, Unix nanoseconds.
    """

    base_sequence: int
    next_sequence: int
    size: int
    first_ns: int
    last_ns: int

    def bytes_from(self, sequence: int) -> int:
        """Estimate the bytes from a sequence on, without reading."""
        count = self.next_sequence - self.base_sequence  # assumes that all messages have the same size
        return (
            self.size
            * (self.next_sequence - max(self.base_sequence, min(sequence, self.next_sequence)))
            // count
        )


def read_archived(files: Files, folder: Path, disk_first_sequence: int) -> tuple[ArchivedFile, ...]:
    """Read which files of the log in a folder only the archive has: a crash may have left some on the disk.

    Raises:
        ValueError: The file is damaged.
        LogReadError: The operating system failed to read.
    """
    path = folder / FILE_NAME
    try:
        archived = decode_archived(files.content(path, _MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as exc:
        raise LogReadError(path, exc) from exc
    return tuple(file for file in archived if file.next_sequence <= disk_first_sequence)


class SegmentArchive(Protocol):
    """The archive of a broker's logs. Its methods are thread-safe."""

    def has(self, path: Path, incarnation: bytes, next_sequence: int) -> bool:
        """Whether this segment of a log, which is appended to no longer, was archived under its name."""

    def still_has(self, path: Path, incarnation: bytes, next_sequence: int) -> bool:
        """Whether the archive was seen to have this segment a moment ago. If not, it is looked for soon."""

    def open(self, folder: Path, identity: Identity, file: ArchivedFile) -> Segment | None:
        """Open an archived file of the log in a folder, in a thread. Its reads raise LogReadError.

        Returns None if the archive does not have it any more. Raises LogReadError.
        """


class History:
    """The files of one log that only the archive has.

    Args:
        folder: The log's folder.

    Attributes:
        archived: These files, the oldest first.
        size_bytes: Of all of them.
    """

    def __init__(self, files: Files, folder: Path, archive: SegmentArchive) -> None:
        self._files = files
        self._folder = folder
        self._archive = archive
        # Replaced, never changed, because readers in other threads use the old tuple.
        self.archived: tuple[ArchivedFile, ...] = ()
        self.size_bytes: int = 0
        self._archived_before = 0  # on the disk; not the last such sequence

    def load(self, disk_first_sequence: int) -> None:
        """See `read_archived`. If the file is damaged, this is logged, and what it names is not read."""
        try:
            self._use(read_archived(self._files, self._folder, disk_first_sequence))
        except ValueError:
            logger.error(
                "%s: damaged; messages that only the archive has are not read", self._folder / FILE_NAME
            )

    def first_unarchived(self, segments: Iterable[Segment], identity: Identity | None) -> Segment | None:
        """Return the first of consecutive segments, which are appended to no longer, that must not be deleted yet."""
        for segment in segments:
            if segment.next_sequence <= self._archived_before or segment.is_empty:
                continue
            if identity is None or not self._archive.has(
                segment.path, identity.incarnation, segment.next_sequence
            ):
                return segment
            self._archived_before = segment.next_sequence
        return None

    def may_delete(self, segments: Iterable[Segment], identity: Identity | None) -> bool:
        """Whether the first of these segments may be deleted now. The archive is asked about all of them.

        Somebody may have removed an object, or the folder of the archive may have been moved.
        """
        answers = [
            segment.is_empty
            or (
                identity is not None
                and self._archive.still_has(segment.path, identity.incarnation, segment.next_sequence)
            )
            for segment in islice(segments, _MOST_ASKED)
        ]
        return answers[0]

    def take(self, segment: Segment) -> Callable[[], None]:
        """Record durably that only the archive has this segment, before it is deleted. Blocks.

        Returns what makes it readable from the archive. Raises LogReadError, LogWriteError.
        """
        if segment.is_empty:
            return lambda: None
        first = next((header.timestamp_ns for header in segment.headers(0)), segment.created_ns)
        taken = ArchivedFile(
            segment.base_sequence, segment.next_sequence, segment.size, first, segment.last_ns()
        )
        return self._save((*self.archived, taken))

    def forget_before(self, sequence: int) -> Callable[[], Callable[[], None]] | None:
        """Return what forgets the files whose messages are all before a sequence, as `DiskWork`; None: none are."""
        kept = self.archived
        while kept and kept[0].next_sequence <= sequence:
            kept = kept[1:]
        return None if len(kept) == len(self.archived) else lambda: self._save(kept)

    def _save(self, archived: tuple[ArchivedFile, ...]) -> Callable[[], None]:
        path = self._folder / FILE_NAME
        try:
            self._files.replace(path, _encode(archived))
        except OSError as exc:
            raise LogWriteError(path, exc) from exc

        return lambda: self._use(archived)

    def _use(self, archived: tuple[ArchivedFile, ...]) -> None:
        self.archived = archived
        self.size_bytes = sum(file.size for file in archived)

    def file_after(self, sequence: int) -> ArchivedFile | None:
        """Return the file that holds a sequence, or the next one; None: there is none."""
        archived = self.archived
        at = max(0, bisect_right(archived, sequence, key=_BASE) - 1)
        if at < len(archived) and archived[at].next_sequence <= sequence:
            at += 1
        return archived[at] if at < len(archived) else None

    def segment_after(self, sequence: int, identity: Identity) -> Segment | None:
        """Open the file that holds a sequence, or the next one that the archive still has; None: there is none.

        Raises LogReadError; ReadWouldWaitError: this thread does not wait for archives.
        """
        while (file := self.file_after(sequence)) is not None:
            if not _may_wait():
                raise ReadWouldWaitError(self._folder)
            segment = self._archive.open(self._folder, identity, file)
            if segment is not None:
                return segment
            sequence = file.next_sequence
        return None


def _encode(archived: Sequence[ArchivedFile]) -> bytes:
    content = b"".join(_ENTRY.pack(*each) for each in archived)
    return _HEAD.pack(_MAGIC, _VERSION, crc32(content)) + content


def decode_archived(data: bytes) -> tuple[ArchivedFile, ...]:
    """Return what a file `archived` lists. Raises ValueError: it is damaged."""
    content = data[_HEAD.size :]
    if len(content) % _ENTRY.size or data[: _HEAD.size] != _HEAD.pack(_MAGIC, _VERSION, crc32(content)):
        raise ValueError("it is damaged")
    return tuple(ArchivedFile(*entry) for entry in _ENTRY.iter_unpack(content))
