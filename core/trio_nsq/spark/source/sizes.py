"""Find how many messages of a log have a size."""

from ...client.reading.broker_log import Bounds
from ..logs import Log

_TRIES = 12
_ENOUGH = 0.9


def count_within(log: Log, start: Bounds, count: int, max_bytes: int) -> int:
    """Return about how many messages from `start.at` on have `max_bytes` together; from 1 to `count`.

    Bodies may differ in size: the log is asked for the size at some positions, at most `_TRIES`. Raises the errors of
    `Log.bounds`.
    """

    def size_of(messages: int) -> int:
        return start.bytes_ahead - log.bounds(str(start.at + messages)).bytes_ahead

    low, low_bytes = 0, 0
    high, high_bytes = count, size_of(count)
    if high_bytes <= max_bytes:
        return count
    for attempt in range(_TRIES):
        if high - low <= 1 or low_bytes >= _ENOUGH * max_bytes:
            break
        middle = (low + high) // 2
        if attempt % 2 == 0:  # in turn with halves, which end soon whatever the sizes are
            middle = low + (high - low) * (max_bytes - low_bytes) // max(1, high_bytes - low_bytes)
        middle = max(low + 1, min(middle, high - 1))
        size = size_of(middle)
        if size <= max_bytes:
            low, low_bytes = middle, size
        else:
            high, high_bytes = middle, size
    return max(1, low)
