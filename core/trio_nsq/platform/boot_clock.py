"""A clock that also runs while the machine sleeps, and that cannot be set."""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time_s() -> float:
    """Return the seconds since an unknown time before the start of this process."""
    return time.clock_gettime(_CLOCK)
