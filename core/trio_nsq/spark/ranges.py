"""The ranges of a log that are exported."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ..fleet.log_identity import LogMark
from ..log.gaps import Span

_JOINED = 4
"""Files of less than this part of a range are joined."""


class LastMessage(NamedTuple):
    """The last exported message; with the incarnation it identifies the log, see `LogMark`."""

    sequence: int
    id: str


@dataclass(slots=True)
class BrokerRanges:
    """The exported and planned ranges of one broker's log."""

    done: dict[Span, int] = field(default_factory=dict)
    """The number of messages in files, by range; ranges that touch are merged."""
    pending: dict[Span, int] = field(default_factory=dict)
    """The index of the layout of its files, by range."""
    last: LastMessage | None = None
    incarnation: str | None = None
    """Of the log; None: unknown, see `LogMark`."""

    @property
    def mark(self) -> LogMark:
        """What identifies the log."""
        return LogMark(self.incarnation, self.end, self.last)

    @property
    def planned(self) -> list[Span]:
        """All ranges, done or pending, in arbitrary order."""
        return [*self.done, *self.pending]

    @property
    def end(self) -> int:
        """The sequence after the last range; 0 if there is none."""
        return max((span.end for span in self.planned), default=0)


def merge_adjacent(counts: Mapping[Span, int]) -> dict[Span, int]:
    """Merge ranges that touch, and add their counts. The ranges must not overlap; the result is in order."""
    merged: list[tuple[int, int, int]] = []
    for (first, end), count in sorted(counts.items()):
        if merged and merged[-1][1] == first:
            start, _, before = merged.pop()
            first, count = start, before + count
        merged.append((first, end, count))
    return {Span(first, end): count for first, end, count in merged}


def subtract(wanted: Span, taken: Iterable[Span]) -> list[Span]:
    """Return the parts of a span that other spans do not cover, in order.

    Args:
        taken: Spans in any order; they may overlap, and exceed the span.
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


def split(span: Span, max_length: int, starts: Iterable[int] = ()) -> list[Span]:
    """Split a span into as few parts as possible, of about the same length.

    Args:
        max_length: The maximum length of a part; at least 1.
        starts: Where files of the log start, in order. Parts then begin there, so that a task reads whole files; a
            longer file has several parts, and files of less than a quarter of the maximum are joined.
    """
    cuts = [span.first, *(start for start in starts if span.first < start < span.end), span.end]
    parts: list[Span] = []
    for first, end in pairwise(cuts):
        if parts and parts[-1].length * _JOINED < max_length and end - parts[-1].first <= max_length:
            first = parts.pop().first
        parts += _split_evenly(Span(first, end), max_length)
    return parts


def _split_evenly(span: Span, max_length: int) -> list[Span]:
    parts = -(-span.length // max_length)
    cuts = [span.first + span.length * index // parts for index in range(parts + 1)]
    return [Span(first, end) for first, end in pairwise(cuts)]


def covered_up_to(first: int, done: Iterable[Span]) -> int:
    """Return the first sequence from `first` on that no span covers."""
    for span in sorted(done):
        if span.first > first:
            break
        first = max(first, span.end)
    return first
