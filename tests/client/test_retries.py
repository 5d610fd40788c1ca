import pytest

from trio_nsq.event_loop.retries import Delays, reconnect_delays


def test_delays_double_up_to_the_maximum() -> None:
    delays = Delays(0.1, 1.0, lambda: 0.0)
    assert [delays.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_removes_up_to_half() -> None:
    draws = iter([0.0, 0.5, 1.0])
    delays = Delays(1.0, 1.0, lambda: next(draws))
    assert [delays.next_s() for _ in range(3)] == [1.0, 0.75, 0.5]


def test_only_a_lasting_connection_resets_the_delay() -> None:
    delays = Delays(0.1, 1.0, lambda: 0.0)
    for _ in range(3):
        delays.next_s()
    delays.connection_lasted(0.9)
    assert delays.next_s() == 0.8
    delays.connection_lasted(1.0)
    assert delays.next_s() == 0.1


@pytest.mark.parametrize(("min_s", "max_s"), [(0, 1), (-1, 1), (2, 1)])
def test_invalid_limits_are_refused(min_s: float, max_s: float) -> None:
    with pytest.raises(ValueError, match="in order"):
        Delays(min_s, max_s, lambda: 0.0)
    with pytest.raises(ValueError, match="reconnect_min_s is"):
        reconnect_delays(min_s, max_s, lambda: 0.0)
