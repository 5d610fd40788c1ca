"""Room on the disk that only saved state may use, so that a full disk can become empty again.

The files of a log are deleted once everything in them is finished, and that is saved. So if messages took the last
block of a disk, no consumer could ever make room for others. A file holds the room. When something else than an append
needs it, appends are refused, the file is deleted, the work is done, and the file is made again; appends are refused
until it has all its room. So blocks that become free belong to this file first, however often publishers try again.
"""

import logging
from collections.abc import Callable
from errno import ENOSPC
from os import strerror
from pathlib import Path
from threading import Condition, Lock
from typing import TypeVar

from ...log import Files, LogError, is_disk_full

logger = logging.getLogger("trio_nsq.broker")

SPARE_BYTES = 1024 * 1024
"""A state of some ten thousand unfinished messages fits in, and nobody misses it on a disk of today."""
_LEAST_PROBE_BYTES = 64 * 1024
"""With less room than this for messages, a disk is still full."""

_Result = TypeVar("_Result")


class SpareRoom:
    """The file, and whether appends may use the disk. Any thread may call any method; `use` and `look_again` wait.

    Args:
        path: The file. It is gone while the disk is too full for it.

    Attributes:
        closed_because: Why appends are refused; empty: they are not.
        shortage: The same, unless they are refused only while the room is in use.
        failed_with: What the last append, or something else, failed with, if it found no room; empty: it did not fail,
            or there is room again.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.closed_because = ""
        self.shortage = ""
        self.failed_with = ""
        self._lacking_bytes = 0  # what that append would have taken
        self._path = path
        self._probe = path.with_name(f"{path.name}.probe")
        self._files = files
        self._size = SPARE_BYTES
        self._is_whole = False
        self._reported = ""
        self._using = Lock()
        self._lock = Lock()
        self._appends_ended = Condition(self._lock)
        self._appending = 0

    def begin_append(self) -> str:
        """Keep the room from being used until `end_append`. Returns why an append is refused; then it did nothing."""
        with self._lock:
            if not self.closed_because:
                self._appending += 1
            return self.closed_because

    def end_append(self) -> None:
        """The append has succeeded, or has taken back what it wrote."""
        with self._lock:
            self._appending -= 1
            if self.closed_because:
                self._appends_ended.notify_all()

    def record_failure(self, reason: str, size: int) -> None:
        """An append of so many bytes found no room."""
        self._lacking_bytes = max(size, _LEAST_PROBE_BYTES)
        self.failed_with = reason

    @property
    def is_short(self) -> bool:
        """The disk is full, as far as is known."""
        return bool(self.shortage or self.failed_with)

    def _close(self, code: int) -> None:
        """Refuse appends, and wait for those under way."""
        with self._lock:
            self.closed_because = (
                f"cannot write to {self._path.parent}: messages are refused until {self._size} bytes are free: "
                f"{strerror(code)}"
            )
            while self._appending:
                self._appends_ended.wait()

    def use(self, work: Callable[[], _Result]) -> _Result:
        """Do something that a full disk must not prevent: if it finds no room, again in the spare room.

        Raises what `work` raises.
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
            self._give()
            try:
                return work()
            finally:
                if was_whole:
                    self._take()

    def replace(self, path: Path, content: bytes) -> None:
        """As `Files.replace`, in the spare room if there is no other. Raises OSError."""
        self.make_fit(len(content))
        self.use(lambda: self._files.replace(path, content))

    def make_fit(self, size: int) -> None:
        """Have room for a second file of this size, and more: it takes that to replace one."""
        if size + SPARE_BYTES // 2 > self._size:
            with self._using:
                self._size = max(self._size, size * 2)
                if self._is_whole:
                    self._take()

    def start(self) -> None:
        """Take the room before anything is appended, or refuse appends until it is there."""
        self._remove(self._probe)  # left by a broker that was killed
        self.look_again()

    @property
    def is_well(self) -> bool:
        """It is all there, and the disk is not full, as far as is known."""
        return self._is_whole and not self.failed_with

    def look_again(self) -> None:
        """Take the room if it is there again, and let appends go on; find out whether there is more.

        To be called when all is saved that has to be before anything is appended.
        """
        with self._using:
            if not self._is_whole:
                self._take()
            if self.failed_with and not self.closed_because and self._has_more(self._lacking_bytes):
                self.failed_with = ""

    def _has_more(self, size: int) -> bool:
        try:
            fd = self._files.create_or_empty(self._probe)
            try:
                self._files.allocate(fd, size)
            finally:
                self._files.close(fd)
                self._remove(self._probe)
        except OSError:
            return False  # the next append says why
        return True

    def _give(self) -> None:
        self._is_whole = False
        self._remove(self._path)

    def _remove(self, path: Path) -> None:
        try:
            self._files.unlink(path)
        except OSError:
            pass  # there is none, or it stays where it is

    def _take(self) -> None:
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
                self.closed_because = self.shortage = ""  # messages can be stored all the same
                self._report(f"cannot write {self._path}: {exc.strerror}: a full disk may stay full")
            self._give()  # what it got of it
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
