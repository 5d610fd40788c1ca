"""Tests for the identity of brokers: which addresses reach the same one."""

from collections.abc import Mapping

import pytest

from trio_nsq.fleet.identity import BrokerIdentity, first_addresses


@pytest.mark.parametrize(
    ("identities", "first"),
    [
        ({}, {}),
        ({"a": "x"}, {"a": "a"}),
        ({"a": "x", "b": "y", "c": "x"}, {"a": "a", "b": "b", "c": "a"}),
        ({"a": None, "b": None, "c": "x", "d": "x"}, {"a": "a", "b": "b", "c": "c", "d": "c"}),
    ],
)
def test_addresses_without_an_answer_are_of_different_brokers(
    identities: Mapping[str, str | None], first: dict[str, str]
) -> None:
    assert first_addresses(identities, identities.__getitem__) == first


def test_address_that_cannot_be_asked_stands_for_itself() -> None:
    asked = {"a": "x", "b": "x"}
    assert first_addresses(["a", "no", "b"], asked.__getitem__) == {"a": "a", "no": "no", "b": "a"}


INFO = {"hostname": "h", "broadcast_address": "b", "tcp_port": 4150, "http_port": 4151, "start_time": 1}


def test_brokers_of_one_host_are_distinguished_by_their_instance() -> None:
    """They may have the same ports on different IP addresses, and start in the same second."""
    one, other = (BrokerIdentity.of(INFO | {"instance": name}) for name in ("x", "y"))
    assert one is not None
    assert one == BrokerIdentity.of(INFO | {"instance": "x", "version": "0.2"}) != other
    assert BrokerIdentity.of(INFO) == BrokerIdentity.of(INFO | {"version": "nsqd"})  # an nsqd tells none


def test_answers_that_are_not_of_a_broker() -> None:
    assert BrokerIdentity.of({"version": "1.3.0"}) is None
