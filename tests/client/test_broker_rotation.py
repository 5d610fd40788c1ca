"""Tests for the producer's choice of a broker, without brokers."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.client.publishing.broker_rotation import BrokerRotation

MIN_S, MAX_S = 0.1, 15.0


def rotation(*addresses: str, random: Callable[[], float] = lambda: 0.0) -> BrokerRotation:
    return BrokerRotation(addresses, MIN_S, MAX_S, random)


def test_available_brokers_take_turns() -> None:
    turns = rotation("a", "b", "c")
    for address in "abc":
        turns.record_connected(address, 0)
    assert [turns.choose() for _ in range(6)] == [*"abcabc"]
    turns.record_failure("b", 1)
    assert [turns.choose() for _ in range(4)] == [*"acac"]
    turns.record_connected("b", 2)
    assert sorted(str(turns.choose()) for _ in range(3)) == [*"abc"]


def test_without_available_brokers_the_next_to_retry_is_chosen() -> None:
    turns = rotation("a", "b")
    turns.record_failure("a", 0)
    turns.record_failure("a", 0.1)
    turns.record_failure("b", 0.1)
    assert [turns.choose(), turns.choose()] == ["b", "b"]
    assert turns.choose(without=["b"]) == "a"
    assert turns.choose(without=["a", "b"]) is None


def test_brokers_to_try_are_all_at_first_and_failed_ones_when_due() -> None:
    turns = rotation("a", "b")
    assert turns.due(-1e9) == ["a", "b"]
    turns.record_connected("a", 0)
    assert turns.record_failure("b", 0) == MIN_S
    assert turns.due(MIN_S / 2) == []
    assert turns.due(MIN_S) == ["b"]


def test_delays_grow_until_a_connection_has_lasted() -> None:
    turns = rotation("a")
    now, delays = 0.0, []
    for _ in range(10):
        until = turns.record_failure("a", now)
        delays.append(until - now)
        now = until
        turns.record_connected("a", now)  # and lost at once
    assert delays == pytest.approx([min(MAX_S, MIN_S * 2**n) for n in range(10)])
    assert turns.record_failure("a", now + MAX_S) == pytest.approx(now + MAX_S + MIN_S)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["connected", "failed", "choose", "due"]),
        st.integers(0, 3),
        st.floats(0, 20),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=60,
)


@given(EVENTS, st.sets(st.integers(0, 3)))
def test_random_histories(events: list[tuple[str, int, float, float]], shunned: set[int]) -> None:
    """No broker is forgotten, failed brokers are chosen last, and the turns are fair."""
    addresses = [*"abcd"]
    jitters = [0.0]
    turns = rotation(*addresses, random=lambda: jitters[-1])
    without = {addresses[number] for number in shunned}
    now = 0.0
    good: set[str] = set()
    retry_at = dict.fromkeys(addresses, float("-inf"))
    last_chosen = dict.fromkeys(addresses, -1)
    for step, (event, number, passed_s, jitter) in enumerate(events):
        now += passed_s
        jitters.append(jitter)
        address = addresses[number]
        match event:
            case "connected":
                turns.record_connected(address, now)
                good.add(address)
            case "failed":
                retry_at[address] = turns.record_failure(address, now)
                assert (
                    now + MIN_S / 2 <= retry_at[address] <= now + MAX_S
                )  # sums, because a difference loses precision
                good.discard(address)
            case "choose":
                chosen = turns.choose(without)
                candidates = set(addresses) - without
                if not candidates:
                    assert chosen is None
                    continue
                assert chosen in candidates
                if able := good & candidates:
                    assert chosen in able
                    assert last_chosen[chosen] == min(last_chosen[other] for other in able)
                else:
                    assert retry_at[chosen] == min(retry_at[other] for other in candidates)
                last_chosen[chosen] = step
            case "due":
                assert sorted(turns.due(now)) == [
                    a for a in addresses if a not in good and retry_at[a] <= now
                ]
