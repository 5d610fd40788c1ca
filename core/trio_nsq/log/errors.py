"""The errors of a log. All derive from `NSQError` and contain the path of the file."""

from errno import EAGAIN, EDQUOT, ENOSPC
from pathlib import Path

from ..protocol.errors import NSQError


class LogError(NSQError):
    """Base of the log's errors."""


class LogWriteError(LogError):
    """A write or a sync failed; nothing was appended.

    Attributes:
        errno: The operating system's error number; None if there is none.
    """

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(f"cannot write {path}: {cause.strerror or cause}")
        self.path = path
        self.errno: int | None = cause.errno


class LogReadError(LogError):
    """A read failed.

    Attributes:
        errno: The operating system's error number; None if there is none.
    """

    def __init__(self, path: Path, cause: OSError) -> None:
        self.path = path
        self.errno: int | None = cause.errno
        self.reason: str = cause.strerror or str(cause)
        super().__init__(f"cannot read {path}: {self.reason}")


class ReadWouldWaitError(LogReadError):
    """The data is not in memory, and the caller must not wait for the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, BlockingIOError(EAGAIN, "it is not in memory"))


class NotASegmentError(LogError):
    """A file has the name of a segment but is not one. The log does not change it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not a log segment ({reason}): move it out of the data folder")
        self.path = path
        self.reason = reason


def is_disk_full(error: Exception) -> bool:
    """Whether an operation failed because the disk is full or the user's quota is used up."""
    return isinstance(error, OSError | LogWriteError) and error.errno in (ENOSPC, EDQUOT)


class UnusableSegmentError(NotASegmentError):
    """A file has the name of a segment, but the log cannot use it and renames it.

    Attributes:
        suffix: Appended to its name when it is renamed.
    """

    suffix: str

    def __init__(self, path: Path, size: int, reason: str) -> None:
        super().__init__(path, reason)
        self.size = size


class DamagedSegmentError(UnusableSegmentError):
    """Neither the segment's header nor any of its records can be read."""

    suffix = ".damaged"

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, size, "its header is damaged, and it holds no undamaged record")


class ForeignSegmentError(UnusableSegmentError):
    """The segment belongs to another log.

    Attributes:
        seed: The seed in its header, which identifies its log.
    """

    suffix = ".foreign"

    def __init__(self, path: Path, size: int, seed: int) -> None:
        super().__init__(path, size, "it belongs to another topic")
        self.seed = seed
