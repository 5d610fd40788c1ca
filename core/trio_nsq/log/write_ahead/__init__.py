"""The write-ahead log of a node: unsynced parts of many topics' segments in one file, so that one sync serves all."""

from .file import WriteAheadFile, write_ahead_files
from .replay import Replay, replayed_files

__all__ = ["Replay", "WriteAheadFile", "replayed_files", "write_ahead_files"]
