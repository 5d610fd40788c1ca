"""What one consumer gets in one send of a channel with an order: messages of any batches, see `key_order.py`."""

from collections.abc import Sequence

from ...protocol.bulk import FINISH_LINE_BYTES
from .batch import Batch
from .consumer import Consumer
from .in_flight_batch import InFlightBatch
from .message_keys import Key
from .topic_view import TopicView


class KeyedSend:
    """Collects messages, and puts as many as possible in flight together: an `InFlightBatch` costs as much as several.

    Args:
        now_ns: When they are sent.
        max_bytes: Maximum bytes of their frames, unless the first one is larger.

    Attributes:
        room: How many more bytes of frames it takes; 0 or less: none.
    """

    __slots__ = (
        "_consumer",
        "_deadline_ns",
        "_frames",
        "_held",
        "_keys",
        "_lines",
        "_now_ns",
        "_runs",
        "_sequences",
        "_timestamp_ns",
        "_topic",
        "room",
    )

    def __init__(self, consumer: Consumer, topic: TopicView, now_ns: int, max_bytes: int) -> None:
        self.room: int = max_bytes
        self._consumer = consumer
        self._topic = topic
        self._now_ns = now_ns
        self._deadline_ns = now_ns + consumer.msg_timeout_ns
        self._frames: list[bytes] = []
        self._runs: list[InFlightBatch] = []  # without the messages of the next one, which are here:
        self._lines: list[bytes] = []
        self._sequences: list[int] = []
        self._keys: list[Key | None] = []
        self._held: Batch | None = None
        self._timestamp_ns = 0

    @property
    def is_empty(self) -> bool:
        """Whether no message was added."""
        return not self._frames

    def add(self, batch: Batch, indexes: Sequence[int], keys: list[Key | None]) -> int:
        """Add messages of a batch, at least one index, ascending, as many as there is room for; return their number.

        Args:
            keys: The keys that they hold.
        """
        least = 0 if self._frames else 1
        lines, frames = batch.take_some(indexes, self.room, self._consumer.wants_headers, least=least)
        count = len(lines) // FINISH_LINE_BYTES
        if not count:
            return 0
        self._frames.append(frames)
        self.room -= len(frames)
        base, held = batch.base_sequence, batch if self._topic.ephemeral else None
        sequences = [base + index for index in indexes[:count]]
        if not self._topic.e2e_window_ns:
            self._append(lines, sequences, keys[:count], held, 0)
            return count
        at = 0
        while at < count:  # those with the same time of publication
            end, timestamp_ns = at + 1, batch.timestamp_ns(indexes[at])
            while end < count and batch.timestamp_ns(indexes[end]) == timestamp_ns:
                end += 1
            some = lines[at * FINISH_LINE_BYTES : end * FINISH_LINE_BYTES]
            self._append(some, sequences[at:end], keys[at:end], held, timestamp_ns)
            at = end
        return count

    def _append(
        self,
        lines: bytes,
        sequences: list[int],
        keys: list[Key | None],
        held: Batch | None,
        timestamp_ns: int,
    ) -> None:
        if self._lines and (
            held is not self._held
            or timestamp_ns != self._timestamp_ns
            or lines[:FINISH_LINE_BYTES] <= self._lines[-1][-FINISH_LINE_BYTES:]  # ids of a run ascend
        ):
            self._end_run()
        self._held, self._timestamp_ns = held, timestamp_ns
        self._lines.append(lines)
        self._sequences += sequences
        self._keys += keys

    def _end_run(self) -> None:
        sequences = self._sequences
        first, count = sequences[0], len(sequences)
        self._runs.append(
            InFlightBatch(
                b"".join(self._lines),
                first,
                1,
                self._now_ns,
                self._deadline_ns,
                self._held,
                self._timestamp_ns,
                None if sequences[-1] - first == count - 1 else sequences,
                self._keys,
            )
        )
        self._lines, self._sequences, self._keys = [], [], []

    def take(self) -> tuple[list[InFlightBatch], list[bytes]]:
        """Return the messages, and their frames; empty if no message was added."""
        if self._lines:
            self._end_run()
        return self._runs, [b"".join(self._frames)] if self._frames else []
