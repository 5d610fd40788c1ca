"""Build a topic from merged messages: its log and the state of its channels."""

import os
from collections.abc import Sequence
from typing import Any

from ..broker.state.cache import BatchCache
from ..broker.state.topic import Topic
from ..log import DiskLog, RecordBatch
from ..protocol import pack_messages
from .diskqueue import QueueFiles
from .merger import MergedMessage
from .nsqd_metadata import ImportRefused, TopicMetadata

_APPEND_BYTES = 1024 * 1024
_RECORD_BYTES = 256 * 1024
MAX_OPEN_FILES = 64


class ChannelBuilder:
    """Builds the state of a channel from its messages, in order.

    Attributes:
        messages: The number of messages.
        attempted: How many of them were delivered before.
        unfinished: [sequence, attempts] of those; they are delivered like messages that timed out.
    """

    def __init__(self) -> None:
        self.messages: int = 0
        self.attempted: int = 0
        self.unfinished: list[tuple[int, int]] = []
        self._cursor: int | None = None  # the first message that was never delivered
        self._next_fresh = 0  # the sequence after the last such message
        self._holes: list[tuple[int, int]] = []

    def add(self, sequence: int, attempts: int) -> None:
        """Add a message; its sequence must be larger than all earlier ones."""
        self.messages += 1
        if attempts:
            self.attempted += 1
            self.unfinished.append((sequence, attempts))
            return
        if self._cursor is None:
            self._cursor = sequence
        elif self._next_fresh < sequence:
            self._holes.append((self._next_fresh, sequence))
        self._next_fresh = sequence + 1

    def state(self, end: int) -> dict[str, Any]:
        """Return the fields of `Channel.snapshot` that the messages determine.

        Args:
            end: The sequence after the topic's last message.
        """
        if self._cursor is None:
            return {"cursor": end, "holes": [], "unfinished": self.unfinished}
        last = [(self._next_fresh, end)] if self._next_fresh < end else []
        return {"cursor": self._cursor, "holes": self._holes + last, "unfinished": self.unfinished}


class LogWriter:
    """Writes messages into a log with their ids and timestamps.

    A record has one timestamp and one first id, so its messages must have the same timestamp and consecutive ids. The
    broker joins small records when it reads them.

    Args:
        log: An empty log.
    """

    def __init__(self, log: DiskLog) -> None:
        self._log = log
        self._records: list[RecordBatch] = []
        self._records_bytes = 0
        # The record under construction.
        self._bodies: list[bytes] = []
        self._bodies_bytes = 0
        self._first_id = self._timestamp_ns = self._base_sequence = 0

    @property
    def next_sequence(self) -> int:
        return self._base_sequence + len(self._bodies)

    def add(self, message_id: int, timestamp_ns: int, body: bytes) -> None:
        """Append a message. Raises LogWriteError."""
        if (
            not self._bodies
            or timestamp_ns != self._timestamp_ns
            or message_id != self._first_id + len(self._bodies)
            or self._bodies_bytes >= _RECORD_BYTES
        ):
            self._end_record()
            self._first_id, self._timestamp_ns = message_id, timestamp_ns
        self._bodies.append(body)
        self._bodies_bytes += len(body)

    def _end_record(self) -> None:
        if not self._bodies:
            return
        messages = pack_messages(self._bodies)
        record = RecordBatch(self._base_sequence, self._first_id, self._timestamp_ns, 0, messages)
        self._base_sequence = record.next_sequence
        self._bodies = []
        self._bodies_bytes = 0
        self._records.append(record)
        self._records_bytes += record.record_bytes
        if self._records_bytes >= _APPEND_BYTES:
            self._append()

    def _append(self) -> None:
        if self._records:
            self._log.append(self._records, sync=False)
            self._records = []
            self._records_bytes = 0

    def close(self) -> None:
        """Write the rest and sync the log. Raises LogWriteError."""
        self._end_record()
        self._append()
        self._log.sync()


class BodyReader:
    """Reads the bodies of messages from the files of their queues.

    Args:
        queues: The files of each queue, by its number.

    At most `MAX_OPEN_FILES` files are open.
    """

    def __init__(self, queues: Sequence[QueueFiles]) -> None:
        self._queues = queues
        self._open: dict[tuple[int, int], int] = {}

    def read(self, message: MergedMessage) -> bytes:
        """Read the body of a message. Raises OSError, and ImportRefused if the file was truncated meanwhile."""
        queue, _, number, offset = message.copies[0]
        body = os.pread(self._fd(queue, number), message.size, offset)
        if len(body) < message.size:
            raise ImportRefused(f"{self._queues[queue].data[number]} was truncated while it was read")
        return body

    def _fd(self, queue: int, number: int) -> int:
        fd = self._open.get((queue, number))
        if fd is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self.close()
            fd = os.open(self._queues[queue].data[number], os.O_RDONLY | os.O_CLOEXEC)
            self._open[queue, number] = fd
        return fd

    def close(self) -> None:
        """Close the files; `read` reopens them."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def topic_state(
    topic: TopicMetadata, log: DiskLog, channels: Sequence[ChannelBuilder], point: int
) -> dict[str, Any]:
    """Build the saved state of the topic.

    Args:
        channels: The state of each channel, in the order of the topic's channels.
        point: The high watermark: later messages are in no channel.
    """
    ours = Topic(topic.name, log, BatchCache(0), 0)
    ours.paused = True  # otherwise waiting messages would move to the channels
    for channel in topic.channels:
        ours.add_channel(channel.name).paused = channel.paused
    # The snapshot has the remaining fields.
    state = ours.snapshot() | {"paused": topic.paused, "distribution_point": point}
    state["channels"] = [
        channel | builder.state(point) for channel, builder in zip(state["channels"], channels, strict=True)
    ]
    return state
