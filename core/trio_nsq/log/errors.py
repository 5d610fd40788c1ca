"""What can go wrong with a log. All derive from `NSQError` and name the file."""

from errno import EAGAIN, EDQUOT, ENOSPC
from pathlib import Path

from ..protocol.errors import NSQError


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
    """The operating system refused a read."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(f"cannot read {path}: {cause.strerror or cause}")
        self.path = path


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
