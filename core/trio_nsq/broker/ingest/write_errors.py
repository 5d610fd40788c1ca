"""What writes to logs have failed with: for health checks, and for those who published."""

import logging

from ...log import LogError, is_disk_full
from ..errors import PublishRefused
from ..state.topic import Topic
from ..storage.spare_room import SpareRoom

logger = logging.getLogger("trio_nsq.broker")


class WriteErrors:
    """Errors of a broker's logs.

    Args:
        spare_room: Of the data folder; told when the disk is full.

    Attributes:
        text: Empty, or what the last write of any log failed with, unless there was no room: see `SpareRoom`.
    """

    def __init__(self, spare_room: SpareRoom) -> None:
        self.text = ""
        self._spare_room = spare_room

    def clear(self) -> None:
        """A write went well."""
        self.text = self._spare_room.failed_with = ""

    def record(self, error: LogError, size: int = 0) -> PublishRefused:
        """A write of so many bytes failed, or a sync; returns what its publishers are told."""
        text = str(error)
        if text not in (self.text, self._spare_room.failed_with):
            logger.error("%s", text)
        if is_disk_full(error):
            self._spare_room.note_failed(text, size)
        else:
            self.text = text
        return PublishRefused(text)

    def refusal(self, topic: Topic, error: Exception, size: int) -> PublishRefused:
        """What the publishers of so many bytes are told when storing them has failed."""
        if isinstance(error, PublishRefused):
            return error
        if isinstance(error, LogError):
            return self.record(error, size)
        # A mistake of ours: it ends neither the broker nor what comes next, and the publishers hear of it.
        logger.error("%s: a publish failed", topic.name, exc_info=error)
        return PublishRefused("internal error")
