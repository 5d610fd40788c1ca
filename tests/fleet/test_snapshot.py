"""The brokers of a fleet at one time: which answers are about the same broker, and where it should be registered."""

from dataclasses import replace
from typing import Any

import pytest

from trio_nsq.api.lookupd import Node
from trio_nsq.fleet.snapshot import BrokerState, merged


def node(*topics: str, draining: bool = False) -> Node:
    return Node("10.0.0.7", 4150, 4151, topics=topics, draining=draining)


def answering(address: str, name: str, *lookupds: str, **values: Any) -> BrokerState:
    info = {
        "hostname": name,
        "broadcast_address": "10.0.0.7",
        "tcp_port": 4150,
        "http_port": 4151,
        "start_time": 1,
    }
    registrations = {lookupd: node() for lookupd in lookupds}
    return BrokerState(address, answered_at_s=1.0, info=info | values, registrations=registrations)


def test_broker_with_two_addresses_is_there_by_the_first_with_all_registrations() -> None:
    listed = BrokerState("b:1", configured=False, registrations={"l3": node()})
    found = merged([answering("a:1", "a", "l1"), listed, answering("a:2", "a", "l2"), answering("c:1", "c")])
    assert list(found) == ["a:1", "b:1", "c:1"]
    assert sorted(found["a:1"].registrations) == ["l1", "l2"]


@pytest.mark.parametrize("configured", [(True, False), (False, True), (False, False)])
def test_broker_is_configured_if_one_of_its_addresses_is(configured: tuple[bool, bool]) -> None:
    one, other = (replace(answering(f"a:{n}", "a"), configured=each) for n, each in enumerate(configured))
    assert merged([one, other])["a:0"].configured is any(configured)


def test_registered_address_that_never_answers_is_that_of_the_broker_that_tells_it() -> None:
    silent = BrokerState("10.0.0.7:4151", configured=False, error="refused", registrations={"l1": node()})
    found = merged([answering("https://10.0.0.7:4152", "a"), silent])
    assert list(found) == ["https://10.0.0.7:4152"]
    assert list(found["https://10.0.0.7:4152"].registrations) == ["l1"]
    # One that was given, or has answered before, is shown: it may be another one.
    given = BrokerState("10.0.0.7:4151", error="refused")
    assert len(merged([answering("https://10.0.0.7:4152", "a"), given])) == 2
    known = answering("10.0.0.7:4151", "b", configured=False)
    gone = BrokerState(known.address, configured=False, error="refused", answered_at_s=1.0, info=known.info)
    assert len(merged([answering("https://10.0.0.7:4152", "a"), gone])) == 2


def test_silent_brokers_are_different_ones() -> None:
    assert len(merged([BrokerState("a:1", error="refused"), BrokerState("b:1", error="refused")])) == 2


def test_broker_that_drains_need_not_be_registered() -> None:
    services = ["l1", "l2"]
    assert answering("a:1", "a", "l1").missing_at(services) == ["l2"]
    assert answering("a:1", "a", "l1", draining=True).missing_at(services) == []
    silent = BrokerState("a:1", registrations={"l1": node(draining=True)})
    assert (silent.draining, silent.missing_at(services)) == (True, [])
