"""Tests of the coordinator for machines without an engine."""

from pathlib import Path

import pytest

from coordination.conftest import candidate
from trio_nsq.coordination.interface import CoordinatorError, LeadershipLost, Observation
from trio_nsq.coordination.state import StateError
from trio_nsq.coordination.static import STATE_FILE, StaticCoordinator

A, B = candidate("A"), candidate("B")


def opened(folder: Path) -> StaticCoordinator:
    return StaticCoordinator(folder, "prod")


def test_no_member_leads_before_one_is_promoted(tmp_path: Path) -> None:
    one = opened(tmp_path)
    assert one.campaign(A) is None
    assert one.read() == Observation(None, is_held=True)
    epoch = one.promote(A)
    assert one.led is not None
    assert (one.led.epoch, one.led.leader) == (epoch, "A")
    assert one.certain_until_s == float("inf")
    one.renew()
    assert (tmp_path / STATE_FILE).stat().st_mode & 0o777 == 0o600


def test_the_leader_leads_again_after_a_restart(tmp_path: Path) -> None:
    epoch = opened(tmp_path).promote(A)
    one = opened(tmp_path)
    again = one.campaign(A)
    assert again is not None
    assert again > epoch
    one.resign()
    after = opened(tmp_path).campaign(A)
    assert after is not None
    assert after > again
    assert opened(tmp_path).campaign(B) is None


def test_a_follower_is_promoted(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "A"), opened(tmp_path / "B")
    epoch = one.promote(A)
    led = one.led
    assert led is not None
    one.replace(led.joined("B", B.addresses), led)
    led = one.led
    assert led is not None
    two.learn(led)
    assert two.campaign(B) is None
    assert two.read() == one.read() == Observation(led, is_held=True)
    promoted = two.promote(B)
    assert promoted > epoch
    assert two.led is not None
    assert (two.led.leader, two.led.in_sync) == ("B", frozenset("B"))
    one.learn(two.led)
    with pytest.raises(LeadershipLost, match="B leads epoch"):
        one.renew()
    assert one.campaign(A) is None
    with pytest.raises(StateError, match="is older than"):
        one.learn(led)


def test_leaders_that_know_nothing_of_each_other_have_different_epochs(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "A"), opened(tmp_path / "B")
    one.promote(A)
    assert one.led is not None
    led = one.led.joined("B", ()).synced("B")
    two.learn(led)
    epochs = [two.promote(B)]
    for _ in range(3):
        for coordinator, who in ((opened(tmp_path / "A"), A), (opened(tmp_path / "B"), B)):
            epoch = coordinator.campaign(who)
            assert epoch is not None
            epochs.append(epoch)
    assert len(set(epochs)) == len(epochs)
    assert all(epoch > led.epoch for epoch in epochs)


def test_a_leader_that_has_handed_over_does_not_lead(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "A"), opened(tmp_path / "B")
    one.promote(A)
    assert one.led is not None
    one.replace(one.led.joined("B", ()).synced("B"), one.led)
    one.resign("B")
    assert one.campaign(A) is None
    state = one.read().state
    assert state is not None
    two.learn(state)
    assert two.promote(B) > state.epoch


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("{}")
    with pytest.raises(StateError, match="the value of the cluster has no valid field"):
        opened(tmp_path).campaign(A)
    (tmp_path / STATE_FILE).unlink()
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(CoordinatorError, match=f"{STATE_FILE} cannot be read: Is a directory"):
        opened(tmp_path).read()
