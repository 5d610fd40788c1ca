"""Tests for sharing RDY counts between connections: examples and properties."""

import math
import random
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soak import examples
from trio_nsq.client import ConsumerSettings
from trio_nsq.client.consuming.rdy_distribution import ReadyDistribution, even_shares

IDLE_S, OVER_S, INTERVAL_S = 10.0, 30.0, 5.0


def distribution(limit: int, *keys: str, max_rdy_count: int = 2500, seed: int = 0) -> ReadyDistribution[str]:
    """Return a distribution to connections that were all made at time 0."""
    settings = ConsumerSettings(
        low_rdy_idle_timeout_s=IDLE_S,
        low_rdy_timeout_s=OVER_S,
        rdy_redistribute_interval_s=INTERVAL_S,
    )
    made: ReadyDistribution[str] = ReadyDistribution(settings, random.Random(seed).random)
    made.set_limit(limit, 0)
    for key in keys:
        made.add(key, max_rdy_count, 0)
    return made


def holders(made: ReadyDistribution[str]) -> set[str]:
    return {key for key, ready in made.ready_counts.items() if ready}


# ------------------------------------------------------------------------------------------------ enough for all


@pytest.mark.parametrize(
    ("total", "maxima", "shares"),
    [
        (5, [], []),
        (0, [9, 9], [0, 0]),
        (5, [9], [5]),
        (6, [9, 9, 9], [2, 2, 2]),
        (7, [9, 9, 9], [3, 2, 2]),
        (8, [9, 9, 9], [3, 3, 2]),
        (10, [2, 9, 9], [2, 4, 4]),
        (10, [9, 1, 3], [6, 1, 3]),
        (99, [2, 3, 4], [2, 3, 4]),
        (5, [0, 9], [0, 5]),
    ],
)
def test_even_shares(total: int, maxima: list[int], shares: list[int]) -> None:
    assert even_shares(total, maxima) == shares


@settings(max_examples=examples(60))
@given(st.integers(0, 300), st.lists(st.integers(0, 100), max_size=8))
def test_shares_are_even_within_the_maxima_and_use_everything(total: int, maxima: list[int]) -> None:
    shares = even_shares(total, maxima)
    assert sum(shares) == min(total, sum(maxima))
    open_ones = [share for share, most in zip(shares, maxima, strict=True) if share < most]
    assert all(share <= most for share, most in zip(shares, maxima, strict=True))
    # A connection below its maximum has at most one less than any other, and no less than a later one with
    # the same maximum.
    assert all(max(shares) - share <= 1 for share in open_ones)
    for most in maxima:
        alike = [share for share, other in zip(shares, maxima, strict=True) if other == most]
        assert alike == sorted(alike, reverse=True)


def test_share_of_a_lost_connection_goes_to_the_others() -> None:
    made = distribution(5, "a", "b")
    assert made.ready_counts == {"a": 3, "b": 2}
    made.remove("a", 1)
    assert made.ready_counts == {"b": 5}
    made.add("c", 2500, 2)
    assert made.ready_counts == {"b": 3, "c": 2}


def test_excess_over_a_maximum_goes_to_others() -> None:
    made = distribution(100, "a")
    made.add("b", 10, 0)
    assert made.ready_counts == {"a": 90, "b": 10}


def test_with_enough_for_all_no_share_moves() -> None:
    made = distribution(3, "a", "b", "c")
    assert made.next_deadline() == math.inf
    made.redistribute(1e9)
    assert made.ready_counts == {"a": 1, "b": 1, "c": 1}


# ------------------------------------------------------------------------------------------------ not enough


def test_max_in_flight_connections_get_one_each() -> None:
    made = distribution(2, "a", "b", "c", "d")
    assert made.ready_counts == {"a": 1, "b": 1, "c": 0, "d": 0}
    made.remove("a", 1)
    assert sum(made.ready_counts.values()) == 2
    made.remove("b", 1)
    assert made.ready_counts == {"c": 1, "d": 1}


def test_idle_connection_passes_on_its_share() -> None:
    made = distribution(1, "a", "b")
    assert made.next_deadline() == IDLE_S
    made.redistribute(IDLE_S - 0.001)
    assert holders(made) == {"a"}
    made.redistribute(IDLE_S)
    assert holders(made) == {"b"}
    assert made.next_deadline() == 2 * IDLE_S


