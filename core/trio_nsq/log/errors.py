"""What can go wrong with a log. All derive from `NSQError` and name the file."""

from errno import EAGAIN, EDQUOT, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.errors import NSQError

if TYPE_CHECKING:
    from .segment.format import FileHeader


class LogError(NSQError):
    """Base of the log's errors."""


class LogWriteError(LogError):
    """The operating system refused a write or a sync; nothing of what was to be appended is in the log.

    Attributes:
        errno: The operating system's number; None if it gave none.
    """

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(f"cannot write {path}: {cause.strerror or cause}")
        self.path = path
        self.errno = cause.errno


class LogReadError(LogError):
    """The operating system refused a read.

    Attributes:
        errno: The operating system's number; None if it gave none.
        reason: What it says.
    """

    def __init__(self, path: Path, cause: OSError) -> None:
        self.path = path
        self.errno = cause.errno
        self.reason = cause.strerror or str(cause)
        super().__init__(f"cannot read {path}: {self.reason}")


class ReadWouldWaitError(LogReadError):
    """What was to be read is not in memory, and the caller does not wait for the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BlockingIOError(EAGAIN, "it is not in memory"))


class NotASegmentError(LogError):
    """A file named like a segment that is none. It is left as it is."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not a log segment ({reason}): move it out of the data folder")
        self.path = path
        self.reason = reason


def is_disk_full(error: Exception) -> bool:
    """Whether something failed because the disk has no room, or the user's share of it is used up."""
    return isinstance(error, OSError | LogWriteError) and error.errno in (ENOSPC, EDQUOT)


class UnusableSegmentError(NotASegmentError):
    """A file named like a segment that a log cannot have among its own, and sets aside.

    Attributes:
        size: Of the file, bytes.
        suffix: Goes behind its name when it is set aside.
    """

    suffix: str

    def __init__(self, path: Path, size: int, reason: str) -> None:
        super().__init__(path, reason)
        self.size = size


class DamagedSegmentError(UnusableSegmentError):
    """Neither its header nor any of its records can be read."""

    suffix = ".damaged"

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, size, "its header is damaged, and it holds no undamaged record")


class ForeignSegmentError(UnusableSegmentError):
    """It is a segment of another log.

    Attributes:
        header: What it says of itself.
    """

    suffix = ".foreign"

    def __init__(self, path: Path, size: int, header: "FileHeader") -> None:
        super().__init__(path, size, "it belongs to another topic")
        self.header = header
