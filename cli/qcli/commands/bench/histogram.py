"""The distribution of times. Pure; its size does not grow with the number of times."""

import math
from collections import defaultdict
from collections.abc import Iterator

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_CLASSES_PER_E = 100
"""Classes are 1 % wide, as in HdrHistogram with two digits: `PERCENTILES` are at most 1 % too high."""
_SHORTEST_S = 1e-6
_LIMITS_MS = tuple(digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5))
"""The upper limits of the classes that people read."""


class Histogram:
    """Counts times in logarithmic classes.

    Attributes:
        count: How many times were added.
        max_s: The longest one, exactly.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._sum_s = 0.0
        self._counts: defaultdict[int, int] = defaultdict(int)

    def add(self, time_s: float) -> None:
        """Count a time; a negative one counts as 0."""
        self.count += 1
        self._sum_s += time_s
        if time_s > self.max_s:
            self.max_s = time_s
        self._counts[int(math.log(max(time_s, _SHORTEST_S) / _SHORTEST_S) * _CLASSES_PER_E)] += 1

    @property
    def mean_s(self) -> float:
        """The mean; 0 without times."""
        return self._sum_s / self.count if self.count else 0.0

    def quantile_s(self, share: float) -> float:
        """Return a time that this share of all times does not exceed; 0 without times."""
        wanted = share * self.count
        seen = 0
        for upper_s, count in self._classes():
            seen += count
            if seen >= wanted:
                return upper_s
        return self.max_s

    def figures_ms(self) -> dict[str, float]:
        """Return `PERCENTILES` by name, and `max`, in milliseconds; empty without times."""
        if not self.count:
            return {}
        times_s = {name: self.quantile_s(share) for name, share in PERCENTILES.items()} | {"max": self.max_s}
        return {name: round(1000 * time_s, 4) for name, time_s in times_s.items()}

    def coarse(self) -> list[tuple[float, int]]:
        """Return the upper limits, in milliseconds, and counts of classes for people: 1, 2, 5, 10 and so on.

        The classes reach from the first to the last one with a time. The limit of the last class may be infinite.
        """
        limits = (*_LIMITS_MS, math.inf)
        counts = [0] * len(limits)
        for upper_s, count in self._classes():
            counts[next(place for place, limit in enumerate(limits) if upper_s * 1000 <= limit)] += count
        used = [place for place, count in enumerate(counts) if count]
        return list(zip(limits, counts, strict=True))[used[0] : used[-1] + 1] if used else []

    def _classes(self) -> Iterator[tuple[float, int]]:
        """Yield the upper limit and the count of each class, in order."""
        for number, count in sorted(self._counts.items()):
            upper_s = _SHORTEST_S * math.exp((number + 1) / _CLASSES_PER_E)
            yield min(upper_s, self.max_s), count
