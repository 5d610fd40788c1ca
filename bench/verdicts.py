"""Verdicts on measured ratios: whether a goal is reached, a change is a difference, and a cost grows too fast.

Functions of plain numbers. docs/decisions/0029-judging-measurements.md gives the reasons.
"""

import math
import statistics
from collections.abc import Sequence

REACHED, MISSED, TOO_NOISY = "reached", "MISSED", "too noisy"
FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference found"
FEWEST_ROUNDS, FEWEST_CHANGE_ROUNDS = 5, 8
"""With fewer rounds there is no verdict: no interval has the coverage below."""
GOAL_COVERAGE, CHANGE_COVERAGE = 0.9, 0.99
"""How often the interval of a median must cover the median. `bench/quick.py` judges many workloads at once."""
STEADY = 1.25
"""The largest ratio of maximum to minimum at which a median alone decides."""
MOST_OTHERS = 0.15
"""The largest share of the processors for other processes at which a median alone decides."""
LEAST_CHANGE = 1.03
"""A smaller difference of processor time is none: two processes of the same code differ by as much."""
SEEN_CHANGE = 1.10
"""A measurement that could miss a larger difference than this is too noisy."""


def median_interval(values: Sequence[float], coverage: float) -> tuple[float, float]:
    """Return the narrowest interval between two values that covers the median with this probability.

    The interval leaves out equally many values at both ends. It needs no assumption about the distribution: the number
    of values below the median is binomial. With too few values, it is their minimum and maximum.
    """
    ordered, count = sorted(values), len(values)
    left_out, outside = 0, 2 * math.comb(count, 0) / 2**count
    while left_out + 1 < count - left_out - 1:
        outside += 2 * math.comb(count, left_out + 1) / 2**count
        if 1 - outside < coverage:
            break
        left_out += 1
    return ordered[left_out], ordered[count - 1 - left_out]


def spread(values: Sequence[float]) -> float:
    """Return the maximum divided by the minimum; 1 if all are 0."""
    least, most = min(values), max(values)
    return most / least if least else math.inf if most else 1.0


def judge_goal(
    ratios: Sequence[float],
    goal: float,
    *,
    less: bool = False,
    cpu_ratios: Sequence[float] = (),
    others: float = 0.0,
) -> str:
    """Judge a goal.

    Args:
        ratios: Our figure divided by the other broker's, one for each round.
        goal: The ratio to reach.
        less: Less is better; the goal is an upper limit.
        cpu_ratios: The same of the processor time per message; empty if there is none.
        others: The share of the processors that other processes took, 0 to 1.

    Returns:
        `REACHED` or `MISSED` if the whole interval of the median is on one side of the goal, widened by `others`.
        Else what the median says, if `ratios`, `cpu_ratios` and the machine were steady, and `TOO_NOISY` if not. Empty
        with less than `FEWEST_ROUNDS`.
    """
    if len(ratios) < FEWEST_ROUNDS:
        return ""
    low, high = median_interval(ratios, GOAL_COVERAGE)
    low, high = low * (1 - others), high / (1 - others)
    if low >= goal or high <= goal:
        return REACHED if (high <= goal if less else low >= goal) else MISSED
    steady = max(spread(ratios), spread(cpu_ratios or [1.0])) <= STEADY and others <= MOST_OTHERS
    if not steady:
        return TOO_NOISY
    median = statistics.median(ratios)
    return REACHED if (median <= goal if less else median >= goal) else MISSED


def judge_change(ratios: Sequence[float]) -> str:
    """Judge a change of a cost.

    Args:
        ratios: The cost with the change divided by the cost without it, one for each round.

    Returns:
        `FASTER` or `SLOWER` if the whole interval of the median is on one side of 1, and the median differs by
        `LEAST_CHANGE` or more. Else `NO_DIFFERENCE`, if the interval is within `SEEN_CHANGE`, and `TOO_NOISY` if not.
        Empty with less than `FEWEST_CHANGE_ROUNDS`.
    """
    if len(ratios) < FEWEST_CHANGE_ROUNDS:
        return ""
    low, high = median_interval(ratios, CHANGE_COVERAGE)
    median = statistics.median(ratios)
    if low > 1 and median >= LEAST_CHANGE:
        return SLOWER
    if high < 1 and median <= 1 / LEAST_CHANGE:
        return FASTER
    return NO_DIFFERENCE if low >= 1 / SEEN_CHANGE and high <= SEEN_CHANGE else TOO_NOISY


def judge_limit(values: Sequence[float], limit: float, *, at_least: bool = False) -> str:
    """Judge a figure of every round against an upper limit, or a lower one with `at_least`.

    Returns:
        `REACHED` or `MISSED` if all rounds agree, else `TOO_NOISY`.
    """
    kept = [value >= limit if at_least else value <= limit for value in values]
    return REACHED if all(kept) else TOO_NOISY if any(kept) else MISSED
