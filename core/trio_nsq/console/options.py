"""The options of the console. Names and defaults are nsqadmin's; comments give the reason of exceptions."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..access.secret import NO_SECRET, Secret
from ..client.connection.tls import TLSFiles
from ..protocol.limits import MINUTE_MS
from .oidc.options import OIDCOptions

COLORS = {
    "red": "#b3261e",
    "orange": "#a04a00",
    "green": "#0b6b41",
    "blue": "#2f55d4",
    "purple": "#7446cc",
    "gray": "#585f6c",
}
"""Colours by which pages of several consoles are told apart; white text is legible on each."""
FLEETS = "c"
"""The segment of a path before the name of a fleet, if one console serves several."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """One of the fleets of a console, for the switch on its pages.

    Attributes:
        name: The segment of its path, and its title.
        color: A name of `COLORS`; empty: the console's own blue.
    """

    name: str
    color: str = ""


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """The configuration of one console.

    Attributes:
        http_address: Where it listens, `host:port`; port 0 selects a free port. Loopback by default, so that no other
            machine gets access by accident (nsqadmin listens on all interfaces).
        title: The name of the fleet, on each page; empty: none.
        color: A name of `COLORS`, of the title and the icon; empty: the console's own blue.
        base_path: The path below which all pages are, for a reverse proxy.
        fleet: The name of this fleet, if one console serves several: its pages are below `c/NAME` of the base path.
            Empty: it is the only one, and its pages are at the base path.
        fleets: All fleets of the console, in the order of the switch; empty: only this one.
        hide_topics: Names and patterns of topics that the list of topics leaves out, and only counts.
        nsqd_http_addresses: Brokers: `host:port`, `https://host:port`, or the path of a unix socket.
        lookupd_http_addresses: Discovery services: `host:port` or a URL. The brokers that they list belong to the
            fleet, too.
        lookupd_allowed_hosts: Leave out listed brokers on other hosts; if empty, allow all. The console sends its
            secret to listed brokers.
        tls: For https to brokers and discovery services.
        secret: Authenticates the console at brokers and discovery services; viewers use tokens of their own.
        connect_timeout_ms, request_timeout_ms: Limits for requests to brokers and discovery services.
        poll_interval_ms: The shortest time between two polls of a broker, while there are viewers.
        https_cert, https_key: PEM files; both or neither. With them, the pages are served over HTTPS only.
        anonymous: What viewers without a login may do; empty: it depends on the brokers and the address.
        auth_file: Tokens of the console itself, for brokers without authentication. None: none.
        oidc: An OpenID Connect provider with which viewers log in. None: none.
        acl_http_header: The header by which a trusted proxy names the viewer; it counts only with `admin_users`.
        admin_users: These may change everything; other named users may only read.
        trusted_proxies: Networks whose header is believed.
        session_lifetime_ms: A login ends after this time.
        session_key: The key of the session cookies, 32 random bytes; empty: `session_key_file` decides.
        session_key_file: Keeps the key of the session cookies. None: a new key at each start.
        http_allowed_hosts: Host names for the console, besides localhost, this machine's name and IP addresses.
        max_connections: Viewers' connections; 0 is as many as half of the limit of open files allows.
        allow_config_from_cidr: The network that may use `/config`; empty: none.
        graphite_url: A Graphite whose charts are shown, too; empty: none.
        proxy_graphite: Fetch its charts through the console.
        statsd_prefix, statsd_counter_format, statsd_gauge_format, statsd_interval_ms: How the brokers' statsd names
            its figures in Graphite.
        bodies_file: Formats, schemas and masks of message bodies; None: only what bodies themselves say is known.
        notification_http_endpoint: Gets a POST after each action; empty: none.
        audit_log: The file of the audit log, or `-` for standard output; empty for none.
    """

    http_address: str = "127.0.0.1:4171"
    title: str = ""
    color: str = ""
    base_path: str = "/"
    fleet: str = ""
    fleets: tuple[Fleet, ...] = ()
    hide_topics: tuple[str, ...] = ()
    nsqd_http_addresses: tuple[str, ...] = ()
    lookupd_http_addresses: tuple[str, ...] = ()
    lookupd_allowed_hosts: tuple[str, ...] = ()
    tls: TLSFiles = field(default_factory=TLSFiles)
    secret: Secret = NO_SECRET
    connect_timeout_ms: int = 2_000
    request_timeout_ms: int = 5_000
    poll_interval_ms: int = 2_000
    https_cert: Path | None = None
    https_key: Path | None = None
    anonymous: Literal["", "none", "read", "manage"] = ""
    auth_file: Path | None = None
    oidc: OIDCOptions | None = None
    acl_http_header: str = "X-Forwarded-User"
    admin_users: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    session_lifetime_ms: int = 8 * 60 * MINUTE_MS
    session_key: bytes = field(default=b"", repr=False)
    session_key_file: Path | None = None
    http_allowed_hosts: tuple[str, ...] = ()
    max_connections: int = 0
    allow_config_from_cidr: str = "127.0.0.1/8"
    graphite_url: str = ""
    proxy_graphite: bool = False
    statsd_prefix: str = "nsq.%s"
    statsd_counter_format: str = "stats.counters.%s.count"
    statsd_gauge_format: str = "stats.gauges.%s"
    statsd_interval_ms: int = MINUTE_MS
    bodies_file: Path | None = None
    notification_http_endpoint: str = ""
    audit_log: str = ""

    @property
    def knows_viewers(self) -> bool:
        """Whether the console itself names viewers that may change something: it acts for them at the brokers."""
        named = self.oidc is not None or self.auth_file is not None or bool(self.admin_users)
        return named or self.anonymous == "manage"

    @property
    def root(self) -> str:
        """The path of the first page of this fleet: `/`, `/nsq`, or `/nsq/c/production`."""
        return self.root_of(self.fleet) if self.fleet else self.base_path

    def root_of(self, fleet: str) -> str:
        """Return the path of the first page of one of the fleets of this console."""
        return fleet_root(self.base_path, fleet)


def fleet_root(base_path: str, fleet: str) -> str:
    """Return the path of the first page of a fleet, one of several."""
    return f"{base_path.rstrip('/')}/{FLEETS}/{fleet}"
