"""A clock for trio, compiled: a broker reads trio's clock for each message, and trio's own is interpreted."""

from time import perf_counter

import trio


class MonotonicClock(trio.abc.Clock):
    """The clock of `time.perf_counter`, which trio's own reads, too."""

    def start_clock(self) -> None:
        """As `trio.abc.Clock`. It always runs."""

    def current_time(self) -> float:
        """As `trio.abc.Clock`."""
        return perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """As `trio.abc.Clock`."""
        return deadline - perf_counter()
