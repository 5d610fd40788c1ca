"""Tests for the broker's clock on a busy machine."""

from time import perf_counter

import pytest
import trio

from trio_nsq.broker.clock import BrokerClock


class InterruptedClock(trio.abc.Clock):
    """A clock that other programs hold up for 2 ms, in each third look at it."""

    def __init__(self) -> None:
        self._looks = 0

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        self._looks += 1
        if self._looks % 3 == 1:
            over_s = perf_counter() + 0.002
            while perf_counter() < over_s:
                pass
        return perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - perf_counter()


@pytest.fixture
def clock() -> InterruptedClock:
    return InterruptedClock()


async def test_due_times_do_not_change_because_other_programs_run(clock: InterruptedClock) -> None:
    for _ in range(10):
        broker_clock = BrokerClock()
        assert {broker_clock.ahead_ns() for _ in range(7)} == {0}
