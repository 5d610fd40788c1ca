"""Selections: the messages of a log to read, by range of sequences and of times."""

from dataclasses import dataclass

from .records import RecordBatch, RecordHeader

_NO_END = 2**64


@dataclass(frozen=True, slots=True)
class Selection:
    """A range of messages: those that meet all conditions.

    Attributes:
        first_sequence, end_sequence: The range of sequences; the end is excluded.
        first_ns, end_ns: The range of publish times, Unix nanoseconds; the end is excluded.
    """

    first_sequence: int = 0
    end_sequence: int = _NO_END
    first_ns: int = 0
    end_ns: int = _NO_END

    def touches(self, header: RecordHeader) -> bool:
        """Whether any message of the record is selected."""
        return (
            max(header.base_sequence, self.first_sequence) < min(header.next_sequence, self.end_sequence)
            and self.first_ns <= header.timestamp_ns < self.end_ns
        )

    def indexes(self, batch: RecordBatch) -> range:
        """Return the positions of the selected messages in a batch that `touches`."""
        start = max(self.first_sequence - batch.base_sequence, 0)
        return range(start, min(self.end_sequence - batch.base_sequence, batch.count))