def test_messages_delay_that_for_a_limited_time() -> None:
    made = distribution(1, "a", "b")
    for now in (5.0, 14.0, 23.0, 29.0):
        made.record_messages("a", now)
        made.redistribute(now)
        assert holders(made) == {"a"}
    assert made.next_deadline() == OVER_S
    made.redistribute(OVER_S)
    assert holders(made) == {"b"}


def test_connection_with_a_message_in_work_is_not_idle() -> None:
    made = distribution(1, "a", "b")
    made.redistribute(IDLE_S, busy={"a"})
    assert holders(made) == {"a"}
    assert made.next_deadline() == IDLE_S + INTERVAL_S
    made.redistribute(OVER_S, busy={"a"})
    assert holders(made) == {"b"}


def test_moves_respect_the_interval() -> None:
    made = distribution(2, "a", "b", "c")
    made.record_messages("b", 1.0)
    made.redistribute(IDLE_S)
    assert holders(made) == {"b", "c"}
    assert made.next_deadline() == IDLE_S + INTERVAL_S  # and not 11, when b has been idle for ten seconds
    made.redistribute(11.0)
    assert holders(made) == {"b", "c"}
    made.redistribute(IDLE_S + INTERVAL_S)
    assert holders(made) == {"a", "c"}


def test_time_starts_when_shares_become_scarce() -> None:
    made = distribution(2, "a", "b")
    made.add("c", 2500, 1000)
    for key in "ab":
        made.record_messages(key, 1000)
    assert made.next_deadline() == 1000 + IDLE_S
    for key in "ab":
        made.record_messages(key, 1029)
    assert made.next_deadline() == 1000 + OVER_S


def test_after_zero_one_share_goes_to_any_connection() -> None:
    made = distribution(90, "a", "b", "c")
    first = set()
    for now in range(20):
        made.set_limit(0, now)
        assert holders(made) == set()
        assert made.next_deadline() == math.inf
        made.set_limit(1, now)
        assert sum(made.ready_counts.values()) == 1
        first |= holders(made)
        made.set_limit(90, now)
        assert made.ready_counts == {"a": 30, "b": 30, "c": 30}
    assert first == {"a", "b", "c"}


@settings(max_examples=examples(60))
@given(st.integers(1, 5), st.integers(1, 12), st.booleans(), st.integers())
def test_each_connection_has_its_turn(limit: int, more: int, messages: bool, seed: int) -> None:
    keys = [f"broker {number}" for number in range(limit + more)]
    made = distribution(limit, *keys, seed=seed)
    had: set[str] = set(holders(made))
    last = 0.0
    while had != set(keys):
        now = made.next_deadline()
        if messages:
            for key in holders(made):
                made.record_messages(key, now)
        made.redistribute(now)
        had |= holders(made)
        last = now
    rounds = math.ceil(len(keys) / limit) - 1
    assert last <= rounds * ((OVER_S if messages else IDLE_S) + INTERVAL_S)


# ------------------------------------------------------------------------------------------------ properties

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("limit"), st.integers(0, 12)),
        st.tuples(st.just("heard"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.floats(0, 40)),
        st.tuples(st.just("deadline"), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(max_examples=examples(60))
@given(STEPS, st.integers())
def test_sum_of_shares_equals_the_limit(steps: list[tuple[str, Any]], seed: int) -> None:
    made, limit, now, names = distribution(4, seed=seed), 4, 0.0, count()
    maxima: dict[str, int] = {}
    for what, number in steps:
        some = list(maxima)[number % len(maxima)] if maxima and what != "wait" else None
        match what:
            case "add":
                name = f"broker {next(names)}"
                maxima[name] = number
                made.add(name, number, now)
            case "remove" if some:
                del maxima[some]
                made.remove(some, now)
            case "limit":
                limit = number
                made.set_limit(limit, now)
            case "heard" if some:
                made.record_messages(some, now)
            case "wait":
                now += number
                made.redistribute(now)
            case "deadline" if made.next_deadline() < math.inf:
                now = max(now, made.next_deadline())
                made.redistribute(now, busy={some} if some else ())
        counts = made.ready_counts
        assert list(counts) == list(maxima)
        assert all(counts[name] <= maxima[name] for name in counts)
        if len(maxima) <= limit:
            assert sum(counts.values()) == min(limit, sum(maxima.values()))
            assert all(counts[name] for name in counts if maxima[name])
        else:
            assert set(counts.values()) <= {0, 1}
            assert sum(counts.values()) == min(limit, sum(map(bool, maxima.values())))
        if what in ("wait", "deadline"):
            assert made.next_deadline() > now
