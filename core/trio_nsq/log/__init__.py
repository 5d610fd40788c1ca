"""A topic's durable log: append-only segments of checksummed record batches.

Two forms behind one narrow interface (`Log`): `DiskLog`, and `MemoryLog` for topics that live in memory only.
The order of effects is the caller's contract: `append(..., sync=True)` returns, then OK is sent.
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

__all__ = [
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
