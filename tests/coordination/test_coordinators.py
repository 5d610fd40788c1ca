"""Tests that hold for all coordinators that elect a leader."""

import threading
from collections.abc import Callable

import pytest

from coordination.conftest import candidate, led_by
from trio_nsq.coordination.interface import Coordinator, LeadershipLost, Observation, ValueChanged
from trio_nsq.coordination.state import NotInSync, OutdatedState, RecordedArchive, StateError
from trio_nsq.platform.boot_clock import boot_time_s

Open = Callable[..., Coordinator]
A, B, C = map(candidate, "ABC")
PATIENCE_S = 60.0


def add(coordinator: Coordinator, name: str) -> None:
    """Let a member be in sync with the leader."""
    led = led_by(coordinator)
    coordinator.replace(led.joined(name, candidate(name).addresses).synced(name), led)


def test_one_leads(opened: Open) -> None:
    one, two = opened(), opened()
    assert one.read() == Observation(None, is_held=False)
    began_s = boot_time_s()
    assert one.certain_until_s is None
    epoch = one.campaign(A)
    assert epoch is not None
    assert one.certain_until_s is not None
    assert began_s + one.ttl_s <= one.certain_until_s <= boot_time_s() + one.ttl_s
    state = led_by(one)
    assert (state.epoch, state.leader, state.in_sync, state.addresses) == (
        epoch,
        "A",
        frozenset("A"),
        A.addresses,
    )
    assert two.read() == one.read() == Observation(state, is_held=True)
    assert two.campaign(A) is None
    assert two.campaign(B) is None
    assert (two.led, two.certain_until_s) == (None, None)
    for call in (two.renew, lambda: two.replace(state, state)):
        with pytest.raises(LeadershipLost):
            call()
    before_s = one.certain_until_s
    one.renew()
    assert before_s < one.certain_until_s <= boot_time_s() + one.ttl_s
    assert two.read() == Observation(state, is_held=True)


def test_the_leader_changes_the_value(opened: Open) -> None:
    one, two = opened(), opened()
    one.campaign(A)
    first = led_by(one)
    add(one, "B")
    second = led_by(one)
    assert two.read().state == second
    assert second.in_sync == {"A", "B"}
    with pytest.raises(ValueChanged):
        one.replace(first.joined("C", ()), first)
    assert two.read().state == led_by(one) == second
    with pytest.raises(StateError):
        one.replace(second.unsynced("A"), second)
    with pytest.raises(StateError, match="the epoch, the leader and the session"):
        one.replace(second.elected(B, "other", second.epoch + 1), second)
    assert two.read().state == led_by(one) == second
    one.replace(second.unsynced("B").removed("B"), second)
    assert two.read().state == led_by(one) == first


def test_the_next_leader_was_in_sync(opened: Open) -> None:
    one, two = opened(), opened()
    epoch = one.campaign(A)
    assert epoch is not None
    one.replace(led_by(one).joined("C", C.addresses), led_by(one))
    add(one, "B")
    last = led_by(one)
    one.resign()
    assert two.read() == Observation(last, is_held=False)
    assert one.led is None
    with pytest.raises(NotInSync, match="C is not in sync"):
        two.campaign(C)
    assert (two.campaign(B) or 0) > epoch
    assert (led_by(two).leader, led_by(two).in_sync) == ("B", frozenset("AB"))
    assert one.campaign(A) is None
    with pytest.raises(LeadershipLost):
        one.replace(last, last)
    one.resign()  # does nothing: another member leads
    assert two.read() == Observation(led_by(two), is_held=True)
    two.renew()


def test_a_successor_is_waited_for(opened: Open) -> None:
    one, two, three = opened(), opened(), opened()
    epoch = one.campaign(A)
    assert epoch is not None
    add(one, "B")
    with pytest.raises(StateError):
        one.resign("C")
    one.renew()
    one.resign("B")
    for each in (one, three):
        assert each.campaign(A) is None
    assert (two.campaign(B) or 0) > epoch
    assert led_by(two).successor == ""


def test_a_successor_that_does_not_come_is_waited_for_as_long_as_a_lease(opened: Open) -> None:
    one, two = opened(), opened(ttl_s=1.0)
    epoch = one.campaign(A)
    assert epoch is not None
    add(one, "B")
    one.resign("B")
    began_s = boot_time_s()
    while (won := two.campaign(A)) is None:
        assert boot_time_s() - began_s < PATIENCE_S
        two.wait_for_change(two.read(), 0.1)
    assert won > epoch
    assert boot_time_s() - began_s > 1.0


def test_no_member_leads_if_the_value_was_lost(opened: Open) -> None:
    one = opened()
    with pytest.raises(OutdatedState, match="has no value of the cluster"):
        one.campaign(candidate("A", epoch=7))
    assert one.read() == Observation(None, is_held=False)
    epoch = one.campaign(candidate("A", epoch=7), found=True)
    assert epoch is not None
    assert epoch > 7
    one.resign()
    with pytest.raises(OutdatedState, match=f"has seen epoch {epoch + 5}"):
        one.campaign(candidate("A", epoch=epoch + 5))
    assert (one.campaign(candidate("A", epoch)) or 0) > epoch


