"""When to try again a topic that fails. No IO; time is a parameter."""

from collections.abc import Hashable
from dataclasses import dataclass

MAX_BACKOFF_S = 600.0


@dataclass(slots=True)
class _Failing:
    times: int = 0
    until_s: float = 0.0


class Backoff:
    """Leaves out what has failed several times: for one round, then for two, four and so on, at most `MAX_BACKOFF_S`.

    Args:
        every_s: The interval of the rounds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._failing: dict[Hashable, _Failing] = {}

    def is_due(self, key: Hashable, now_s: float) -> bool:
        """Whether to try this in a round that begins now."""
        found = self._failing.get(key)
        return found is None or now_s >= found.until_s

    def failed(self, key: Hashable, now_s: float) -> None:
        """Note a failure in a round that began now. After the first one, the next round tries again."""
        found = self._failing.setdefault(key, _Failing())
        found.times += 1
        rounds = 2 ** min(found.times - 1, 32) // 2
        # Half an interval less: rounds do not begin at exact times.
        found.until_s = now_s + min(MAX_BACKOFF_S, self._every_s * (rounds + 0.5)) if rounds else now_s

    def succeeded(self, key: Hashable) -> None:
        """Note that it works, or that the next failure says nothing about it."""
        self._failing.pop(key, None)
