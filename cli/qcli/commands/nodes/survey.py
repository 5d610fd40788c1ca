"""Asks the discovery services and the brokers of a fleet."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trio_nsq.fleet.snapshot import BrokerState, LookupdState, merged
from trio_nsq.fleet.stats import parse_topics

from ...broker.at_once import at_once
from ...broker.brokers import Brokers
from ...framework.errors import ExitCode, Failure

_NO_HTTP = Failure("It is registered without an HTTP port.", ExitCode.UNREACHABLE)


@dataclass(frozen=True)
class Survey:
    """The state of a fleet. `failures` has why servers do not answer, by address.

    A broker without an HTTP port has its TCP address.
    """

    brokers: Sequence[BrokerState]
    lookupds: Sequence[LookupdState]
    failures: Mapping[str, Failure]

    @property
    def answered(self) -> bool:
        """Whether a broker answered, or, if no broker is known, a service."""
        return any(not each.error for each in self.brokers or self.lookupds)

    @property
    def asked_lookupds(self) -> list[str]:
        """The services that answered."""
        return [each.address for each in self.lookupds if not each.error]


def take_survey(brokers: Brokers) -> Survey:
    """Ask all services, then all brokers; every failure is in the result."""
    from ...broker.https_ports import addresses_with_https

    services = at_once(brokers.lookupds, _ask_lookupd)
    lookupds = [
        LookupdState(address, answer.brief) if isinstance(answer, Failure) else answer
        for address, answer in services.items()
    ]
    states = {address: BrokerState(address) for address in brokers.given}
    allowed = {*brokers.allowed(node for lookupd in lookupds for node in lookupd.nodes)}
    https = addresses_with_https([*{node.http_address for node in allowed if node.http_address}])
    without_http = {node.tcp_address for node in allowed if node.http_address is None}
    for lookupd in lookupds:
        for node in lookupd.nodes:
            if node not in allowed:
                continue
            address = node.http_address or node.tcp_address
            address = https.get(address, address)
            state = states.setdefault(address, BrokerState(address, configured=False))
            states[address] = replace(state, registrations={**state.registrations, lookupd.address: node})
    answers = at_once(
        [address for address, state in states.items() if state.configured or address not in without_http],
        lambda address: _ask_broker(brokers, states[address]),
    )
    found = []
    # First the brokers that were given, in their order.
    for state in sorted(states.values(), key=lambda state: "" if state.configured else state.address):
        answer = answers.get(state.address, _NO_HTTP)
        found.append(replace(state, error=answer.brief) if isinstance(answer, Failure) else answer)
    each_once = merged(found)
    told = {address: answers.get(address, _NO_HTTP) for address in each_once} | services
    failures = {address: answer for address, answer in told.items() if isinstance(answer, Failure)}
    return Survey(list(each_once.values()), lookupds, failures)


def _ask_lookupd(address: str) -> LookupdState:
    from trio_nsq.api import lookupd

    from ...broker.lookupd_client import LookupdClient

    client = LookupdClient(address)
    nodes = client.nodes()  # first, because a broker has the other request, too
    return LookupdState(address, version=client.ask(lookupd.version()), nodes=nodes)


def _ask_broker(brokers: Brokers, state: BrokerState) -> BrokerState:
    from trio_nsq.api import broker as api

    from ...broker.admin_client import AdminClient

    brokers.check_listed(state.address)
    client = AdminClient(state.address)
    info, stats = client.info(), client.stats(disk=True)
    cluster = client.ask(api.cluster()) if stats.get("cluster") else None
    return replace(
        state,
        answered_at_s=time.time(),
        info=info,
        stats=stats,
        topics=parse_topics(stats),
        cluster=cluster,
    )
