"""What members of a cluster tell of it, each by itself, also without a leader."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trio_nsq.api import broker as api
from trio_nsq.fleet.cluster import is_in_sync, members_named, name_of, waits_for_leader

from ...broker.at_once import at_once
from ...broker.brokers import Brokers, combined
from ...broker.failures import Refused
from ...broker.refusals import Unsupported, listed
from ...broker.requests import member_at
from ...framework.errors import ExitCode, Failure

if TYPE_CHECKING:
    from trio_nsq.api.answers import Cluster, ClusterMember, MemberView

    from ...broker.admin_client import AdminClient

_UNAVAILABLE = 500
"""HTTP statuses from this one on are not about the request: the broker starts or stops."""


@dataclass(frozen=True, slots=True)
class View:
    """A cluster as one of its members tells of it.

    Attributes:
        address: The member's HTTP address.
        member: What it says of itself.
        cluster: What the leader says; None: there is no leader, or it does not answer.
        reason: Why not.
        others: What other members say of themselves, if they were asked.
    """

    address: str
    member: MemberView
    cluster: Cluster | None
    reason: str = ""
    others: tuple[MemberView, ...] = ()

    @property
    def itself(self) -> tuple[MemberView, ...]:
        """What each member that was asked says of itself."""
        return (self.member, *self.others)

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self.member["cluster"]

    @property
    def epoch(self) -> int:
        return self.cluster["epoch"] if self.cluster is not None else self.member["epoch"]

    def no_leader(self) -> Failure:
        """Return the failure for a cluster without a leader."""
        if (leader := self.member["leader"]) is not None:
            text = f"The leader of the cluster {self.name}, {leader}, does not serve its member at {self.address}: "
        else:
            text = f"The cluster {self.name} has no leader, as its member at {self.address} says: "
        text += f"{self.reason}."
        if self.member.get("coordinator", "").startswith("static:"):
            text += " If the leader is lost, see 'qcli cluster promote'."
        return Failure(text, ExitCode.UNREACHABLE)


def look(client: AdminClient) -> View:
    """Ask a member. Raises Failure: it does not answer, is no member, or refuses."""
    try:
        member = member_at(client)
    except Refused as error:
        if not _is_unavailable(error):
            raise
        raise Failure(error.message, ExitCode.UNREACHABLE, brief=error.brief) from error
    if member["leader"] is None:
        return View(client.address, member, None, member.get("reason") or "it knows none")
    # A follower that is not connected to the leader can hardly pass a request on.
    ask = client.ask_promptly if waits_for_leader(member) else client.ask
    try:
        return View(client.address, member, ask(api.cluster()))
    except Failure as error:
        if not _is_unavailable(error):
            raise
    return View(
        client.address,
        member,
        None,
        member.get("reason") or f"the last one, {member['leader']}, does not answer",
    )


def _is_unavailable(error: Failure) -> bool:
    is_refused = isinstance(error, Refused) and error.status >= _UNAVAILABLE
    return is_refused or error.exit_code is ExitCode.UNREACHABLE


def look_at(address: str) -> View:
    """Ask the member at an address. Raises as `look`."""
    from ...broker.admin_client import AdminClient

    return look(AdminClient(address))


def views_of(brokers: Brokers) -> tuple[list[View], list[Failure]]:
    """Ask all brokers of a command at once, and return one view of each cluster, by name, and why others failed.

    A view of the leader wins; then the one with the highest epoch. Raises Failure: no member answers.
    """
    # Without discovery services, each address is asked: `brokers.addresses` would ask followers what the leader is.
    addresses = brokers.addresses if brokers.lookupds else tuple(dict.fromkeys(brokers.given))
    answers = at_once(addresses, look_at)
    failures = [each for each in answers.values() if isinstance(each, Failure)]
    views = [each for each in answers.values() if isinstance(each, View)]
    found: dict[str, View] = {}
    for view in views:
        if (known := found.get(view.name)) is None or _rank(view) > _rank(known):
            found[view.name] = view
    for name, best in found.items():
        others = tuple(each.member for each in views if each.name == name and each is not best)
        found[name] = replace(best, others=others)
    if not found:
        raise combined(failures, partial=False)
    members = [each for each in failures if not isinstance(each, Unsupported)]
    return [found[name] for name in sorted(found)], members


def _rank(view: View) -> tuple[bool, int]:
    return view.cluster is not None, view.epoch


def view_of(brokers: Brokers) -> View:
    """Return the view of the only cluster of a command. Raises Failure: as `views_of`; there are several."""
    views, _ = views_of(brokers)
    if len(views) > 1:
        names = listed([view.name for view in views], "and")
        raise Failure(f"The addresses are of several clusters: {names}. Name members of one.")
    return views[0]


def led(view: View) -> Cluster:
    """Return what the leader says. Raises Failure: there is none."""
    if view.cluster is None:
        raise view.no_leader()
    return view.cluster


def member_named(cluster: Cluster, name: str) -> ClusterMember:
    """Return the member that a user means. Raises Failure: there is none, or there are several."""
    found = members_named(cluster, name)
    if len(found) == 1:
        return found[0]
    if found:
        raise Failure(f"{name} may be {listed([each['id'] for each in found], 'or')}: write more of the id.")
    known = ", ".join(map(name_of, cluster["members"]))
    raise Failure(f"The cluster {cluster['cluster']} has no member {name}. Its members: {known}.")


def members_in_sync(cluster: Cluster) -> int:
    """Return how many members are in sync, with the leader."""
    return sum(map(is_in_sync, cluster["members"]))


def wait_until(
    ask: Callable[[], View],
    lacks: Callable[[Cluster], Failure | None],
    timeout_ms: int | None,
    *,
    late: str,
    poll_s: float,
) -> tuple[Cluster, float]:
    """Ask again and again until nothing is lacking, also while no member answers.

    Args:
        lacks: Returns what is not as it shall be; None: all is.
        timeout_ms: None: wait without limit.
        late: The beginning of the error when the time is over.

    Returns:
        What the leader says, and after how many seconds.

    Raises Failure: the time is over, or a member refuses, or is none.
    """
    begun_s = time.monotonic()
    while True:
        failure: Failure | None
        try:
            view = ask()
        except Failure as error:
            if error.exit_code is not ExitCode.UNREACHABLE:
                raise
            failure = error
        else:
            if view.cluster is None:
                failure = view.no_leader()
            elif (failure := lacks(view.cluster)) is None:
                return view.cluster, time.monotonic() - begun_s
        if timeout_ms is not None and time.monotonic() - begun_s >= timeout_ms / 1000:
            raise Failure(f"{late} {failure.message}", failure.exit_code)
        time.sleep(poll_s)
