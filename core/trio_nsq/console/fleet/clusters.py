"""The clusters that brokers are members of, as their leaders see them. Pure, except for `ask_clusters`.

A follower passes requests on to its leader, so what a broker says is that of the leader. Without a leader, each member
still tells its own view.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...api.answers import Cluster, MemberView
from ...api.broker import cluster, member
from ...fleet.cluster import problems_of
from ...fleet.snapshot import BrokerState, Snapshot
from ...fleet.stats import text
from ..upstream.client import Results, Upstream

TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster.

    Attributes:
        name: Its name.
        broker: The address by which its leader is reached.
        led: What its leader says; None: there is none, or none answers.
        members: What its members say without a leader, by the addresses of those that answer.
        errors: Why others do not answer.
    """

    name: str
    broker: str = ""
    led: Cluster | None = None
    members: Mapping[str, MemberView] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What is wrong, in sentences, the worst first."""
        if self.led is not None:
            return [f"{each[:1].upper()}{each[1:]}." for each in problems_of(self.led)]
        followed = {each["leader"] for each in self.members.values() if each.get("is_following")}
        if followed:
            return [
                f"The leader {', '.join(map(str, followed))} does not answer, although members follow it."
            ]
        return ["There is no leader. Clients wait for one, and are refused after 30 s."]


def cluster_name(broker: BrokerState) -> str:
    """Return the cluster that a broker is a member of, as it told last; empty: none."""
    about = broker.info.get("cluster")
    return text(about, "name") if isinstance(about, dict) else ""


def has_clusters(snapshot: Snapshot) -> bool:
    """Whether any broker is a member of a cluster, as far as known."""
    return any(cluster_name(broker) for broker in snapshot.brokers.values())


async def ask_clusters(upstream: Upstream, snapshot: Snapshot) -> list[ClusterView]:
    """Ask each broker that is a member of a cluster: for the cluster, or, if it has not answered, for its own view."""
    known = {address: name for address, each in snapshot.brokers.items() if (name := cluster_name(each))}
    answering = [address for address in known if snapshot.brokers[address].reachable]
    silent = [address for address in known if not snapshot.brokers[address].reachable]
    led = await upstream.ask_all(answering, cluster(), timeout_s=TIMEOUT_S)
    own = await upstream.ask_all([*silent, *led.errors], member(), timeout_s=TIMEOUT_S)
    return views_of(known, led, own)


def views_of(known: Mapping[str, str], led: Results[Cluster], own: Results[MemberView]) -> list[ClusterView]:
    """Return a view of each cluster, by name.

    Args:
        known: The cluster of each broker, by address.
        led: What leaders say, by the address that was asked.
        own: What members say of themselves, likewise.
    """
    newest: dict[str, str] = {}
    for address, about in led.values.items():
        other = newest.setdefault(about["cluster"], address)
        if about["epoch"] > led.values[other]["epoch"]:
            newest[about["cluster"]] = address
    views = []
    for name in sorted({*known.values(), *newest}):
        if address := newest.get(name, ""):
            views.append(ClusterView(name, address, led.values[address]))
            continue
        members = {each: about for each, about in own.values.items() if about["cluster"] == name}
        errors = {each: error.reason for each, error in own.errors.items() if known[each] == name}
        views.append(ClusterView(name, members=members, errors=errors))
    return views