def test_a_restored_member_leads_only_after_the_leadership_that_was_lost(opened: Open) -> None:
    one, two = opened(), opened()
    assert two.campaign(B, found=True, after=7) is None
    lost = one.campaign(A, found=True, after=0)
    assert lost is not None
    one.replace(led_by(one).archived(RecordedArchive("s3://archive", "1")), led_by(one))
    assert two.campaign(B, found=True, after=lost) is None, "the leader is not lost"
    one.resign()
    for other in (0, lost - 1, lost + 1):
        assert two.campaign(B, found=True, after=other) is None
    assert (two.campaign(B, found=True, after=lost) or 0) > lost
    assert (led_by(two).in_sync, led_by(two).archive) == (frozenset("B"), None)
    with pytest.raises(LeadershipLost):
        one.replace(led_by(two), led_by(two))


def test_a_lease_ends(opened: Open) -> None:
    """The next leader wins when the last one cannot be certain any more, and that one finds out."""
    founder, one, two = opened(), opened(ttl_s=1.0), opened(ttl_s=1.0)
    founder.campaign(A)
    add(founder, "B")
    founder.resign()
    began_s = boot_time_s()
    while (epoch := one.campaign(A)) is None:
        assert boot_time_s() - began_s < PATIENCE_S
    until_s = one.certain_until_s
    assert until_s is not None
    while (won := two.campaign(B)) is None:
        assert boot_time_s() - began_s < PATIENCE_S
        two.wait_for_change(two.read(), 1.0)
    assert boot_time_s() >= until_s
    assert won > epoch
    last = led_by(one)
    assert two.read().state == led_by(two)
    with pytest.raises(LeadershipLost):
        one.replace(last.joined("C", ()), last)
    with pytest.raises(LeadershipLost):
        one.renew()
    assert (one.led, one.certain_until_s) == (None, None)


def test_changes_end_a_wait(opened: Open) -> None:
    one, two = opened(), opened()
    one.campaign(A)
    seen = two.read()
    answers: list[Observation] = []

    def wait() -> None:
        answers.append(two.wait_for_change(seen, PATIENCE_S))

    changes: list[Callable[[], None]] = [lambda: add(one, "B"), one.resign]
    for change in changes:
        began_s = boot_time_s()
        thread = threading.Thread(target=wait)
        thread.start()
        change()
        thread.join()
        assert boot_time_s() - began_s < PATIENCE_S
        found = answers.pop()
        assert found == two.read() != seen
        seen = found
    assert not seen.is_held


def test_a_wait_has_a_limit_and_an_end(opened: Open) -> None:
    one, two = opened(), opened()
    one.campaign(A)
    seen = two.read()
    assert two.wait_for_change(seen, 0.0) == seen
    assert two.wait_for_change(seen, 0.05) == seen
    thread = threading.Thread(target=two.wait_for_change, args=(seen, 10 * PATIENCE_S))
    thread.start()
    two.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_one_of_two_wins_each_round(opened: Open) -> None:
    """Two members campaign at once, again and again. A ledger outside knows who has won which epoch."""
    ledger: list[tuple[int, str]] = []
    lock = threading.Lock()
    rounds = 15
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def compete(name: str) -> None:
        coordinator = opened()
        try:
            for _ in range(rounds):
                start.wait(PATIENCE_S)
                epoch = coordinator.campaign(candidate(name))
                if epoch is not None:
                    with lock:
                        ledger.append((epoch, name))
                if start.wait(PATIENCE_S) == 0:
                    assert len(ledger) == start_of_round[0] + 1
                    start_of_round[0] = len(ledger)
                start.wait(PATIENCE_S)
                if epoch is not None:
                    coordinator.resign()
        except BaseException as error:
            failures.append(error)
            start.abort()

    start_of_round = [0]
    founder = opened()
    first = founder.campaign(A)
    assert first is not None
    add(founder, "B")
    founder.resign()
    threads = [threading.Thread(target=compete, args=(name,)) for name in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    epochs = [epoch for epoch, _ in ledger]
    assert (len(epochs), epochs[0] > first, epochs) == (rounds, True, sorted(set(epochs)))


def test_founders_compete(opened: Open) -> None:
    """Of several members that begin a cluster at once, one wins, and the others are not in sync with it."""
    won: list[int] = []
    start = threading.Barrier(4)

    def compete(name: str) -> None:
        coordinator = opened()
        start.wait(PATIENCE_S)
        epoch = coordinator.campaign(candidate(name))
        if epoch is not None:
            won.append(epoch)

    threads = [threading.Thread(target=compete, args=(name,)) for name in "ABCD"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    observed = opened().read()
    assert observed.state is not None
    assert (observed.is_held, observed.state.epoch) == (True, won[0])
