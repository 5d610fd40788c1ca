"""How many messages may wait for slow receivers. No IO; time is a parameter.

A broker delivers a message again after its longest message timeout, however often it is touched. So a source has no
more messages in flight than receivers take within a part of it.
"""

import math
from dataclasses import dataclass

_PART = 0.8
"""Messages that wait are sent, and their requests end, within this part of the broker's longest message timeout."""
_DECAY = 0.8
"""How much of the duration of slow requests is left after each faster one."""


@dataclass(slots=True)
class Pace:
    """The duration of requests.

    Attributes:
        request_s: That of the slow ones; infinity: none has ended yet.
    """

    request_s: float = math.inf

    def record(self, elapsed_s: float) -> None:
        """Record a request that ended."""
        before = self.request_s if self.request_s < math.inf else 0.0
        self.request_s = max(elapsed_s, _DECAY * before)

    def send_until(self, received_at: float, max_timeout_s: float) -> float:
        """Return up to when a message may be sent, so that its request ends before it times out.

        If requests take longer than that anyway, waiting less does not help.
        """
        if self.request_s >= max_timeout_s:
            return math.inf
        return received_at + max_timeout_s - self.request_s

    def rounds(self, max_timeout_s: float) -> int:
        """Return how many requests, one after the other, end before a message times out; at least 1.

        Args:
            max_timeout_s: Infinite before the first message of a source.
        """
        if math.inf in (self.request_s, max_timeout_s):
            return 1
        return max(1, int(_PART * max_timeout_s / max(self.request_s, 0.001)))
