"""Check the verdicts of the benchmarks on plain numbers."""

import random
from collections.abc import Sequence

import pytest
from bench.verdicts import judge_change, judge_goal, judge_limit, median_interval


@pytest.mark.parametrize(
    ("values", "coverage", "interval"),
    [
        ([3, 1, 2], 0.9, (1, 3)),
        ([5, 1, 4, 2, 3], 0.9, (1, 5)),
        (range(1, 9), 0.9, (2, 7)),
        (range(1, 9), 0.99, (1, 8)),
        (range(1, 13), 0.99, (2, 11)),
        (range(1, 17), 0.99, (3, 14)),
    ],
)
def test_interval_of_median(values: Sequence[float], coverage: float, interval: tuple[float, float]) -> None:
    assert median_interval(values, coverage) == interval


def test_interval_covers_median_as_often_as_required() -> None:
    numbers = random.Random(1)
    covered = 0
    for _ in range(4000):
        low, high = median_interval([numbers.lognormvariate(0, 0.5) for _ in range(9)], 0.9)
        covered += low <= 1 <= high
    assert 0.9 <= covered / 4000 < 1


@pytest.mark.parametrize(
    ("ratios", "goal", "verdict"),
    [
        ([1.3, 1.2, 1.4, 1.25], 1.1, ""),  # too few rounds
        ([1.3, 1.2, 9.0, 1.25, 1.2], 1.1, "reached"),  # all rounds agree: the spread does not matter
        ([0.9, 0.2, 1.0, 0.95, 1.05], 1.1, "MISSED"),
        ([1.05, 1.12, 1.15, 1.2, 1.11], 1.1, "reached"),  # steady: the median decides
        ([1.05, 1.02, 1.15, 1.2, 1.08], 1.1, "MISSED"),
        ([0.7, 1.12, 1.4, 1.2, 1.11], 1.1, "too noisy"),
    ],
)
def test_goal_is_judged_by_median_and_spread(ratios: Sequence[float], goal: float, verdict: str) -> None:
    assert judge_goal(ratios, goal) == verdict


def test_goal_is_an_upper_limit_if_less_is_better() -> None:
    ratios = [0.5, 0.6, 0.55, 0.7, 0.6]
    assert judge_goal(ratios, 0.8, less=True) == "reached"
    assert judge_goal(ratios, 0.4, less=True) == "MISSED"
    assert judge_goal([0.0] * 5, 1.0, less=True) == "reached"


def test_busy_machine_widens_the_interval_of_a_goal() -> None:
    ratios = [1.2, 1.21, 1.22, 1.2, 1.2]
    assert judge_goal(ratios, 1.1, others=0.05) == "reached"
    assert judge_goal(ratios, 1.1, others=0.3) == "too noisy"
    assert judge_goal([2.2, 2.3, 2.1, 2.2, 2.2], 1.1, others=0.3) == "reached"


def test_median_does_not_decide_if_processor_time_varies() -> None:
    ratios = [1.05, 1.12, 1.15, 1.2, 1.11]
    assert judge_goal(ratios, 1.1, cpu_ratios=[0.5, 0.52, 0.55, 0.51, 0.5]) == "reached"
    assert judge_goal(ratios, 1.1, cpu_ratios=[0.5, 0.52, 0.95, 0.51, 0.5]) == "too noisy"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.08, 1.1, 1.12, 1.09, 1.11, 1.1, 1.05, 1.2, 1.1, 1.1], "slower"),
        ([0.9, 0.92, 0.88, 0.91, 0.9, 0.9, 0.85, 0.95, 0.9, 0.93], "faster"),
        ([1.01, 1.02, 1.01, 1.02, 1.01, 1.01, 1.02, 1.02, 1.01, 1.01], "no difference found"),  # too small
        ([1.01, 0.98, 1.03, 0.97, 1.0, 1.01, 0.99, 1.02, 1.0, 0.98], "no difference found"),
        ([1.3, 0.8, 1.03, 0.77, 1.0, 1.21, 0.99, 1.02, 1.0, 0.98], "too noisy"),
        ([1.3] * 7, ""),  # too few rounds
    ],
)
def test_change_is_judged_by_interval_and_size(ratios: Sequence[float], verdict: str) -> None:
    assert judge_change(ratios) == verdict


def test_limit_of_every_round() -> None:
    assert judge_limit([0.9, 1.1], 1.15) == "reached"
    assert judge_limit([1.2, 1.3], 1.15) == "MISSED"
    assert judge_limit([1.1, 1.3], 1.15) == "too noisy"
    assert judge_limit([0.6, 0.9], 0.5, at_least=True) == "reached"
