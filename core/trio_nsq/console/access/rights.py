"""What a viewer may do: only what every broker with authentication allows. Pure."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ...access.description import describe
from ...access.patterns import ALL, compile_glob
from ...access.policy import ROLES, Grant, Identity, Role

_EVERY = (compile_glob(ALL),)


@dataclass(frozen=True, slots=True)
class Rights:
    """What a viewer may do.

    Attributes:
        identities: The viewer at each broker whose rights differ. Without any, nothing is allowed.
        key: Equal for viewers with equal rights, so that they can share what is rendered for one of them.
    """

    identities: tuple[Identity, ...] = ()
    key: str = field(default="", compare=False)

    def allows(self, role: Role, topic: str = "", channel: str = "") -> bool:
        """Whether every broker gives a role on a topic or channel; without a topic, on all topics."""
        return bool(self.identities) and all(
            each.allows(role, topic, channel or None) if topic else each.allows_everywhere(role)
            for each in self.identities
        )

    def sees(self, topic: str) -> bool:
        """Whether the viewer may know that a topic exists."""
        return bool(self.identities) and all(each.sees(topic) for each in self.identities)

    def has(self, role: Role) -> bool:
        """Whether every broker gives a role on some topic."""
        return bool(self.identities) and all(each.has(role) for each in self.identities)


def rights_of(identities: Iterable[Identity]) -> Rights:
    """Return what all identities may do. Brokers with the same auth file count once."""
    found: dict[str, Identity] = {}
    for identity in identities:
        found.setdefault(_key(identity), identity)
    return Rights(tuple(found.values()), sha256("\n".join(sorted(found)).encode()).hexdigest())


def _key(identity: Identity) -> str:
    about: dict[str, Any] = describe(identity, read_only=False)
    return json.dumps([about["pattern_type"], sorted(json.dumps(grant) for grant in about["grants"])])


def everywhere(*roles: Role) -> Rights:
    """Return the rights of a viewer with some roles on all topics."""
    grant = Grant(frozenset(roles), _EVERY, _EVERY, everywhere=True, every_channel=True)
    return rights_of([Identity("", "token", (grant,))])


NOTHING = Rights()
READ = everywhere("read")
EVERYTHING = everywhere(*ROLES)
