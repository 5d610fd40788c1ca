"""What the progress of a stream shows: the ends of the logs, the lag, and the rate of publishes."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ...client.errors import BrokerUnreachable
from .fleet import LogKey
from .offsets import LogOffset, LogOffsets

_RATE_S = 60.0
"""The time over which rates are averaged."""
_MIN_RATE_S = 1.0


class Progress:
    """The state of the logs, as of the last answers."""

    def __init__(self) -> None:
        self._shown: dict[LogKey, dict[str, Any]] = {}
        self._history: dict[LogKey, deque[tuple[float, int]]] = {}  # times and ends

    def update(
        self, positions: LogOffsets, ends: Mapping[LogKey, int], away: Mapping[LogKey, BrokerUnreachable]
    ) -> None:
        """Set what `report` returns.

        Args:
            positions: Where the next batch ends.
            ends: The ends of the logs that have ever answered.
            away: The errors of those that do not answer now.
        """
        self._shown = {}
        for key, position in positions.items():
            shown: dict[str, Any] = {}
            if key in ends:
                shown["sequence"] = ends[key]
                if isinstance(position, LogOffset):
                    shown["behind"] = max(0, ends[key] - position.sequence)
                if key not in away and (rate := self._rate(key, ends[key])) is not None:
                    shown["published_per_s"] = rate
            if key in away:
                shown["away"] = away[key].reason
            self._shown[key] = shown

    def report(self) -> dict[LogKey, dict[str, Any]]:
        """Return the state of each log."""
        return self._shown

    def _rate(self, key: LogKey, end: int) -> float | None:
        """Add an end; return the publishes per second; None: not known yet."""
        now_s = time.monotonic()
        history = self._history.setdefault(key, deque())
        if not history or now_s - history[-1][0] >= _MIN_RATE_S:
            history.append((now_s, end))
        while len(history) > 2 and history[1][0] <= now_s - _RATE_S:
            history.popleft()
        since_s, before = history[0]
        return round((end - before) / (now_s - since_s), 1) if now_s - since_s >= _MIN_RATE_S else None
