"""Quantiles of many measurements in little memory, over a sliding window.

The sketch is DDSketch (Masson, Rim and Lee: "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with
Relative-Error Guarantees", PVLDB 12(12), 2019): values are counted in buckets whose bounds grow by a constant factor,
so that any value of a bucket is within `RELATIVE_ERROR` of the bucket's middle. Adding the counts of two sketches gives
the exact sketch of all values, so channels' sketches merge into their topic's without loss.
"""

from collections.abc import Iterable
from math import ceil, log

RELATIVE_ERROR = 0.01
"""As in nsqd. The range from 1 us to 1 day has about 1250 buckets; only used buckets cost memory."""

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = log(_GROWTH)


class Sketch:
    """How often values occurred, each known to within `RELATIVE_ERROR`.

    Attributes:
        count: Values added.
    """

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count: int = 0
        self._buckets: dict[
            int, int
        ] = {}  # bucket i holds the values above _GROWTH ** (i - 1), up to _GROWTH ** i

    def add(self, value: int, count: int = 1) -> None:
        """Add a value `count` times; values below 1 count as 1."""
        bucket = ceil(log(value) / _LOG_GROWTH) if value > 1 else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count

    def merge(self, other: "Sketch") -> None:
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count

    def quantiles(self, fractions: Iterable[float]) -> list[int]:
        """Return the quantile of each fraction in (0, 1]; 0 if there are no values."""
        buckets = sorted(self._buckets.items())
        return [self._value_at(buckets, ceil(fraction * self.count)) for fraction in fractions]

    @staticmethod
    def _value_at(buckets: list[tuple[int, int]], rank: int) -> int:
        for bucket, count in buckets:
            rank -= count
            if rank <= 0:
                return round(2 * _GROWTH**bucket / (_GROWTH + 1))
        return 0


class RecentSketch:
    """A sketch of the values of between half and all of the last `window_ns`.

    As in nsqd, it keeps one sketch for each half of the window, and replaces the older one every half window. Time is
    the parameter `now_ns`; a clock step ends the current half early.

    Args:
        window_ns: More than 0.
    """

    __slots__ = ("_current", "_half_ns", "_older", "_since_ns", "_until_ns")

    def __init__(self, window_ns: int) -> None:
        self._half_ns = max(1, window_ns // 2)
        self._since_ns = self._until_ns = 0  # the current half
        self._current = Sketch()
        self._older = Sketch()

    def add(self, value: int, count: int, now_ns: int) -> None:
        if not self._since_ns <= now_ns < self._until_ns:
            self._turn(now_ns)
        self._current.add(value, count)

    def recent(self, now_ns: int) -> Sketch:
        """Return a new sketch of the values in the current window."""
        if not self._since_ns <= now_ns < self._until_ns:
            self._turn(now_ns)
        merged = Sketch()
        merged.merge(self._older)
        merged.merge(self._current)
        return merged

    def _turn(self, now_ns: int) -> None:
        both_over = now_ns >= self._until_ns + self._half_ns
        self._older = Sketch() if both_over else self._current
        self._current = Sketch()
        self._since_ns, self._until_ns = now_ns, now_ns + self._half_ns
