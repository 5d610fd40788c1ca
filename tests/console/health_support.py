"""The state of one broker, and what the page of health says of it."""

from typing import Any

from trio_nsq.console.fleet.health import BrokerHealth, health_of
from trio_nsq.fleet.snapshot import BrokerState, LookupdState, Snapshot


def broker(**values: Any) -> BrokerState:
    return BrokerState("b:1", **{"answered_at_s": 1.0} | values)


def health(state: BrokerState, *lookupds: LookupdState, details: bool = True) -> BrokerHealth:
    snapshot = Snapshot(1, 1.0, {state.address: state}, {each.address: each for each in lookupds})
    (found,) = health_of(snapshot, {"b:1": 5}, details=details)
    return found
