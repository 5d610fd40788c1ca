"""The options of logins with an OpenID Connect provider."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from ...access.patterns import ALL, compile_glob
from ...access.policy import ROLES, Grant, is_everywhere
from ...access.secret import NO_SECRET, Secret
from ...protocol.address import is_loopback

BEGIN = "/oidc/login"
"""The path below the base path that sends the browser to the provider."""
CALLBACK = "/oidc/callback"
"""The path below the base path to which the provider sends the browser back."""
EVERYONE = "*"
"""As a group: every user of the provider."""
MAX_URL_BYTES = 500
_ALL_ROLES = "all"
MAX_GROUPS = 200
"""Groups with roles: the cookie of a session has 8 bytes for each of them that the user is in."""


@dataclass(frozen=True, slots=True)
class GroupGrant:
    """What the users in a group may do."""

    group: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class OIDCOptions:
    """An OpenID Connect provider, and what its users may do.

    Attributes:
        issuer: The URL of the provider, exactly as its tokens have it: `check_issuer`.
        client_id: The id of the console at the provider.
        client_secret: The secret of the console at the provider; without one, it is a public client.
        name: On the button of the login page; empty: the host of the issuer.
        scopes: What the console asks for.
        groups_claim: The claim with the user's groups, a list of strings, or one.
        grants: What groups may do. Users without a grant cannot log in.
        redirect_url: Where the provider sends the browser back, as it is registered there; empty: made of the host that
            the browser asked for.
        root_ca_file: The trusted CAs for https to the provider; None: the system's.
    """

    issuer: str
    client_id: str
    client_secret: Secret = NO_SECRET
    name: str = ""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    groups_claim: str = "groups"
    grants: tuple[GroupGrant, ...] = ()
    redirect_url: str = ""
    root_ca_file: Path | None = None

    @property
    def shown_name(self) -> str:
        """The name of the provider for people."""
        return self.name or urlsplit(self.issuer).netloc

    def at(self, base_path: str, root: str) -> "OIDCOptions":
        """Return these options for the pages below another path than the base path of the redirect URL."""
        origin = self.redirect_url.removesuffix(base_path.rstrip("/") + CALLBACK)
        return replace(self, redirect_url=f"{origin}{root.rstrip('/')}{CALLBACK}") if origin else self


def parse_group_grant(text: str) -> GroupGrant:
    """Parse `GROUP=ROLE[+ROLE...][@TOPIC]`. Everything before the last `=` is the group; the role `all` is all roles.

    Raises:
        ValueError: The text is of another form, or has an unknown role or an invalid pattern.
    """
    group, equals, rest = text.rpartition("=")
    names, _, topic = rest.partition("@")
    if not equals or not group or not names:
        raise ValueError(f"{text!r} is not GROUP=ROLES or GROUP=ROLES@TOPIC, such as ops=read+manage")
    given = names.split("+")
    roles = frozenset(role for role in ROLES if role in given or _ALL_ROLES in given)
    unknown = next((name for name in given if name not in (*ROLES, _ALL_ROLES)), None)
    if unknown is not None:
        raise ValueError(f"{text!r}: unknown role {unknown!r}; the roles are {', '.join(ROLES)}, and all")
    topics = (topic if "@" in rest else ALL,)
    try:
        patterns = tuple(map(compile_glob, topics))
    except ValueError as exc:
        raise ValueError(f"{text!r}: {exc}") from None
    every = (compile_glob(ALL),)
    return GroupGrant(group, Grant(roles, patterns, every, is_everywhere(topics, (ALL,)), every_channel=True))


def check_issuer(text: str) -> str:
    """Return the URL of an issuer. Raises ValueError: it is not valid, or the connection would not be encrypted."""
    parts = check_url(text)
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} has a query or a fragment")
    return text


def check_url(text: str) -> SplitResult:
    """Return the parts of a URL of a provider, which is https, or http on this machine. Raises ValueError."""
    parts = urlsplit(text)
    if not (
        parts.scheme in ("http", "https")
        and parts.hostname
        and parts.port != 0
        and "@" not in parts.netloc
        and text.isascii()
        and all(char.isprintable() and char not in ' "<>\\^`{|}' for char in text)
        and len(text) <= MAX_URL_BYTES
    ):
        raise ValueError(f"{text[:MAX_URL_BYTES]!r} is not a URL such as https://login.example.com")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{text!r} is not https: others in the network could take over logins")
    return parts


def grants_of(grants: Iterable[GroupGrant], groups: frozenset[str]) -> tuple[Grant, ...]:
    """Return what the users in some groups may do."""
    return tuple(each.grant for each in grants if each.group in groups or each.group == EVERYONE)
