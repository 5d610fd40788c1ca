"""Reports of damage in a segment: each damaged place is logged once, however often it is read."""

import logging
from pathlib import Path

logger = logging.getLogger("trio_nsq.log")


class DamageReports:
    """What was reported about one segment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: set[int] = set()
        self._end_is_damaged = False
        self._missing_from: int | None = None

    def bytes_damaged(self, offset: int, end: int, size: int) -> None:
        """Report that these bytes are no record, in a segment of this size."""
        if self._is_new(offset, end, size):
            logger.error("%s: damaged from byte %d to byte %d, passed over", self._path, offset, end)

    def record_damaged(self, offset: int, end: int, size: int) -> None:
        """Report that the record between these offsets does not match its checksum."""
        if self._is_new(offset, end, size):
            logger.error("%s: the record batch at byte %d is damaged, passed over", self._path, offset)

    def _is_new(self, offset: int, end: int, size: int) -> bool:
        if offset in self._offsets:
            return False
        self._offsets.add(offset)
        self._end_is_damaged = self._end_is_damaged or end >= size
        return True

    def messages_missing(self, sequence: int, next_sequence: int, size: int) -> None:
        """Report that a full segment of this size ends before `sequence`, not before `next_sequence`."""
        if self._end_is_damaged:
            return  # this is the cause, and it was reported
        if self._missing_from is None or sequence < self._missing_from:
            self._missing_from = sequence
            what = "%s: messages %d to %d are missing before its end at byte %d, passed over"
            logger.error(what, self._path, sequence, next_sequence - 1, size)
