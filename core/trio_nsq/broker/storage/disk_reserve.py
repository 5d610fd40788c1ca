"""Disk reserve: disk space reserved for saved state, so that the broker can free space on a full disk.

The broker deletes a log's file after all its messages are finished and a checkpoint says so. If messages took the last
block of a disk, no checkpoint could be written, and nothing could be deleted. So a file reserves the room. When other
work than an append needs the room, the broker refuses appends, deletes the file, does the work, and creates the file
again. It refuses appends until the file has its full size, so freed blocks go to this file before producers get any.
"""

import logging
from collections.abc import Callable
from errno import ENOSPC
from os import strerror
from pathlib import Path
from threading import Condition, Lock
from typing import NamedTuple, TypeVar

from ...log import Files, LogError, is_disk_full
from ..errors import PublishRefused

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

RESERVE_BYTES = 1024 * 1024
"""Room for a state with about 10,000 unfinished messages."""
_MIN_PROBE_BYTES = 64 * 1024
"""A disk with less free space than this counts as full."""

_SHORT_SHARE = 10
_SHORT_BYTES = 1024**3
"""The disk is short of space with less than 1/10 of it free, and less than this."""

_Result = TypeVar("_Result")


class StorageFailure(NamedTuple):
    """Why the last message could not be stored.

    Attributes:
        is_full: The disk has too little room, for this message at least. Otherwise it fails.
    """

    reason: str
    is_full: bool


def probe_beside(reserve: Path) -> Path:
    """Return the file for `can_allocate` of a data folder."""
    return reserve.with_name(f"{reserve.name}.probe")


def can_allocate(files: Files, probe: Path, size: int) -> bool:
    """Whether a file of this size can be made now. Blocks."""
    try:
        fd = files.create_or_empty(probe)
        try:
            files.allocate(fd, size)
        finally:
            files.close(fd)
            files.unlink(probe)
    except OSError:
        return False
    return True


