"""How old operations are, for followers that lack them."""

from bisect import bisect_right
from typing import Final

_MOST: Final = 4096


class OperationAges:
    """When operations were added, from samples of the newest number.

    An age is never too high, and lower than the truth by at most the time between two samples.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []  # ascending: each was the newest one
        self._times_s: list[float] = []

    def sample(self, now_s: float, last_number: int) -> None:
        """Record which operation is the newest."""
        if not self._numbers or last_number > self._numbers[-1]:
            self._numbers.append(last_number)
            self._times_s.append(now_s)
            if len(self._numbers) > _MOST:
                del self._numbers[: _MOST // 2], self._times_s[: _MOST // 2]

    def age_s(self, now_s: float, number: int) -> float:
        """Return the age of the oldest operation after this one; 0 if there was none at the last sample."""
        index = bisect_right(self._numbers, number)
        return now_s - self._times_s[index] if index < len(self._numbers) else 0.0
