"""Tests of the coordinator in an object store: faults of the store and of the network."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from coordination.conftest import LONG_S, PATIENCE, candidate, led_by
from storage.stores import Fault, Judge, Proxy, Store, proxy
from trio_nsq.coordination.bucket import BucketCoordinator
from trio_nsq.coordination.interface import (
    Coordinator,
    CoordinatorError,
    LeadershipLost,
    Observation,
    ValueChanged,
)
from trio_nsq.coordination.state import NotInSync, OutdatedState, StateError
from trio_nsq.storage import Patience, Storage, storage_at

Open = Callable[..., BucketCoordinator]
LEADER, STATE = "prod/leader", "prod/state"


@pytest.fixture
def broken(s3: Store) -> Iterator[Proxy]:
    """A proxy in front of the S3 server, which this process uses."""
    with proxy(s3) as running, s3.behind(running.endpoint).here():
        yield running


@pytest.fixture
def storage(broken: Proxy, s3: Store) -> Storage:
    """A place of its own."""
    return storage_at(s3.new_place(), patience=PATIENCE)


@pytest.fixture
def opened(storage: Storage) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_one(ttl_s: float = LONG_S, **options: Any) -> BucketCoordinator:
            place = options.pop("storage", storage)
            one = BucketCoordinator(place, "prod", ttl_s=ttl_s, poll_s=0.05, **options)
            stack.callback(one.close)
            return one

        yield open_one


def impatient(storage: Storage) -> Storage:
    """Return the same place for faults that are there until the deadline."""
    return storage_at(storage.shown, patience=Patience(attempt_s=30.0, deadline_s=0.1))


def nth(number: int, name: str, fault: Fault) -> Judge:
    """Return a judge with a fault for one write of an object, counted from 0."""
    left = [number]

    def judge(method: str, path: str) -> Fault | None:
        if method != "PUT" or not path.partition("?")[0].endswith(name):
            return None
        left[0] -= 1
        return fault if left[0] == -1 else None

    return judge


def win(coordinator: Coordinator, name: str) -> int:
    epoch = coordinator.campaign(candidate(name))
    assert epoch is not None
    return epoch


def add(coordinator: Coordinator, name: str) -> None:
    """Let a member be in sync with the leader."""
    led = coordinator.led
    assert led is not None
    coordinator.replace(led.joined(name, candidate(name).addresses).synced(name), led)


@pytest.mark.parametrize("is_sent", [False, True], ids=["lost request", "lost answer"])
@pytest.mark.parametrize("status", [None, 500, 503, 409], ids=["reset", "500", "503", "409"])
@pytest.mark.parametrize("name", [LEADER, STATE])
def test_a_write_without_an_answer_is_recognized(
    opened: Open, broken: Proxy, name: str, is_sent: bool, status: int | None
) -> None:
    if status == 409 and is_sent:
        return  # a store that answers so has not written
    one, two = opened(), opened()
    broken.judge = nth(0, name, Fault(is_sent, status))
    epoch = win(one, "A")
    assert two.read() == Observation(one.led, is_held=True)
    broken.judge = nth(0, name, Fault(is_sent, status))
    one.renew()
    add(one, "B")
    one.renew()
    assert two.read() == Observation(one.led, is_held=True)
    broken.judge = nth(0, name, Fault(is_sent, status))
    one.resign()
    assert two.read() == Observation(two.read().state, is_held=False)
    broken.judge = lambda method, path: None
    assert win(two, "B") > epoch


@pytest.mark.parametrize("is_sent", [False, True], ids=["lost request", "lost answer"])
def test_an_outage_ends_no_leadership(opened: Open, broken: Proxy, storage: Storage, is_sent: bool) -> None:
    """Only time does. When the store is back, the leader renews its lease, and undoes a change that was applied."""
    now_s = [100.0]
    one, two = opened(ttl_s=15.0, clock=lambda: now_s[0], storage=impatient(storage)), opened()
    win(one, "A")
    before = one.led
    broken.judge = lambda method, path: Fault(is_sent)
    for call in (one.renew, lambda: add(one, "B")):
        now_s[0] += 1
        with pytest.raises(CoordinatorError, match=r"cannot be written: .*; this was tried for"):
            call()
    assert (one.led, one.certain_until_s) == (before, 115.0)
    broken.judge = lambda method, path: None
    one.renew()
    assert one.certain_until_s == 117.0
    assert one.led == two.read().state == before
    add(one, "C")
    assert two.read() == Observation(one.led, is_held=True)


def test_leadership_is_certain_from_when_the_renewal_was_sent(opened: Open, broken: Proxy) -> None:
    now_s = [100.0]
    one = opened(ttl_s=50.0, clock=lambda: now_s[0])

    def pass_time() -> None:
        now_s[0] += 7

    broken.judge = nth(0, LEADER, Fault(is_sent=True, then=pass_time))
    win(one, "A")
    assert (now_s[0], one.certain_until_s) == (107.0, 150.0)
    broken.judge = nth(0, LEADER, Fault(is_sent=False, then=pass_time))
    one.renew()
    assert (now_s[0], one.certain_until_s) == (114.0, 157.0)


def test_a_lease_is_taken_over_when_it_was_seen_unchanged_for_its_time(
    opened: Open, storage: Storage
) -> None:
    """By the clock of the candidate, not by the time at which the object was written."""
    now_s = [1000.0]
    one, two = opened(ttl_s=15.0), opened(ttl_s=15.0, clock=lambda: now_s[0])
    epoch = win(one, "A")
    add(one, "B")
    assert two.campaign(candidate("B")) is None
    now_s[0] += 14.9
    assert two.campaign(candidate("B")) is None
    one.renew()
    now_s[0] += 14.9
    assert two.read().is_held
    now_s[0] += 14.9
    assert two.read().is_held
    now_s[0] += 0.2
    assert not two.read().is_held
    assert win(two, "B") > epoch
    led = one.led
    assert led is not None
    with pytest.raises(LeadershipLost):
        one.replace(led.joined("C", ()), led)
    three = opened()
    assert three.read() == Observation(two.led, is_held=True)


def test_a_renewal_finds_the_lost_lease(opened: Open, storage: Storage) -> None:
    one = opened()
    win(one, "A")
    found = storage.read(LEADER)
    assert found is not None
    storage.put(LEADER, json.dumps({"holder": "another one", "token": "x"}).encode())
    with pytest.raises(LeadershipLost, match="no longer leads the cluster prod: another process"):
        one.renew()
    assert (one.led, one.certain_until_s) == (None, None)
    assert one.campaign(candidate("A")) is None


def test_a_former_leader_writes_no_value(opened: Open, storage: Storage) -> None:
    """It does not know yet that another one has the lease: the value has another version."""
    one, two = opened(), opened()
    win(one, "A")
    add(one, "B")
    led = one.led
    assert led is not None
    storage.remove([LEADER])
    win(two, "B")
    with pytest.raises(LeadershipLost, match="B leads epoch"):
        one.replace(led.unsynced("B"), led)
    assert two.read() == Observation(two.led, is_held=True)


def test_a_candidate_that_was_removed_meanwhile_does_not_win(
    opened: Open, storage: Storage, broken: Proxy
) -> None:
    """The last leader writes once more, between what the candidate reads and what it writes."""
    one, two = opened(), opened()
    win(one, "A")
    add(one, "B")
    led = one.led
    assert led is not None
    storage.remove([LEADER])

    def last_words() -> None:
        broken.judge = lambda method, path: None
        one.replace(led.unsynced("B"), led)

    broken.judge = nth(0, LEADER, Fault(is_sent=True, status=503, then=last_words))
    assert two.campaign(candidate("B")) is None
    assert two.read() == Observation(one.led, is_held=False)
    assert win(opened(), "A")


def test_a_candidate_without_the_lease_writes_no_value(opened: Open, storage: Storage, broken: Proxy) -> None:
    """Another one takes the lease first, and has not written the value yet."""
    one = opened()
    win(one, "A")
    last = one.led
    one.resign()

    def take_first() -> None:
        broken.judge = lambda method, path: None
        storage.put(LEADER, json.dumps({"holder": "another one", "token": "x"}).encode())

    broken.judge = nth(0, LEADER, Fault(is_sent=False, status=503, then=take_first))
    assert one.campaign(candidate("A")) is None
    assert opened().read() == Observation(last, is_held=True)


def test_a_lease_that_was_taken_without_an_answer_is_taken_again(
    opened: Open, storage: Storage, broken: Proxy
) -> None:
    """The deadline passes after the lease was taken: the next campaign need not wait for its end."""
    one = opened(storage=impatient(storage))
    broken.judge = lambda method, path: Fault(is_sent=True) if method == "PUT" else None
    with pytest.raises(CoordinatorError):
        one.campaign(candidate("A"))
    assert opened().read() == Observation(None, is_held=True)
    broken.judge = lambda method, path: None
    win(one, "A")


def test_the_leader_writes_the_value_again_that_was_removed(opened: Open, storage: Storage) -> None:
    one, two = opened(), opened()
    win(one, "A")
    storage.remove([STATE])
    with pytest.raises(ValueChanged):
        add(one, "B")
    assert two.read() == Observation(one.led, is_held=True)
    add(one, "B")
    storage.remove([STATE])
    one.resign()
    with pytest.raises(OutdatedState):
        two.campaign(candidate("B", epoch=1))


@pytest.mark.parametrize("is_of_another", [False, True], ids=["of this leader", "of the one before"])
def test_an_earlier_value_that_is_put_back_is_replaced(
    opened: Open, storage: Storage, is_of_another: bool
) -> None:
    """As by a restored backup. It names a member in sync that has missed messages since."""
    one, two = opened(), opened()
    win(one, "A")
    add(one, "B")
    earlier = storage.read(STATE)
    assert earlier is not None
    if is_of_another:
        one.resign()
        win(one, "A")
    led = led_by(one)
    one.replace(led.unsynced("B"), led)
    storage.put(STATE, earlier.data)
    one.renew()
    assert two.read() == Observation(one.led, is_held=True)
    assert led_by(one).in_sync == {"A"}
    one.resign()
    with pytest.raises(NotInSync):
        two.campaign(candidate("B", epoch=1))


def test_a_former_leader_does_not_replace_the_value_of_a_leader_with_a_lower_epoch(
    opened: Open, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier value was put back, and a member that knew no later one was elected with that."""
    monkeypatch.setattr("secrets.randbelow", lambda below: 0)  # each epoch is one above the one before
    one, two = opened(), opened()
    win(one, "A")
    add(one, "B")
    earlier = storage.read(STATE)
    assert earlier is not None
    for _ in range(2):
        one.resign()
        win(one, "A")
    storage.put(STATE, earlier.data)
    storage.remove([LEADER])
    assert win(two, "B") < led_by(one).epoch
    led = led_by(two)
    with pytest.raises(LeadershipLost):
        add(one, "C")
    assert two.read() == Observation(led, is_held=True)


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_store_that_ignores_conditions_is_refused(moto_s3: Store, header: str) -> None:
    with proxy(moto_s3) as running, moto_s3.behind(running.endpoint).here():
        running.ignored = frozenset({header})
        one = BucketCoordinator(storage_at(moto_s3.new_place()), "prod")
        with pytest.raises(CoordinatorError, match=r"ignores If-(None-)?Match"):
            one.campaign(candidate("A"))
        assert one.led is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"cluster": "prod"}'])
def test_a_value_of_something_else_is_not_replaced(opened: Open, storage: Storage, data: bytes) -> None:
    storage.put(STATE, data)
    one = opened()
    for call in (one.read, lambda: one.campaign(candidate("A"))):
        with pytest.raises(StateError):
            call()
    found = storage.read(STATE)
    assert found is not None
    assert found.data == data


def test_a_missing_bucket_is_one_sentence(s3: Store) -> None:
    with s3.here():
        one = BucketCoordinator(storage_at("s3://missing-bucket/x"), "prod")
        with pytest.raises(CoordinatorError, match="missing-bucket does not exist"):
            one.campaign(candidate("A"))
