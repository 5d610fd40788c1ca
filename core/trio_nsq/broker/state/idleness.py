"""Since when a topic or channel has not been used.

A use ends the idle time at once; that costs a comparison. The idle time begins when the next `idle_since` finds that
nothing uses the topic or channel, so up to one interval between these calls after the last use.
"""

from typing import Final

IN_USE: Final = 0
"""Stands for the begin of the idle time of a topic or channel that is used."""


def idle_since_by_other_clock(since_ns: int, ahead_ns: int) -> int:
    """Return since when a topic or channel has been idle by a clock that is ahead by `ahead_ns`."""
    return max(1, since_ns + ahead_ns) if since_ns != IN_USE else IN_USE


def idle_since(before_ns: int, now_ns: int, *, in_use: bool) -> int:
    """Return since when a topic or channel has been idle, or `IN_USE`. All times are Unix nanoseconds.

    Args:
        before_ns: The last result, or `IN_USE` if it was used since.
        in_use: It is used now.
    """
    if in_use:
        return IN_USE
    return (
        min(before_ns, now_ns) if before_ns else now_ns
    )  # the clock may have been set back before a restart
