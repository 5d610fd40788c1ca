"""Tests for the producer's choice of a broker, without brokers."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.client.publishing.broker_rotation import BrokerRotation

MIN_S, MAX_S = 0.1, 15.0


def rotation(*addresses: str, random: Callable[[], float] = lambda: 0.0) -> BrokerRotation:
    turns = BrokerRotation(MIN_S, MAX_S, random)
    for address in addresses:
        turns.add(address)
    return turns


def test_available_brokers_take_turns() -> None:
    turns = rotation("a", "b", "c")
    for address in "abc":
        turns.record_usable(address, 0)
    assert [turns.choose() for _ in range(6)] == [*"abcabc"]
    turns.record_failure("b", 1)
    assert [turns.choose() for _ in range(4)] == [*"acac"]
    turns.record_usable("b", 2)
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
    turns.record_usable("a", 0)
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
        turns.record_usable("a", now)  # and lost at once
    assert delays == pytest.approx([min(MAX_S, MIN_S * 2**n) for n in range(10)])
    assert turns.record_failure("a", now + MAX_S) == pytest.approx(now + MAX_S + MIN_S)


def test_silent_broker_is_used_only_if_no_other_is_available() -> None:
    turns = rotation("a", "b", "c")
    for address in "abc":
        turns.record_usable(address, 0)
    assert turns.record_silence("a")
    assert not turns.record_silence("a")
    assert {turns.choose() for _ in range(4)} == {"b", "c"}
    turns.record_failure("b", 0)
    turns.record_failure("c", 0)
    assert not turns.has_available
    assert turns.choose() == "a"
    turns.record_answer("a")
    assert turns.has_available


def test_refusals_of_publishes_that_were_in_flight_count_once() -> None:
    turns = rotation("a", "b")
    for address in "ab":
        turns.record_usable(address, 0)
    assert turns.record_refusal("a", 1) == pytest.approx(1 + MIN_S)
    assert turns.record_refusal("a", 1) is None
    assert {turns.choose() for _ in range(2)} == {"b"}
    turns.record_usable("a", 2)  # its connection is still open
    assert turns.record_refusal("a", 2) == pytest.approx(2 + 2 * MIN_S)


def test_brokers_come_and_go() -> None:
    turns = rotation("a")
    assert turns.choose() == "a"
    turns.add("b")
    assert turns.due(0) == ["a", "b"]
    turns.record_usable("b", 0)
    turns.remove("a")
    assert turns.due(0) == []
    assert turns.choose() == "b"
    turns.record_silence("b")
    turns.remove("b")
    assert turns.choose() is None
    turns.add("b")
    turns.record_usable("b", 0)
    assert turns.has_available


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["usable", "failed", "refused", "silent", "answer", "come", "go", "choose", "due"]),
        st.integers(0, 3),
        st.floats(0, 20),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=60,
)


@given(EVENTS, st.sets(st.integers(0, 3)))
def test_random_histories(events: list[tuple[str, int, float, float]], shunned: set[int]) -> None:
    """No broker is forgotten, silent and failed brokers are chosen last, and the turns are fair."""
    addresses = [*"abcd"]
    jitters = [0.0]
    turns = rotation(random=lambda: jitters[-1])
    without = {addresses[number] for number in shunned}
    now = 0.0
    good: set[str] = set()
    silent: set[str] = set()
    retry_at: dict[str, float] = {}
    last_chosen: dict[str, int] = {}
    for step, (event, number, passed_s, jitter) in enumerate(events):
        now += passed_s
        jitters.append(jitter)
        address = addresses[number]
        if event == "come":
            if address not in retry_at:
                turns.add(address)
                retry_at[address] = float("-inf")
                last_chosen[address] = step - 1
            continue
        if event == "choose":
            chosen = turns.choose(without)
            candidates = retry_at.keys() - without
            if not candidates:
                assert chosen is None
                continue
            assert chosen in candidates
            if able := (good - silent) & candidates:
                assert chosen in able
                assert last_chosen[chosen] == min(last_chosen[other] for other in able)
            elif quiet := good & candidates:
                assert chosen in quiet | {a for a in candidates if retry_at[a] == float("-inf")}
            else:
                assert retry_at[chosen] == min(retry_at[other] for other in candidates)
            last_chosen[chosen] = step
            continue
        if event == "due":
            due = [a for a in retry_at if a not in good and retry_at[a] <= now]
            assert sorted(turns.due(now)) == sorted(due)
            continue
        if address not in retry_at:
            continue
        match event:
            case "usable":
                turns.record_usable(address, now)
                good.add(address)
                silent.discard(address)
            case "failed" | "refused":
                until = (turns.record_failure if event == "failed" else turns.record_refusal)(address, now)
                if until is None:
                    assert address not in good
                    continue
                # Sums, because a difference loses precision.
                assert now + MIN_S / 2 <= until <= now + MAX_S
                retry_at[address] = until
                good.discard(address)
                silent.discard(address)
            case "silent":
                turns.record_silence(address)
                silent.add(address)
            case "answer":
                turns.record_answer(address)
                silent.discard(address)
            case "go":
                turns.remove(address)
                good.discard(address)
                silent.discard(address)
                del retry_at[address]
        assert turns.has_available == bool(good - silent)
