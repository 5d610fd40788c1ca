"""Roles, grants and identities; and what a request needs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, get_args

from .patterns import ALL, Pattern

Role = Literal["publish", "consume", "read", "manage", "admin", "register", "replicate", "unmask"]
"""What a client may do: `publish` messages; `consume` a channel; `read` messages without consuming them, and
statistics and settings; `manage` topics and channels (create, delete, pause, empty, seek, settings, dead letters);
`admin` the server (configuration, debugging); `register` topics with a discovery service, as a broker; `replicate` the
data folder of a broker, and pass clients on to it, as a member of its cluster; `unmask`
fields of bodies that a web console masks, for someone who may `read`. No role includes another."""

ROLES: tuple[Role, ...] = get_args(Role)

Source = Literal["token", "certificate", "auth server", "proxy", "oidc", "anonymous"]
"""`proxy`: a reverse proxy has named the client of a web console. `anonymous`: no credentials, and the auth file allows
some requests without."""

_SHOWN = 100
"""Characters of a name in an error message: a request can have a name of 64 KiB."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Roles on the topics and channels that match.

    Attributes:
        topics, channels: Patterns; one of each must match. Channels count only where a channel is used.
        everywhere: The patterns include every topic and channel, so the grant is also valid for the whole server.
        every_channel: The channel patterns include every channel. Without it, the grant does not `manage` a topic
            itself, because that affects all its channels.
    """

    roles: frozenset[Role]
    topics: tuple[Pattern, ...]
    channels: tuple[Pattern, ...]
    everywhere: bool = False
    every_channel: bool = False

    def covers(self, topic: str, channel: str | None) -> bool:
        """Whether a topic, or a channel of it (None: the topic itself), matches."""
        return any(pattern.fullmatch(topic) for pattern in self.topics) and (
            channel is None or any(pattern.fullmatch(channel) for pattern in self.channels)
        )


def is_everywhere(topics: tuple[str, ...], channels: tuple[str, ...]) -> bool:
    """Whether patterns include every topic and every channel."""
    return ALL in topics and ALL in channels


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated client.

    Attributes:
        name: The name in the auth file, or the auth server's; for statistics and the audit log.
        source: How the client was authenticated.
        expires_at_s: Unix seconds; math.inf never.
        key: Identifies the entry of the auth file: the token's digest, or the certificate's subject.
        url: More about the client, from an auth server.
    """

    name: str
    source: Source
    grants: tuple[Grant, ...]
    expires_at_s: float = math.inf
    key: str = ""
    url: str = ""

    def allows(self, role: Role, topic: str, channel: str | None = None) -> bool:
        """Whether the client has a role on a topic or, if the channel is not None, on the channel."""
        return any(
            role in grant.roles
            and grant.covers(topic, channel)
            and (grant.every_channel or channel is not None or role != "manage")
            for grant in self.grants
        )

    def allows_everywhere(self, role: Role) -> bool:
        """Whether the client has a role on the whole server."""
        return any(role in grant.roles and grant.everywhere for grant in self.grants)

    def has(self, role: Role) -> bool:
        """Whether the client has a role on any topic."""
        return any(role in grant.roles for grant in self.grants)

    def sees(self, topic: str) -> bool:
        """Whether the client may know that a topic exists: it has any role on it.

        An anonymous client has no roles: its grant has the topics that it sees.
        """
        return any(
            (grant.roles or self.source == "anonymous") and grant.covers(topic, None) for grant in self.grants
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """What a request needs.

    Attributes:
        role: The role; None: any authenticated client may send it, and sees only topics that it has a role on.
        scope: Where the role is needed: on the request's topic, on its channel, or on the whole server.
        open: No authentication is needed.
        anonymous: Clients without credentials may send it, too, if the auth file has topics that they see.
    """

    role: Role | None = None
    scope: Literal["topic", "channel", "server"] = "server"
    open: bool = False
    anonymous: bool = False

    def allows(self, identity: Identity, query: Mapping[str, str]) -> bool:
        """Whether a client may send a request.

        If the request lacks a name, the role is needed on the whole server. A pattern of an auth server may match the
        empty name, although it does not match all others.
        """
        if self.open or self.role is None:
            return True
        topic = query.get("topic", "")
        channel = query.get("channel", "") if self.scope == "channel" else None
        if self.scope == "server" or not topic or channel == "":
            return identity.allows_everywhere(self.role)
        return identity.allows(self.role, topic, channel)

    def describe(self, query: Mapping[str, str]) -> str:
        """Return the role and scope for an error message."""
        topic, channel = query.get("topic", "")[:_SHOWN], query.get("channel", "")[:_SHOWN]
        if self.scope == "server" or not topic or (self.scope == "channel" and not channel):
            return f"the role {self.role} on all topics"
        where = f"channel {channel} of topic {topic}" if self.scope == "channel" else f"topic {topic}"
        return f"the role {self.role} on {where}"


@dataclass(frozen=True, slots=True)
class Policy:
    """The contents of an auth file.

    Attributes:
        tokens: Identities by the digest of their token: `token_digest`.
        certificates: Identities by the subject of their certificate (RFC 4514).
        anonymous: The identity of clients without credentials, where a rule is `anonymous`; None: they need some.
    """

    tokens: Mapping[str, Identity] = field(default_factory=dict)
    certificates: Mapping[str, Identity] = field(default_factory=dict)
    anonymous: Identity | None = None

    def find_token(self, secret: bytes, unix_s: float) -> Identity | None:
        """Return the identity of a token; None if it is unknown or has expired.

        The lookup compares digests. A client cannot choose the digest of a token it does not know, so the time of the
        lookup tells it nothing about the tokens.
        """
        return _unexpired(self.tokens.get(token_digest(secret)), unix_s)

    def find_certificate(self, subject: str, unix_s: float) -> Identity | None:
        """Return the identity of a verified certificate; None if its subject is unknown or has expired."""
        return _unexpired(self.certificates.get(subject), unix_s) if subject else None

    def renew(self, identity: Identity, unix_s: float) -> Identity | None:
        """Return the entry that an identity of an earlier policy has here; None if it is gone or has expired."""
        if identity.source == "anonymous":
            return self.anonymous
        entries = self.tokens if identity.source == "token" else self.certificates
        return _unexpired(entries.get(identity.key), unix_s)

    def next_expiry_s(self, unix_s: float) -> float:
        """Return when the next entry expires, Unix seconds; math.inf if none does."""
        times = [entry.expires_at_s for part in (self.tokens, self.certificates) for entry in part.values()]
        return min((time for time in times if time > unix_s), default=math.inf)


def token_digest(secret: bytes) -> str:
    """Return the digest that stands for a token in the auth file.

    Tokens are 256 random bits, so a plain SHA-256 cannot be reversed by guessing; a slow hash would only make every
    request slow.
    """
    return f"sha256:{sha256(secret).hexdigest()}"


def _unexpired(identity: Identity | None, unix_s: float) -> Identity | None:
    return identity if identity is not None and unix_s < identity.expires_at_s else None
