"""The file layer of the log: file operations that tests can replace, a bounded set of open files, and reads past bad
blocks.
"""

from .file_system import NO_FILE, Files, Space, temporary_of
from .open_files import LogFile, OpenFiles, reasonable_limit
from .overlay import OverlayFiles
from .owned_file import OwnedFile
from .tolerant_reader import TolerantReader

__all__ = [
    "NO_FILE",
    "Files",
    "LogFile",
    "OpenFiles",
    "OverlayFiles",
    "OwnedFile",
    "Space",
    "TolerantReader",
    "reasonable_limit",
    "temporary_of",
]
