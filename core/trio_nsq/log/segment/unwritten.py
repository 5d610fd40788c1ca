"""Records that a power cut kept from the disk, although it has later ones: how to tell them from damage.

When the power fails, a disk may have written the pages of a file in any order. A page that it has not written reads as
zeros, from the end of the records at the last sync on. Damage changes bits, and leaves no page of zeros. Records before
the saved end of the log were synced, so there it is damage in any case.

A writer may have written zeros ahead, which a record replaces: see `SegmentWriter`. So the last record may also be
written up to any byte, although the file does not end there.
"""

import mmap
from dataclasses import dataclass
from typing import Final

from .format import FileHeader
from .scan import NO_LIMIT, SCAN_BYTES, Read, headers_in

ALL_STABLE: Final = 2**64
PAGE_BYTES: Final = mmap.PAGESIZE
_YOUNG_NS: Final = 60 * 10**9
"""A log of which nothing is known to be stable is no older. Otherwise what was known about it was lost."""


@dataclass(frozen=True, slots=True)
class UnwrittenRecords:
    """Finds the first unwritten record of the last segment of a log.

    Args:
        header: The segment's.
        stable_end: Messages before this sequence were on stable storage; ALL_STABLE: every record was.
        read: Reads the segment; returns fewer bytes only at its end. Raises OSError.
    """

    header: FileHeader
    stable_end: int
    read: Read

    def begin_at(self, offset: int, end: int, sequence: int) -> bool:
        """Whether the record at an offset, which should begin with this sequence, was not written, or not to its end.

        Args:
            end: Where the next record begins.
        """
        if sequence < self.stable_end:
            return False
        page_end = -(-end // PAGE_BYTES) * PAGE_BYTES
        data = self.read(page_end - offset, offset)
        return (_has_empty_page(data, offset) or self.is_torn(end)) and (
            self.stable_end > 0 or self._is_young()
        )

    def is_torn(self, end: int) -> bool:
        """Whether a damaged record that ends here may be written up to some byte only: only zeros follow that byte."""
        return self.read(1, end - 1) == b"\0" and self.is_zeros(end)

    def is_zeros(self, offset: int) -> bool:
        """Whether the file has zeros from an offset on, at least one, and nothing else. Raises OSError."""
        begin = offset
        while data := self.read(SCAN_BYTES if offset > begin else PAGE_BYTES, offset):
            if data.strip(b"\0"):
                return False
            offset += len(data)
        return offset > begin

    def _is_young(self) -> bool:
        """Whether the segment is the first of its log, and was written in a short time."""
        headers = headers_in(self.read, self.header.seed, self.header.size, NO_LIMIT)
        newest_ns = max((header.timestamp_ns for _, header in headers), default=0)
        return not self.header.base_sequence and newest_ns - self.header.created_ns < _YOUNG_NS


def _has_empty_page(data: bytes, offset: int) -> bool:
    """Whether these bytes, at an offset of a file, up to the end of a page or of the file, have a page of zeros.

    The first page counts from the offset on: a record does not begin with a zero.
    """
    at = 0
    while at < len(data):
        page_end = at + PAGE_BYTES - (offset + at) % PAGE_BYTES
        if not data[at:page_end].strip(b"\0"):
            return True
        at = page_end
    return False
