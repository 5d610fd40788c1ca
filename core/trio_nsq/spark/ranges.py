"""Ranges of sequences: what is to be exported, cut into pieces, without what is done."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Sequences from `first` on and before `end`, of one broker's log; never empty."""

    first: int
    end: int

    @property
    def length(self) -> int:
        """How many sequences."""
        return self.end - self.first

    def overlaps(self, other: "Span") -> bool:
        """Whether they have a sequence in common."""
        return self.first < other.end and other.first < self.end

    def common(self, other: "Span") -> int:
        """How many sequences they have in common."""
        return max(0, min(self.end, other.end) - max(self.first, other.first))


def subtract(wanted: Span, taken: Iterable[Span]) -> list[Span]:
    """What is left of a span without others, in order.

    Args:
        wanted: The span.
        taken: In any order; may overlap each other, and reach beyond it.
    """
    left: list[Span] = []
    at = wanted.first
    for span in sorted(taken):
        if span.first >= wanted.end:
            break
        if span.first > at:
            left.append(Span(at, span.first))
        at = max(at, span.end)
    if at < wanted.end:
        left.append(Span(at, wanted.end))
    return left


def split(span: Span, at_most: int) -> list[Span]:
    """Cut a span into as few pieces of about the same length as there can be.

    Args:
        span: The span.
        at_most: The longest that a piece may be; at least 1.
    """
    pieces = -(-span.length // at_most)
    cuts = [span.first + span.length * index // pieces for index in range(pieces + 1)]
    return [Span(first, end) for first, end in pairwise(cuts)]


def covered_up_to(first: int, done: Iterable[Span]) -> int:
    """The first sequence from `first` on that none of the spans has."""
    for span in sorted(done):
        if span.first > first:
            break
        first = max(first, span.end)
    return first
