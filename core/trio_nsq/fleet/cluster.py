"""A cluster as its leader sees it: its members, by the names that people give them, and what is wrong. Pure."""

from collections.abc import Iterator, Sequence

from ..api.answers import Cluster, ClusterMember, MemberView
from ..text.wording import count_of
from .archive import Archive

_HTTP = ("http://", "https://")


def is_in_sync(member: ClusterMember) -> bool:
    """Whether a member has all messages that were acknowledged, and follows or leads now."""
    return member["in_sync"] and member["state"] != "disconnected"


def address_of(addresses: Sequence[str]) -> str:
    """Return where commands reach a member: `HOST:PORT` for HTTP, else `https://HOST:PORT`; empty: it has told none."""
    for scheme, shown in zip(_HTTP, ("", _HTTP[1]), strict=True):
        for url in addresses:
            if url.startswith(scheme):
                return shown + url.removeprefix(scheme)
    return ""


def name_of(member: ClusterMember | MemberView) -> str:
    """Return the id of a member, with its address if it is known, for people."""
    address = address_of(member.get("addresses", ()))
    return f"{member['id']} ({address})" if address else member["id"]


def leader_of(cluster: Cluster) -> ClusterMember | None:
    """Return the member that leads; None: the answer lacks it."""
    return next((each for each in cluster["members"] if each["id"] == cluster["leader"]), None)


def waits_for_leader(member: MemberView) -> bool:
    """Whether a member has no leader that answers, so that its clients wait."""
    return member["role"] == "follower" and (member["leader"] is None or not member.get("is_following"))


def members_named(cluster: Cluster, name: str) -> list[ClusterMember]:
    """Return the members that a name may mean: an id, the first characters of one, or an address."""
    for matches in (_is_called, _begins_with):
        if found := [each for each in cluster["members"] if matches(each, name)]:
            return found
    return []


def _is_called(member: ClusterMember, name: str) -> bool:
    addresses = member["addresses"]
    return name in (member["id"], *addresses, *(each.partition("://")[2] for each in addresses))


def _begins_with(member: ClusterMember, name: str) -> bool:
    return bool(name) and member["id"].startswith(name)


def replacement_of(cluster: Cluster, member: ClusterMember) -> ClusterMember | None:
    """Return the member that runs at the address of a disconnected one, which therefore cannot return there.

    A member with an empty data folder is a new one, also on the machine of an earlier one. None: there is none.
    """
    address = address_of(member["addresses"])
    if member["state"] != "disconnected" or not address:
        return None
    connected = (each for each in cluster["members"] if each["state"] != "disconnected")
    return next((each for each in connected if address_of(each["addresses"]) == address), None)


def problems_of(cluster: Cluster) -> Iterator[str]:
    """Yield what is wrong, the worst first; nothing: all members are in sync, and the coordinator answers."""
    if reason := cluster.get("refuses_because"):
        yield f"publishes are refused: {reason}"
    if reason := cluster.get("coordinator_error"):
        yield f"the coordinator does not answer: {reason}"
    if (archive := Archive.of(cluster)) is not None and archive.problem:
        yield f"the leader: {archive.problem}"
    for member in cluster["members"]:
        if not is_in_sync(member):
            yield f"the member {name_of(member)} is {_state_of(member)}" + _replaced(cluster, member)
        elif member.get("is_slow"):
            wait_s = member.get("ok_wait_s", 0.0)
            yield f"the member {name_of(member)} is slow: each OK waits for it, about {wait_s:.1f} s"


def _replaced(cluster: Cluster, member: ClusterMember) -> str:
    if (other := replacement_of(cluster, member)) is None:
        return ""
    return (
        f"; {other['id']} has its address now: if the data folder of {member['id']} is gone, forget it with "
        f"'qcli cluster remove {member['id']}'"
    )


def _state_of(member: ClusterMember) -> str:
    if member["state"] != "catching up":
        return (
            member["state"]
            if member["state"] == "disconnected"
            else "not recorded as in sync at the coordinator yet, so it cannot be elected"
        )
    lacks = count_of(member.get("lag_operations", 0), "operation")
    copied = progress_of(member)
    return (
        f"catching up: it has {copied} of the leader's files" if copied else f"catching up, and lacks {lacks}"
    )


def progress_of(member: ClusterMember) -> str:
    """Return how much of the leader's files a member has that catches up; empty: it does not, or that is unknown."""
    size = member.get("copy_bytes", 0)
    return f"{100 * member.get('copied_bytes', 0) // size} %" if size else ""
