"""A topic's durable log: append-only segments of checksummed record batches.

Two classes implement the interface `Log`: `DiskLog`, and `MemoryLog` for topics that are only in memory.
The caller is responsible for the order of effects: it sends OK after `append(..., sync=True)` returns.
"""

from .disk.log import DiskLog
from .errors import (
    LogError,
    LogReadError,
    LogWriteError,
    NotASegmentError,
    ReadWouldWaitError,
    is_disk_full,
)
from .files import Files, OpenFiles, reasonable_limit
from .interface import Log
from .memory import MemoryLog
from .records import RecordBatch, RecordHeader
from .segment.unwritten import ALL_STABLE

__all__ = [
    "ALL_STABLE",
    "DiskLog",
    "Files",
    "Log",
    "LogError",
    "LogReadError",
    "LogWriteError",
    "MemoryLog",
    "NotASegmentError",
    "OpenFiles",
    "ReadWouldWaitError",
    "RecordBatch",
    "RecordHeader",
    "is_disk_full",
    "reasonable_limit",
]
