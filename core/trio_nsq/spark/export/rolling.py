"""When a continuous export writes files: as soon as one has its size, or its oldest message is too old to wait.

Messages that wait are in no range yet: nothing is stored about them, a channel is not moved past them, and the next run
continues with them.
"""

from ...client.reading.broker_log import Bounds
from ..logs import Log, resolve


def due_until(log: Log, first: int, bounds: Bounds, per_range: int, max_age_s: float) -> int:
    """Return the sequence up to which messages are exported now; `first` if all of them wait.

    Args:
        first: The first message that is not planned; retention may have deleted it.
        bounds: Messages before `at` can be exported.
        per_range: How many messages a file has.
        max_age_s: How long a message may wait, from its publish on.

    Raises the errors of `Log.bounds`.
    """
    oldest = max(first, bounds.first)
    waiting = bounds.at - oldest
    if waiting <= 0:
        return bounds.at
    _, fresh_from = resolve(log, f"-{int(max_age_s * 1000)}ms")
    if fresh_from > oldest:
        return bounds.at
    whole = waiting // per_range * per_range
    return oldest + whole if whole else first
