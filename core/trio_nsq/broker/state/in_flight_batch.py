"""The messages of one send that are in flight: see `in_flight.py`."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ...log.record_metadata import Reason
from ...protocol.bulk import FINISH_ID_AT, FINISH_LINE_BYTES, ID_BYTES
from ...protocol.commands import finish_line_ids
from .batch import Batch
from .message_keys import Key
from .withdrawn import WithdrawnMessage


class InFlightBatch:
    """The messages of one send: one object for hundreds of messages.

    Args:
        lines: The FIN lines of the messages; their ids ascend.
        first_sequence: The first message's sequence; the others are consecutive, without `sequences`.
        sequences: Of two or more messages that are not consecutive, ascending.
        keys: In a channel with an order, the key that each message holds.

    Attributes:
        left: Number of messages still in flight. In a run, these are the last ones.
        deadline_ns: When the messages time out and return to the channel.
        delivered_ns: When they were sent.
        attempts: How often they were delivered, including this time.
        held: The batch that holds them, if they are only in memory; None if they can be read from the log.
        timestamp_ns: When they were published; 0 if latency is not measured.
    """

    __slots__ = (
        "_ids",
        "_keys",
        "_sequences",
        "attempts",
        "deadline_ns",
        "delivered_ns",
        "held",
        "left",
        "lines",
        "next_sequence",
        "timestamp_ns",
    )

    def __init__(
        self,
        lines: bytes,
        first_sequence: int,
        attempts: int,
        delivered_ns: int,
        deadline_ns: int,
        held: Batch | None = None,
        timestamp_ns: int = 0,
        sequences: list[int] | None = None,
        keys: list[Key | None] | None = None,
    ) -> None:
        count = len(lines) // FINISH_LINE_BYTES
        self.lines: bytes = lines
        self.next_sequence: int = first_sequence + count if sequences is None else sequences[-1] + 1
        self.left: int = count
        self.attempts: int = attempts
        self.delivered_ns: int = delivered_ns
        self.deadline_ns: int = deadline_ns
        self.held: Batch | None = held
        self.timestamp_ns: int = timestamp_ns
        # Of the last messages: those left when the run was split. So they are counted from the end here.
        self._ids: list[bytes] | None = None
        self._sequences = sequences
        self._keys = keys

    @property
    def is_split(self) -> bool:
        """Whether this was a run, and its messages are stored by id now."""
        return self._ids is not None

    @property
    def begins_at(self) -> int:
        """A lower bound of the sequences left; in a run, the next message's sequence."""
        count = self.left if self._ids is None else len(self._ids)
        return self.next_sequence - count if self._sequences is None else self._sequences[-count]

    def split(self) -> list[bytes]:
        """Split the run, and return the ids of the messages left."""
        self._ids = finish_line_ids(self.lines[-self.left * FINISH_LINE_BYTES :])
        return self._ids

    def _from_end(self, sequence: int) -> int:
        """Return how many messages there are from one on, when they were sent."""
        if self._sequences is None:
            return self.next_sequence - sequence
        return len(self._sequences) - bisect_left(self._sequences, sequence)

    def id_of(self, sequence: int) -> bytes:
        start = len(self.lines) - self._from_end(sequence) * FINISH_LINE_BYTES
        return self.lines[start + FINISH_ID_AT : start + FINISH_LINE_BYTES - 1]

    def key_of(self, sequence: int) -> Key | None:
        """Return the key that a message holds; None: it has none, or the channel has no order."""
        return self._keys[-self._from_end(sequence)] if self._keys is not None else None

    def next_keys(self, count: int) -> list[Key | None]:
        """Return the keys of the next messages of this run; empty if the channel has no order."""
        if self._keys is None:
            return []
        at = len(self._keys) - self.left
        return self._keys[at : at + count]

    def forget_keys(self) -> None:
        """Let these messages hold no keys: the order of the channel has changed."""
        self._keys = None

    def holds(self, message_id: bytes) -> bool:
        """Whether this run still has the message. Only for runs."""
        text = self.lines
        ids_at = range(len(text) - self.left * FINISH_LINE_BYTES + FINISH_ID_AT, len(text), FINISH_LINE_BYTES)
        index = bisect_left(ids_at, message_id, key=lambda at: text[at : at + ID_BYTES])
        return index < self.left and text.startswith(message_id, ids_at[index])

    def sequence_of(self, message_id: bytes) -> int:
        """Return the sequence of one of these messages. Not for runs."""
        if self._ids is None:
            return self.next_sequence - 1
        from_end = len(self._ids) - bisect_left(self._ids, message_id)
        return self.next_sequence - from_end if self._sequences is None else self._sequences[-from_end]

    def touched(self, sequence: int, deadline_ns: int) -> "InFlightBatch":
        """Return a delivery of only this message, with another deadline."""
        line = b"FIN %s\n" % self.id_of(sequence)
        keys = [self.key_of(sequence)] if self._keys is not None else None
        return InFlightBatch(
            line,
            sequence,
            self.attempts,
            self.delivered_ns,
            deadline_ns,
            self.held,
            self.timestamp_ns,
            None,
            keys,
        )

    @property
    def sequences(self) -> Sequence[int]:
        """The sequences of the messages when the run was split; in a run, of the messages left."""
        return self.last(self.left if self._ids is None else len(self._ids))

    def last(self, count: int) -> Sequence[int]:
        """Return the sequences of the last messages that were sent."""
        if self._sequences is not None:
            return self._sequences[-count:]
        return range(self.next_sequence - count, self.next_sequence)

    def returned(self, sequence: int, reason: Reason | None) -> WithdrawnMessage:
        return WithdrawnMessage(sequence, self.attempts, reason, self.held)


class InFlightCopy:
    """A snapshot: yields (sequence, attempts) of each message in flight. C code makes the copies."""

    __slots__ = ("_by_id", "_left", "_runs")

    def __init__(
        self, runs: tuple[InFlightBatch, ...], left: tuple[int, ...], by_id: dict[bytes, InFlightBatch]
    ) -> None:
        self._runs = runs
        self._left = left
        self._by_id = by_id

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for run, left in zip(self._runs, self._left, strict=True):
            for sequence in run.last(left):
                yield sequence, run.attempts
        for message_id, delivery in self._by_id.items():
            yield delivery.sequence_of(message_id), delivery.attempts
