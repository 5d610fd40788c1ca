"""Tests for the rate and the time left that `pub` and `replay` show while they run."""

import pytest

from qcli.terminal.progress import REFRESH_S, SHORTEST_S, WINDOW_S, RecentRate, TimeLeft

PER_S, SLICE_S = 1000, 0.05
"""Seconds of messages per batch, as with `--rate`."""


def published(now_s: float, begun_s: float) -> int:
    """Return how many messages of a steady stream have been sent after some time, if they are sent in
    batches.
    """
    return 0 if now_s < begun_s else (int((now_s - begun_s) / SLICE_S) + 1) * int(PER_S * SLICE_S)


@pytest.mark.parametrize("begun_s", [0.0, 0.13, 4.99])
def test_steady_rate_is_shown_exactly(begun_s: float) -> None:
    recent = RecentRate()
    times = [begun_s // REFRESH_S * REFRESH_S + REFRESH_S * number for number in range(60)]
    rates = [recent.after(now_s, published(now_s, begun_s)) for now_s in times]
    shown = [rate for rate in rates if rate is not None]
    assert len(shown) >= 50
    assert all(rate is None for now_s, rate in zip(times, rates, strict=True) if now_s < begun_s + SHORTEST_S)
    assert shown == pytest.approx([PER_S] * len(shown), rel=0.06)
    assert shown[25:] == pytest.approx([PER_S] * len(shown[25:]), rel=0.012)


def test_old_samples_are_forgotten() -> None:
    recent = RecentRate()
    recent.after(0.0, 1)
    for second in range(1, 30):
        rate = recent.after(float(second), 1001)
    assert rate == 0
    assert WINDOW_S < 29
    assert RecentRate().after(1.0, 0) is None


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(0.01, "75 s left"), (0.001, "13 min left"), (0.00001, "21 h left"), (1e-7, "days left")],
)
def test_time_left_of_a_steady_stream(per_s: float, text: str) -> None:
    left = TimeLeft()
    begun = 0.255 - per_s * 10
    for second in range(11):
        found = left.after(float(second), begun + per_s * second)
        assert (found == "") == (second == 0)
    assert found == text


def test_no_time_left_if_it_is_unknown_or_nothing_is_left() -> None:
    left = TimeLeft()
    assert [left.after(float(second), None) for second in range(9)] == [""] * 9
    assert [left.after(float(second), 0.5) for second in range(9)] == [""] * 9  # no progress
    assert left.after(9.0, 1.0) == ""
