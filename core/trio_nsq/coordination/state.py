"""The value of a cluster: who leads it, and who may lead it next. Pure: each transition returns a new value.

It is one JSON object, `{"cluster": "prod", "epoch": 7, "leader": "F1", "session": "...", "in_sync": ["F1", "F2"],
"members": {"F1": ["10.0.0.1:4151"], "F2": [...]}}`. Members are identified by their data folder.

These hold for each value that `decode` or a transition returns:

1. The leader is in sync, and members in sync are members.
2. The epoch of a new leader is above all earlier ones.
3. A new leader was in sync in the value before, unless an administrator has confirmed that it may lack messages.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..protocol.errors import NSQError
from ..protocol.untrusted_json import decode_json
from ..replication.link import MAX_ADDRESS_CHARACTERS, MAX_ADDRESSES

MAX_EPOCH = 2**62
MAX_MEMBERS = 64
MAX_VALUE_BYTES = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KNOWN = frozenset(
    {"cluster", "id", "epoch", "leader", "session", "in_sync", "members", "instances", "successor", "archive"}
)


class StateError(NSQError):
    """A value of a cluster is not valid, or a change of it is not allowed. The text says why, in a sentence."""


class NotInSync(StateError):
    """A member may not lead: it may lack messages."""


class OutdatedState(StateError):
    """The value is missing, or older than what a member knows: it is unknown who is in sync, so no member may lead."""


class Candidate(NamedTuple):
    """A member that would lead.

    Attributes:
        folder: The id of its data folder.
        addresses: Where it is reached.
        epoch: The highest epoch that it knows; 0: it was in no cluster yet.
        instances: Names of processes that have had the folder, the present one last. Each process has a new one.
        cluster_id: The id of the cluster that it was in; empty: none.
    """

    folder: str
    addresses: tuple[str, ...]
    epoch: int = 0
    instances: tuple[str, ...] = ()
    cluster_id: str = ""


class RecordedArchive(NamedTuple):
    """The archive from which a member may be restored.

    Attributes:
        place: As of `trio_nsq.storage.canonical_place`.
        owner: The id that it shares with the data folders of the members.
    """

    place: str
    owner: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The value of a cluster.

    Attributes:
        cluster: The name of the cluster.
        id: Made when the cluster began: another one of the same name, such as one that begins anew because this value
            was lost, has another id. Empty: unknown.
        epoch: Identifies the leadership: each leader has a higher one.
        leader: The id of the leader's data folder.
        session: Identifies this leadership; random, so that its holder recognizes what it has written.
        in_sync: The members that have all acknowledged messages, with the leader.
        members: The addresses of all members, by the ids of their data folders.
        instances: The processes that the members in sync had when they were recorded, by the ids of their data folders.
            An older copy of a folder, such as a backup, does not know the name.
        successor: The member to which the leader has handed over; empty: none.
        archive: The archive from which a member without messages may be restored, and lead, if the leader is the only
            member in sync and its lease is over: it has all but the last seconds, and the leader acknowledges nothing
            without its lease. None: there is none.
        unknown: Fields of newer versions. They are kept.
    """

    cluster: str
    epoch: int
    leader: str
    session: str
    in_sync: frozenset[str]
    members: Mapping[str, tuple[str, ...]]
    successor: str = ""
    id: str = ""
    instances: Mapping[str, str] = field(default_factory=dict)
    archive: RecordedArchive | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the leader."""
        return self.members[self.leader]

    def in_sync_besides(self, folder: str) -> tuple[str, ...]:
        """Return the addresses of all members in sync except one; one of them leads, or led before it."""
        others = sorted(self.in_sync - {folder})
        return tuple(address for member in others for address in self.members[member])

    def followers_besides(self, folder: str) -> frozenset[str]:
        """Return the members in sync that did not lead, except one."""
        return self.in_sync - {folder, self.leader}

    def shown(self, folder: str) -> str:
        """Return the id of a member with its first address, for messages."""
        addresses = self.members.get(folder, ())
        return f"{folder} ({addresses[0].rpartition('://')[2]})" if addresses else folder

    def joined(self, folder: str, addresses: Iterable[str]) -> "ClusterState":
        """Return the value with a member and its addresses. A new member is not in sync.

        Members that are not in sync are forgotten if they had these addresses: this one has replaced them. So are
        others if there are too many. One that returns joins again.
        """
        return _checked(replace(self, members=self._members_with(folder, tuple(addresses))))

    def _members_with(self, folder: str, addresses: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        members = {**self.members, folder: addresses}
        away = members.keys() - self.in_sync - {folder}
        # Those that were replaced first: then there may be room for the others.
        for name in sorted(away, key=lambda name: members[name] != addresses):
            is_replaced = bool(addresses) and members[name] == addresses
            if is_replaced or len(members) > MAX_MEMBERS:
                del members[name]
        return members

    def synced(self, folder: str, instance: str = "") -> "ClusterState":
        """Return the value with a member in sync: it has all acknowledged messages, and gets all others first."""
        self._check_member(folder)
        return replace(self, in_sync=self.in_sync | {folder}, instances=self._instances(folder, instance))

    def _instances(self, folder: str, instance: str) -> dict[str, str]:
        """Return the instances with another one for a member; empty: without one."""
        others = {name: each for name, each in self.instances.items() if name != folder}
        return others | ({folder: instance} if instance else {})

    def unsynced(self, folder: str) -> "ClusterState":
        """Return the value with a member that is no longer in sync, and cannot lead."""
        self._check_not_leader(folder)
        return replace(
            self,
            in_sync=self.in_sync - {folder},
            instances=self._instances(folder, ""),
            successor=self._without(folder),
        )

    def removed(self, folder: str) -> "ClusterState":
        """Return the value without a member."""
        self._check_member(folder)
        self._check_not_leader(folder)
        members = {name: addresses for name, addresses in self.members.items() if name != folder}
        return replace(
            self,
            in_sync=self.in_sync - {folder},
            members=members,
            instances=self._instances(folder, ""),
            successor=self._without(folder),
        )

    def archived(self, archive: RecordedArchive | None) -> "ClusterState":
        """Return the value with another archive from which a member may be restored, or without one."""
        return replace(self, archive=archive)

    def handed_over(self, folder: str) -> "ClusterState":
        """Return the value in which a member is to lead next."""
        self._check_not_leader(folder)
        self._check_in_sync(folder)
        return replace(self, successor=folder)

    def elected(
        self, candidate: Candidate, session: str, epoch: int, *, is_confirmed: bool = False
    ) -> "ClusterState":
        """Return the value in which a candidate leads.

        Args:
            is_confirmed: It may lack messages: an administrator has confirmed that they are lost. Then it is the only
                member in sync.

        Raises:
            NotInSync: It may lack messages.
            OutdatedState: It knows a higher epoch.
        """
        if candidate.epoch > self.epoch and not is_confirmed:
            raise OutdatedState(
                f"the coordinator has epoch {self.epoch} of the cluster {self.cluster}, and the data folder "
                f"{candidate.folder} has seen epoch {candidate.epoch}: the coordinator's data is older, for example "
                "from a backup, so it is unknown which members have all messages. Let the member that led last lead: "
                "qcli cluster promote"
            )
        if not is_confirmed:
            self.check_same(candidate.cluster_id)
            self._check_in_sync(candidate.folder)
            self._check_instance(candidate)
        if epoch <= self.epoch:
            raise StateError(f"the epoch {epoch} of a new leader is not above {self.epoch}")
        members = self._members_with(candidate.folder, candidate.addresses)
        return _checked(
            replace(
                self,
                epoch=epoch,
                leader=candidate.folder,
                session=session,
                in_sync=frozenset({candidate.folder}) if is_confirmed else self.in_sync,
                members=members,
                instances=self._instances(candidate.folder, (candidate.instances or ("",))[-1]),
                successor="",
                archive=None,
                id=(candidate.cluster_id if is_confirmed else "") or self.id,
            )
        )

    def check_same(self, cluster_id: str) -> None:
        """Raise OutdatedState if a member was in another cluster of this name."""
        if cluster_id and self.id and cluster_id != self.id:
            raise OutdatedState(
                f"the coordinator has another cluster with the name {self.cluster} than the one that this member was "
                "in, for example one that began anew because the value was lost. If the messages of this member are "
                "not needed, move the content of its data folder away; otherwise let the member that led last lead: "
                "qcli cluster promote"
            )

    def _check_instance(self, candidate: Candidate) -> None:
        known = self.instances.get(candidate.folder)
        if known is not None and known not in candidate.instances:
            raise NotInSync(
                f"the data folder {candidate.folder} is older than when it was in sync with the cluster "
                f"{self.cluster}, as a backup is: messages are missing in it, so it cannot lead"
            )

    def _without(self, folder: str) -> str:
        return "" if self.successor == folder else self.successor

    def _check_member(self, folder: str) -> None:
        if folder not in self.members:
            raise StateError(f"{folder} is not a member of the cluster {self.cluster}")

    def _check_in_sync(self, folder: str) -> None:
        if folder not in self.in_sync:
            what = "in sync with" if folder in self.members else "a member of"
            raise NotInSync(
                f"{folder} is not {what} the cluster {self.cluster}, so it may lack messages and cannot lead; it waits "
                f"for a member in sync: {' or '.join(self.shown(each) for each in sorted(self.in_sync))}"
            )

    def _check_not_leader(self, folder: str) -> None:
        if folder == self.leader:
            raise StateError(f"{folder} leads the cluster {self.cluster}: let another member lead first")

    def encode(self) -> bytes:
        """Encode the value as JSON. Raises StateError if it is too long."""
        known = {
            "cluster": self.cluster,
            **({"id": self.id} if self.id else {}),
            "epoch": self.epoch,
            "leader": self.leader,
            "session": self.session,
            "in_sync": sorted(self.in_sync),
            "members": {name: list(self.members[name]) for name in sorted(self.members)},
            **({"instances": dict(sorted(self.instances.items()))} if self.instances else {}),
            **({"successor": self.successor} if self.successor else {}),
            **({"archive": self.archive._asdict()} if self.archive is not None else {}),
        }
        data = json.dumps({**self.unknown, **known}).encode()
        if len(data) > MAX_VALUE_BYTES:
            raise StateError(
                f"the value of the cluster {self.cluster} is longer than {MAX_VALUE_BYTES} bytes"
            )
        return data


def founded(cluster: str, candidate: Candidate, session: str, epoch: int) -> ClusterState:
    """Return the first value of a cluster, whose only member is the candidate.

    Args:
        session: Random; the id of the cluster, too, unless the candidate was in one whose value was lost.
    """
    members = {candidate.folder: candidate.addresses}
    in_sync = frozenset({candidate.folder})
    instances = {candidate.folder: candidate.instances[-1]} if candidate.instances else {}
    return _checked(
        ClusterState(
            cluster,
            epoch,
            candidate.folder,
            session,
            in_sync,
            members,
            id=candidate.cluster_id or session,
            instances=instances,
        )
    )


def check_founder(cluster: str, candidate: Candidate) -> None:
    """Check that a cluster without a value may begin with a candidate. Raises OutdatedState."""
    if candidate.epoch:
        raise OutdatedState(
            f"the coordinator has no value of the cluster {cluster}, and the data folder {candidate.folder} has seen "
            f"epoch {candidate.epoch}: the value was lost, so it is unknown which members have all messages. Let the "
            "member that led last lead: qcli cluster promote"
        )


def _archive(fields: dict[str, Any]) -> RecordedArchive:
    return RecordedArchive(_get(fields, "place", str), _get(fields, "owner", str))


def decode(data: bytes) -> ClusterState:
    """Decode a value. Raises StateError."""
    if len(data) > MAX_VALUE_BYTES:
        raise StateError(f"the value of the cluster is longer than {MAX_VALUE_BYTES} bytes")
    try:
        fields = decode_json(data)
    except ValueError as exc:
        raise StateError(f"the value of the cluster is not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise StateError("the value of the cluster is not a JSON object")
    state = ClusterState(
        cluster=_get(fields, "cluster", str),
        epoch=_get(fields, "epoch", int),
        leader=_get(fields, "leader", str),
        session=_get(fields, "session", str),
        in_sync=frozenset(_texts(fields, "in_sync")),
        members={name: _texts(_get(fields, "members", dict), name) for name in _get(fields, "members", dict)},
        successor=_get({"successor": "", **fields}, "successor", str),
        id=_get({"id": "", **fields}, "id", str),
        archive=_archive(_get(fields, "archive", dict)) if "archive" in fields else None,
        instances={
            name: _get(_get({"instances": {}, **fields}, "instances", dict), name, str)
            for name in _get({"instances": {}, **fields}, "instances", dict)
        },
        unknown={name: value for name, value in fields.items() if name not in _KNOWN},
    )
    return _checked(state)


def _get(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise StateError(f"the value of the cluster has no valid field {name}")
    return value


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = _get(fields, name, list)
    return tuple(_get({name: value}, name, str) for value in values)


def check_name(what: str, name: str) -> str:
    """Return the name of a cluster or the id of a data folder. Raises StateError if it is not valid."""
    if _NAME.fullmatch(name) is None:
        raise StateError(
            f"{what} {name[:100]!r} is not valid: use 1 to 64 letters, digits, and the characters . _ - "
            "behind the first one"
        )
    return name


def _checked(state: ClusterState) -> ClusterState:
    """Return a value if it is valid. Raises StateError."""
    check_name("the name of the cluster", state.cluster)
    check_name("the session", state.session)
    if state.id:
        check_name("the id of the cluster", state.id)
    if not 0 < state.epoch <= MAX_EPOCH:
        raise StateError(f"the epoch {str(state.epoch)[:30]} is not between 1 and 2**62")
    if len(state.members) > MAX_MEMBERS:
        raise StateError(f"the cluster {state.cluster} would have more than {MAX_MEMBERS} members")
    for folder, addresses in state.members.items():
        check_name("the id of a data folder", folder)
        if len(addresses) > MAX_ADDRESSES or any(len(each) > MAX_ADDRESS_CHARACTERS for each in addresses):
            raise StateError(
                f"{folder} has more than {MAX_ADDRESSES} addresses, or one of more than {MAX_ADDRESS_CHARACTERS} "
                "characters"
            )
    for instance in state.instances.values():
        check_name("the instance of a member", instance)
    if not state.in_sync <= state.members.keys():
        raise StateError(f"members of the cluster {state.cluster} that are in sync are not among its members")
    if state.leader not in state.in_sync:
        raise StateError(f"the leader of the cluster {state.cluster} is not in sync with itself")
    if state.successor and (state.successor == state.leader or state.successor not in state.in_sync):
        raise StateError(
            f"the successor {state.successor[:100]} in the cluster {state.cluster} is not in sync"
        )
    return state
