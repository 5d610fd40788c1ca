"""Spans of sequences, and gaps: those that a reader of a log cannot read."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Span(NamedTuple):
    """The sequences of one broker's log from `first` up to, but not including, `end`; never empty."""

    first: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.first

    def overlaps(self, other: "Span") -> bool:
        return self.first < other.end and other.first < self.end

    def common(self, other: "Span") -> int:
        """Return the number of sequences that both spans have."""
        return max(0, min(self.end, other.end) - max(self.first, other.first))


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that cannot be read: discarded by retention, or damaged on disk."""

    first_sequence: int
    next_sequence: int
    reason: Literal["discarded", "damaged"]


def gaps(sequence: int, end: int, kept_from: int) -> list[Gap]:
    """Return the gaps between two sequences without messages, in a log whose first sequence is `kept_from`."""
    middle = min(max(kept_from, sequence), end)
    parts = (Gap(sequence, middle, "discarded"), Gap(middle, end, "damaged"))
    return [gap for gap in parts if gap.first_sequence < gap.next_sequence]
