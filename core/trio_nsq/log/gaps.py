"""Gaps: ranges of sequences that a reader of a log cannot read."""

from dataclasses import dataclass
from typing import Literal


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