class DiskReserve:
    """The reserved file, and whether appends may use the disk. Thread-safe; `use` and `reclaim` block.

    Args:
        path: The file. It does not exist while the disk is too full for it.

    Attributes:
        closed_because: Why appends are refused; empty: they are allowed.
        shortage: The same, but empty if appends are refused only while the room is in use.
        failed_with: The error of the last append or other write that found the disk full; empty: none failed, or there
            is room again.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.closed_because: str = ""
        self.shortage: str = ""
        self.failed_with: str = ""
        self._lacking_bytes = 0  # size of that append
        self._has_little_space = False
        self._path = path
        self._probe = probe_beside(path)
        self._files = files
        self._size = RESERVE_BYTES
        self._is_whole = False
        self._reported = ""
        self._using = Lock()
        self._lock = Lock()
        self._appends_ended = Condition(self._lock)
        self._appending = 0

    def begin_append(self) -> str:
        """Start an append, which delays the use of the room until `end_append`.

        Returns:
            Why the append is refused; then `end_append` must not be called. Empty: it may proceed.
        """
        with self._lock:
            if not self.closed_because:
                self._appending += 1
            return self.closed_because

    def end_append(self) -> None:
        """End an append: it has succeeded, or has removed its partial write."""
        with self._lock:
            self._appending -= 1
            if self.closed_because:
                self._appends_ended.notify_all()

    def append(self, work: Callable[[], _Result]) -> _Result:
        """Do an append, which takes space on the disk. Raises PublishRefused if it is refused, and as `work` does."""
        if reason := self.begin_append():
            raise PublishRefused(reason)
        try:
            return work()
        finally:
            self.end_append()

    def record_failure(self, reason: str, size: int) -> None:
        """Record that an append of `size` bytes found the disk full."""
        self._lacking_bytes = max(size, _MIN_PROBE_BYTES)
        self.failed_with = reason

    @property
    def is_short(self) -> bool:
        """Whether the disk is full, or little of it was free at the last `measure`."""
        return bool(self.shortage or self.failed_with or self._has_little_space)

    def measure(self) -> None:
        """Note how much of the disk is free. Small appends may succeed although larger ones would not. Blocks."""
        try:
            space = self._files.space(self._path.parent)
        except OSError:
            return
        self._has_little_space = space.free_bytes < min(space.total_bytes // _SHORT_SHARE, _SHORT_BYTES)

    def _close(self, code: int) -> None:
        """Refuse appends, and wait for those in progress."""
        with self._lock:
            self.closed_because = (
                f"cannot write to {self._path.parent}: messages are refused until {self._size} bytes are free: "
                f"{strerror(code)}"
            )
            while self._appending:
                self._appends_ended.wait()

    def use(self, work: Callable[[], _Result]) -> _Result:
        """Do work that must succeed on a full disk. If it finds the disk full, repeats it in the disk reserve.

        Raises the exceptions of `work`.
        """
        try:
            return work()
        except (OSError, LogError) as exc:
            if not is_disk_full(exc):
                raise
        if not self.failed_with:
            self.record_failure(f"cannot write to {self._path.parent}: {strerror(ENOSPC)}", 0)
        with self._using:
            was_whole = self._is_whole
            self._close(ENOSPC)
            self._release()
            try:
                return work()
            finally:
                if was_whole:
                    self._reserve()

    def replace(self, path: Path, content: bytes) -> None:
        """As `Files.replace`, in the disk reserve if the disk is full. Raises OSError."""
        self.make_fit(len(content))
        self.use(lambda: self._files.replace(path, content))

    def make_fit(self, size: int) -> None:
        """Enlarge the room so that a file of this size can be replaced, which needs space for a second one."""
        if size + RESERVE_BYTES // 2 > self._size:
            with self._using:
                self._size = max(self._size, size * 2)
                if self._is_whole:
                    self._reserve()

    def start(self) -> None:
        """Reserve the room before any append, or refuse appends until that succeeds."""
        self._remove(self._probe)  # left by a broker that was killed
        self.reclaim()

    @property
    def is_well(self) -> bool:
        """Whether the room is reserved and the disk is not full, as far as known."""
        return self._is_whole and not self.failed_with

    def reclaim(self) -> None:
        """Reserve the room again if the disk has space, allow appends, and probe for more space.

        Call it after saving all state that must be saved before appends continue.
        """
        with self._using:
            if not self._is_whole:
                self._reserve()
            if self.failed_with and not self.closed_because and self._has_more(self._lacking_bytes):
                self.failed_with = ""

    def _has_more(self, size: int) -> bool:
        return can_allocate(self._files, self._probe, size)  # the next append reports the error

    def _release(self) -> None:
        self._is_whole = False
        self._remove(self._path)

    def _remove(self, path: Path) -> None:
        try:
            self._files.unlink(path)
        except OSError:
            pass  # it does not exist, or cannot be removed

    def _reserve(self) -> None:
        try:
            fd = self._open()
            try:
                self._size = max(self._size, self._files.size(fd))
                self._files.allocate(fd, self._size)
            finally:
                self._files.close(fd)
        except OSError as exc:
            if is_disk_full(exc):
                self._close(exc.errno or ENOSPC)
                self.shortage = self.closed_because
                self._report(self.shortage)
            else:
                self.closed_because = self.shortage = ""  # messages can still be stored
                self._report(
                    f"cannot write {self._path}: {exc.strerror}: without this disk reserve, a full disk may stay full"
                )
            self._release()  # a partly allocated file
        else:
            self._is_whole = True
            self.closed_because = self.shortage = ""
            self._report("")

    def _open(self) -> int:
        try:
            return self._files.open(self._path)
        except FileNotFoundError:
            return self._files.create(self._path)

    def _report(self, text: str) -> None:
        if text and text != self._reported:
            logger.error("%s", text)
        elif self._reported and not text:
            logger.info("%s: messages are accepted again", self._path.parent)
        self._reported = text
