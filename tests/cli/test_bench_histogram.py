"""Tests for the distributions of `qcli bench`, beside a list of all times."""

import math

from hypothesis import given
from hypothesis import strategies as st

from qcli.commands.bench.histogram import PERCENTILES, Histogram

times = st.lists(st.floats(1e-6, 1000), min_size=1, max_size=200)


def histogram_of(times_s: list[float]) -> Histogram:
    histogram = Histogram()
    for time_s in times_s:
        histogram.add(time_s)
    return histogram


@given(times)
def test_percentiles_are_at_most_one_percent_too_high(times_s: list[float]) -> None:
    histogram = histogram_of(times_s)
    for share in PERCENTILES.values():
        exact = sorted(times_s)[max(0, math.ceil(share * len(times_s)) - 1)]
        assert exact <= histogram.quantile_s(share) * (1 + 1e-9)
        assert histogram.quantile_s(share) <= exact * 1.0101
    assert histogram.max_s == max(times_s)


@given(times)
def test_classes_for_people_have_every_time_below_their_limit(times_s: list[float]) -> None:
    classes = histogram_of(times_s).coarse()
    assert sum(count for _, count in classes) == len(times_s)
    assert classes[0][1] > 0
    assert classes[-1][1] > 0
    below = 0
    for limit_ms, count in classes:
        below += count
        # A class that reaches over a limit counts as above it.
        assert sum(1000 * time_s <= limit_ms / 1.0101 for time_s in times_s) <= below
        assert below <= sum(1000 * time_s <= limit_ms for time_s in times_s)


def test_no_times() -> None:
    assert (Histogram().figures_ms(), Histogram().coarse(), Histogram().mean_s) == ({}, [], 0.0)


def test_a_time_that_is_not_positive_counts_as_the_shortest() -> None:
    histogram = histogram_of([0.0, -1e-9])
    assert histogram.coarse() == [(0.01, 2)]
