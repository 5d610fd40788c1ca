"""A histogram of durations: how many took at most so long, and how long all together."""

from bisect import bisect_left
from itertools import accumulate

DURATION_BOUNDS_S = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""From a write into the page cache, which takes some 0.1 ms, to a disk that hangs."""


class Histogram:
    """Counts durations by upper bounds, for a quarter of a microsecond each.

    Attributes:
        count: Durations observed.
        sum_s: Of all of them, in seconds.
    """

    __slots__ = ("_bounds_s", "_counts", "count", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.count = 0
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self.count += 1
        self.sum_s += duration_s

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound in seconds, how many took at most so long), ascending; the last bound is infinity."""
        return list(zip((*self._bounds_s, float("inf")), accumulate(self._counts), strict=True))
