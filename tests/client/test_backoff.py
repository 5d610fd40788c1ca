"""Tests for the consumer's backoff: when it pauses after failures, and for how long."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soak import examples
from trio_nsq.client import ConsumerSettings
from trio_nsq.client.consuming.backoff import Backoff


def backoff(
    longest_s: float = 120.0,
    random: Callable[[], float] = lambda: 0.5,
    backoff_after: int = 1,
    **options: Any,
) -> Backoff:
    made = ConsumerSettings(max_backoff_duration_s=longest_s, backoff_after=backoff_after, **options)
    return Backoff(made, random)


def state(made: Backoff) -> tuple[int, int | None, float]:
    """Return the level, the limit of messages in flight, and the end of the pause."""
    return made.level, made.allowed, made.next_deadline()


def test_failures_double_the_pause_up_to_the_maximum() -> None:
    made, pauses, now = backoff(), [], 0.0
    for _ in range(8):
        made.record_failure(now)
        pauses.append(made.next_deadline() - now)
        now = made.next_deadline()
        made.handle_timer(now)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]  # 128 would exceed two minutes
    assert made.level == 6


def test_one_message_after_a_pause_and_none_during_it() -> None:
    made = backoff()
    assert state(made) == (0, None, math.inf)
    made.record_failure(10)
    assert state(made) == (1, 0, 12)
    made.handle_timer(11.9)
    assert state(made) == (1, 0, 12)
    made.handle_timer(12)
    assert state(made) == (1, 1, math.inf)
    made.record_success(13)
    assert state(made) == (0, None, math.inf)


def test_each_success_shortens_the_pauses() -> None:
    made = backoff()
    for now in (0.0, 2.0, 6.0):
        made.handle_timer(now)
        made.record_failure(now)
    assert (made.level, made.next_deadline()) == (3, 14)
    made.handle_timer(14)
    made.record_success(20)
    assert (made.level, made.next_deadline()) == (2, 24)
    made.handle_timer(24)
    made.record_success(24)
    assert (made.level, made.next_deadline()) == (1, 26)
    made.handle_timer(26)
    made.record_success(26)
    assert state(made) == (0, None, math.inf)


def test_one_decision_per_pause() -> None:
    made = backoff()
    made.record_failure(0)
    for now in (0.0, 1.0, 1.9):
        made.record_failure(now)
        made.record_success(now)
        made.record_requeue(now)
    assert (made.level, made.next_deadline()) == (1, 2)


def test_requeue_without_failure_does_not_count() -> None:
    made = backoff()
    made.record_requeue(0)
    assert state(made) == (0, None, math.inf)
    made.record_failure(0)
    made.handle_timer(2)
    made.record_requeue(3)
    assert state(made) == (1, 0, 5)


def test_failures_among_successes_cause_no_pause() -> None:
    made = backoff(backoff_after=3)
    for _ in range(100):
        made.record_failure(0)
        made.record_failure(0)
        made.record_requeue(0)
        made.record_success(0)
    assert state(made) == (0, None, math.inf)
    for _ in range(3):
        made.record_failure(0)
    assert state(made) == (1, 0, 2)


def test_each_failure_after_a_pause_counts() -> None:
    made = backoff(backoff_after=3)
    for _ in range(3):
        made.record_failure(0)
    made.handle_timer(2)
    made.record_failure(2)
    assert state(made) == (2, 0, 6)


@pytest.mark.parametrize("options", [{"longest_s": 0}, {"longest_s": 1.9}, {"backoff_multiplier_s": 0}])
def test_backoff_can_be_disabled(options: dict[str, Any]) -> None:
    made = backoff(**options)
    made.record_failure(0)
    assert state(made) == (0, None, math.inf)


def test_multiplier_is_half_of_the_first_pause() -> None:
    made = backoff(backoff_multiplier_s=0.05)
    made.record_failure(0)
    assert made.next_deadline() == 0.1


def test_full_jitter_takes_any_part_of_the_pause() -> None:
    draws = iter([0.0, 0.25, 0.75])
    made = backoff(backoff_strategy="full_jitter", random=lambda: next(draws))
    for now, pause_s in ((0.0, 0.0), (10.0, 1.0), (20.0, 6.0)):
        made.handle_timer(now)
        made.record_failure(now)
        assert made.next_deadline() - now == pause_s


RESULTS = st.lists(
    st.tuples(
        st.sampled_from(["record_failure", "record_success", "record_requeue", "wait"]), st.floats(0, 100)
    )
)


@settings(max_examples=examples(60))
@given(
    RESULTS,
    st.floats(0, 3600),
    st.floats(0, 3600),
    st.sampled_from(["exponential", "full_jitter"]),
    st.randoms(use_true_random=False),
)
def test_pauses_always_end_and_successes_restore_the_full_rate(
    results: list[tuple[str, float]], longest_s: float, multiplier_s: float, strategy: Any, random: Any
) -> None:
    made = backoff(
        longest_s, backoff_multiplier_s=multiplier_s, backoff_strategy=strategy, random=random.random
    )
    now = 0.0
    for what, elapsed_s in results:
        now += elapsed_s
        before = made.level, made.next_deadline()
        if what == "wait":
            made.handle_timer(now)
        else:
            getattr(made, what)(now)
        if before[1] < math.inf and what != "wait":
            assert (made.level, made.next_deadline()) == before
        assert 0 <= made.level <= before[0] + 1
        assert made.allowed is None or made.level > 0
        if made.next_deadline() < math.inf:
            assert made.allowed == 0
            assert made.next_deadline() <= now + longest_s
    for _ in range(made.level):
        assert made.level > 0
        made.handle_timer(now := now + longest_s)
        assert made.allowed == 1
        made.record_success(now)
    assert made.allowed is None
