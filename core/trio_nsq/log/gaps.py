"""What a reader of a log finds missing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that are not there: they are too old to be kept, or damaged on disk."""

    first_sequence: int
    next_sequence: int
    reason: Literal["discarded", "damaged"]


def gaps(sequence: int, end: int, kept_from: int) -> list[Gap]:
    """What is missing from one sequence to another, in a log that is kept from `kept_from` on; may be nothing."""
    middle = min(max(kept_from, sequence), end)
    parts = (Gap(sequence, middle, "discarded"), Gap(middle, end, "damaged"))
    return [gap for gap in parts if gap.first_sequence < gap.next_sequence]
