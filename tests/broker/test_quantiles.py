"""Tests for the sketch of the latency percentiles, against the exact values."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.broker.state.quantiles import RELATIVE_ERROR, RecentSketch, Sketch

FRACTIONS = (1.0, 0.995, 0.99, 0.95, 0.5, 0.001)
DAY_NS = 24 * 3600 * 1_000_000_000
values_ns = st.lists(st.integers(1, DAY_NS) | st.integers(1, 1000), min_size=1, max_size=300)


def sketch_of(values: list[int]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


def exact(values: list[int], fraction: float) -> int:
    return sorted(values)[ceil(fraction * len(values)) - 1]


@given(values_ns)
def test_quantiles_have_the_guaranteed_accuracy(values: list[int]) -> None:
    found = sketch_of(values).quantiles(FRACTIONS)
    for fraction, value in zip(FRACTIONS, found, strict=True):
        # The estimate is rounded to a whole nanosecond.
        assert abs(value - exact(values, fraction)) <= RELATIVE_ERROR * exact(values, fraction) + 0.5


@given(values_ns, values_ns)
def test_merged_sketch_equals_a_common_one(some: list[int], others: list[int]) -> None:
    merged = sketch_of(some)
    merged.merge(sketch_of(others))
    together = sketch_of(some + others)
    assert merged.count == together.count == len(some) + len(others)
    assert merged.quantiles(FRACTIONS) == together.quantiles(FRACTIONS)


@given(st.integers(1, DAY_NS), st.integers(1, 1000))
def test_count_equals_repeated_values(value: int, count: int) -> None:
    at_once = Sketch()
    at_once.add(value, count)
    one_by_one = sketch_of([value] * count)
    assert at_once.count == count
    assert at_once.quantiles(FRACTIONS) == one_by_one.quantiles(FRACTIONS)


def test_empty_sketch_gives_zero() -> None:
    assert Sketch().quantiles((1.0, 0.5)) == [0, 0]
    assert Sketch().quantiles(()) == []


@pytest.mark.parametrize("value", [0, -1, -DAY_NS])
def test_negative_time_counts_as_short(value: int) -> None:
    assert sketch_of([value]).quantiles([1.0]) == [1]


def test_number_of_buckets_is_small() -> None:
    sketch = sketch_of([int(1.001**exponent) for exponent in range(7000, 32000)])  # 1 us to 20 h
    # Each bucket has about twenty of these values, so every bucket is one of the quantiles.
    assert 1000 < len(set(sketch.quantiles([n / 5_000 for n in range(1, 5_001)]))) < 1300


# ---------------------------------------------------------------------- window


def counts(window: RecentSketch, *times: int) -> list[int]:
    return [window.recent(now).count for now in times]


def test_value_leaves_after_half_a_window_to_a_window() -> None:
    window = RecentSketch(100)
    window.add(5, 3, now_ns=1000)  # starts the first half
    window.add(5, 1, now_ns=1049)
    assert counts(window, 1049, 1050, 1099, 1100) == [4, 4, 4, 0]


def test_halves_expire_separately() -> None:
    window = RecentSketch(100)
    window.add(5, 1, now_ns=1000)
    window.add(5, 2, now_ns=1050)
    window.add(5, 4, now_ns=1100)
    assert counts(window, 1149, 1150, 1199, 1200) == [6, 4, 4, 0]


def test_nothing_is_left_after_a_long_pause() -> None:
    window = RecentSketch(100)
    window.add(5, 1, now_ns=1000)
    assert counts(window, 5000) == [0]
    window.add(5, 1, now_ns=9000)
    assert counts(window, 9000) == [1]


def test_clock_set_back_does_not_keep_values_forever() -> None:
    window = RecentSketch(100)
    window.add(5, 1, now_ns=1_000_000)
    assert counts(window, 1000, 1050, 1100) == [1, 0, 0]


def test_queries_change_nothing() -> None:
    window = RecentSketch(100)
    window.add(5, 1, now_ns=1000)
    window.recent(1000).add(7, 100)
    window.recent(1060).add(7, 100)
    assert counts(window, 1060) == [1]


def test_halves_are_merged() -> None:
    window = RecentSketch(100)
    window.add(1000, 1, now_ns=1000)
    window.add(2000, 1, now_ns=1060)
    low, high = window.recent(1060).quantiles((0.5, 1.0))
    assert low == pytest.approx(1000, rel=RELATIVE_ERROR)
    assert high == pytest.approx(2000, rel=RELATIVE_ERROR)
