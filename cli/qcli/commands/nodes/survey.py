"""Asks the discovery services and the brokers of a fleet, and finds out which answers are about the same broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trio_nsq.protocol.address import format_address

from ...broker.at_once import at_once
from ...broker.brokers import Brokers
from ...framework.errors import ExitCode, Failure

if TYPE_CHECKING:
    from trio_nsq.lookup.answers import Node

_IDENTITY = ("hostname", "broadcast_address", "tcp_port", "http_port", "start_time")
"""What tells two brokers apart in `/info`; the address does not: `localhost` and `127.0.0.1` may be one broker."""


@dataclass(frozen=True)
class LookupdState:
    """A discovery service.

    Attributes:
        nodes: The brokers that are registered there.
        failure: Why it does not answer; None: it does.
    """

    address: str
    version: str = ""
    nodes: Sequence[Node] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class BrokerState:
    """A broker.

    Attributes:
        address: Its HTTP address, or the TCP address if it has none.
        configured: Whether its address was given; otherwise a discovery service has it.
        registrations: By the address of each service where it is registered.
        info, stats: Its answers; empty if it does not answer.
        failure: Why it does not answer; None: it does.
    """

    address: str
    configured: bool
    registrations: Mapping[str, Node] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that different brokers do not share."""
        return tuple(self.info.get(key) for key in _IDENTITY) if self.info else (self.address,)

    @property
    def announced(self) -> str:
        """The HTTP address that it tells; empty if it tells none."""
        host, port = self.info.get("broadcast_address"), self.info.get("http_port")
        return format_address(str(host), int(port)) if host and port else ""

    @property
    def topics(self) -> list[Mapping[str, Any]]:
        """Its topics, as `/stats` has them."""
        return list(self.stats.get("topics") or ())

    @property
    def channels(self) -> list[Mapping[str, Any]]:
        """The channels of all its topics, as `/stats` has them."""
        return [channel for topic in self.topics for channel in topic.get("channels") or ()]

    @property
    def is_draining(self) -> bool:
        """Whether it refuses publishes until it is empty."""
        return bool(self.info.get("draining") or any(node.draining for node in self.registrations.values()))

    @property
    def tombstones(self) -> dict[str, list[str]]:
        """The topics for which services hide it, by the address of the service."""
        return {
            address: sorted(node.tombstones)
            for address, node in self.registrations.items()
            if node.tombstones
        }


@dataclass(frozen=True)
class Survey:
    """The state of a fleet."""

    brokers: Sequence[BrokerState]
    lookupds: Sequence[LookupdState]

    @property
    def failures(self) -> dict[str, Failure]:
        """The failures of brokers and services, by address."""
        servers: list[BrokerState | LookupdState] = [*self.brokers, *self.lookupds]
        return {each.address: each.failure for each in servers if each.failure is not None}

    @property
    def answered(self) -> bool:
        """Whether a broker answered, or, if no broker is known, a service."""
        return any(each.failure is None for each in self.brokers or self.lookupds)

    @property
    def asked_lookupds(self) -> list[str]:
        """The services that answered."""
        return [each.address for each in self.lookupds if each.failure is None]


def take_survey(brokers: Brokers) -> Survey:
    """Ask all services, then all brokers; every failure is in the result."""
    from ...broker.https_ports import addresses_with_https

    lookupds = [
        LookupdState(address, failure=answer) if isinstance(answer, Failure) else answer
        for address, answer in at_once(brokers.lookupds, _ask_lookupd).items()
    ]
    states = {address: BrokerState(address, configured=True) for address in brokers.given}
    nodes = [node for lookupd in lookupds for node in lookupd.nodes]
    allowed = {*brokers.allowed(nodes)}
    https = addresses_with_https([*{node.http_address for node in allowed if node.http_address}])
    for lookupd in lookupds:
        for node in lookupd.nodes:
            if node not in allowed:
                continue
            address = node.http_address or node.tcp_address
            address = https.get(address, address)
            state = states.setdefault(address, BrokerState(address, configured=False))
            states[address] = replace(state, registrations={**state.registrations, lookupd.address: node})
    asked = at_once(
        [address for address, state in states.items() if state.configured or _has_http(state)],
        lambda address: _ask_broker(brokers, address),
    )
    # First the brokers that were given, in their order.
    in_order = sorted(states.values(), key=lambda state: "" if state.configured else state.address)
    found = [_with_answer(state, asked.get(state.address)) for state in in_order]
    return Survey(_merged(found), lookupds)


def _has_http(state: BrokerState) -> bool:
    return any(node.http_address is not None for node in state.registrations.values())


def _ask_lookupd(address: str) -> LookupdState:
    from ...broker.lookupd_client import LookupdClient

    client = LookupdClient(address)
    nodes = client.nodes()  # first, because a broker has the other request, too
    return LookupdState(address, client.version(), nodes)


def _ask_broker(brokers: Brokers, address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from ...broker.admin_client import AdminClient

    brokers.check_listed(address)
    client = AdminClient(address)
    return client.info(), {"health": "OK"} | client.stats(disk=True)


def _with_answer(
    state: BrokerState, answer: tuple[dict[str, Any], dict[str, Any]] | Failure | None
) -> BrokerState:
    if answer is None:
        return replace(state, failure=Failure("It is registered without an HTTP port.", ExitCode.UNREACHABLE))
    if isinstance(answer, Failure):
        return replace(state, failure=answer)
    return replace(state, info=answer[0], stats=answer[1])


def _merged(states: Iterable[BrokerState]) -> list[BrokerState]:
    """Combine the states of a broker that has several addresses. The first address stays."""
    found: dict[tuple[object, ...], BrokerState] = {}
    for state in states:
        same = found.get(state.identity)
        found[state.identity] = state if same is None else _combined(same, state)
    # A broker may answer over HTTPS or a unix socket only, and be registered with an address that does not.
    silent = {state.address: state for state in found.values() if not (state.info or state.configured)}
    for identity, state in list(found.items()):
        if state.info and (same := silent.pop(state.announced, None)) is not None:
            found[identity] = _combined(state, same)
            del found[same.identity]
    return list(found.values())


def _combined(state: BrokerState, other: BrokerState) -> BrokerState:
    return replace(
        state,
        configured=state.configured or other.configured,
        registrations={**state.registrations, **other.registrations},
    )
