"""The file that messages of a topic are appended to."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ...log import Files
from ...platform.checksum import crc32
from .checkpoint import OpenFileRecord, take_lock

_TAIL_BYTES = 4096


def tail_crc(files: Files, fd: int, length: int) -> int:
    """Return the CRC-32 of the last bytes before this length."""
    size = min(length, _TAIL_BYTES)
    return crc32(files.read_fully(fd, size, length - size))


class FileCut(OSError):
    """Another program made the file shorter."""


class OutputFile:
    """A locked file. Bytes are written at `end`, and are kept if they were synced.

    Args:
        fd: The open file, which this object closes.
        record: Its state; the bytes after `record.length` are cut off before the next write.

    Attributes:
        end: Where the next bytes are written.
        synced: The bytes on stable storage.
        raw_bytes: The bytes before compression, including those that are not written yet.
        path, final, key, revision, opened_at, finishing: As in `OpenFileRecord`.

    Raises:
        OutputInUse: Another process has locked the file. Then the descriptor stays open.
    """

    def __init__(self, files: Files, fd: int, record: OpenFileRecord) -> None:
        take_lock(fd, str(record.path), "choose another folder, or put <REV> into --filename-format")
        self.path: Path = Path(record.path)
        self.final: Path = Path(record.final)
        self.key: str = record.key
        self.revision: int = record.revision
        self.opened_at: float = record.opened_at
        self.finishing: bool = record.finishing
        self.end: int = record.length
        self.synced: int = record.length
        self.raw_bytes: int = record.raw_bytes
        self._synced_raw_bytes = record.raw_bytes
        self._files = files
        self._fd = fd
        self._is_torn = True  # there may be bytes after `end`

    @property
    def is_renamed(self) -> bool:
        """Whether the file has another name until it is finished."""
        return self.path != self.final

    def append(self, parts: Sequence[bytes]) -> None:
        """Write at the end.

        Raises:
            FileCut: Another program made the file shorter.
            OSError: Not everything could be written; nothing counts as written.
        """
        self._cut_torn_end()
        size = self._files.size(self._fd)
        if size < self.end:
            self.synced = min(self.synced, size)
            raise FileCut(0, "another program made the file shorter")
        self.end = size  # another program may have appended
        self._is_torn = True
        self._files.write(self._fd, self.end, parts)
        self._is_torn = False
        self.end += sum(map(len, parts))

    def _cut_torn_end(self) -> None:
        if self._is_torn:
            self._files.truncate(self._fd, self.end)
            self._is_torn = False

    def sync(self) -> None:
        """Sync all written bytes. Raises OSError; then bytes since the last sync may be lost: see `roll_back`."""
        if self._is_torn or self.end != self.synced:
            self._cut_torn_end()
            self._files.sync(self._fd)
        self.synced = self.end
        self._synced_raw_bytes = self.raw_bytes

    def roll_back(self) -> None:
        """Remove the bytes since the last sync."""
        self.end, self.raw_bytes = self.synced, self._synced_raw_bytes
        self._is_torn = True
        try:
            if self._files.size(self._fd) > self.end:
                self._cut_torn_end()
        except OSError:
            pass  # before the next write it is tried again

    def has_name(self) -> bool:
        """Return whether the path still leads to this file: it may have been renamed, replaced or removed."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._identity()

    def is_removed(self) -> bool:
        """Return whether the file has no name at all."""
        return os.fstat(self._fd).st_nlink == 0

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def record(self) -> OpenFileRecord:
        """Return the state as of the last sync."""
        return OpenFileRecord(
            path=str(self.path),
            final=str(self.final),
            key=self.key,
            revision=self.revision,
            inode=self._identity()[1],
            length=self.synced,
            tail_crc=tail_crc(self._files, self._fd, self.synced),
            raw_bytes=self._synced_raw_bytes,
            opened_at=self.opened_at,
            finishing=self.finishing,
        )

    def close(self) -> None:
        """Close the file and release its lock."""
        self._files.close(self._fd)


def find_file(record: OpenFileRecord, files: Files) -> tuple[Path, int] | None:
    """Find the file of a checkpoint, also if it was renamed within its folder; return its path and open it.

    A file of another content is not returned: it is not ours, and must not be cut.
    """
    path = Path(record.path)
    for candidate in (path, Path(record.final), *_with_inode(path.parent, record.inode)):
        try:
            if not stat.S_ISREG(candidate.stat().st_mode):
                continue
            fd = files.open(candidate)
        except FileNotFoundError:
            continue
        status = os.fstat(fd)
        same = status.st_size >= record.length and tail_crc(files, fd, record.length) == record.tail_crc
        # A copy, as from a backup, has another inode, but only its content shows what it is.
        if same and (status.st_ino == record.inode or record.length):
            return candidate, fd
        files.close(fd)
    return None


def _with_inode(folder: Path, inode: int) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.inode() == inode]
    except FileNotFoundError:
        return []
