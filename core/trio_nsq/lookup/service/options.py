"""The options of a discovery service. Names and defaults are nsqlookupd's; comments give the reason of exceptions."""

from dataclasses import dataclass
from pathlib import Path

from ...protocol.limits import MINUTE_MS, SECOND_MS
from ...tls.settings import ClientAuthPolicy, TLSSettings, TLSVersion, requires_certificate


@dataclass(frozen=True, slots=True)
class LookupdOptions:
    """The configuration of one discovery service.

    Addresses are `host:port`; port 0 selects a free port. By default they are loopback addresses, so that no other
    machine gets access by accident (nsqlookupd listens on all interfaces).

    Attributes:
        tcp_address: The address for brokers.
        http_address: The address of the HTTP API, for consumers and administrators.
        broadcast_address: The host that brokers use for HTTP queries. None: the host name of this machine, or the
            loopback address if the service listens only there.
        inactive_producer_timeout_ms: Answers omit a broker that has not pinged for longer.
        tombstone_lifetime_ms: How long a tombstone hides a broker from a topic's consumers.
        data_path: A folder for the names of topics and channels, so that a restart keeps those that no broker has at
            the time. Created if missing; its parent must exist. None: they are not kept, as in nsqlookupd.
        max_registrations: The limit of topics and channels per broker; nsqlookupd has no limit.
        max_topics, max_channels: The limits of all topics, and of the channels of all topics together. A new one
            replaces one without a broker.
        max_connections: Clients of each listener; 0 is as many as the limit of open files allows.
        tls_cert, tls_key: PEM files; both or neither. With them, both ports accept TLS and plain text.
        tls_required: Refuse clients without TLS. A policy that requires certificates implies it.
        tls_client_auth_policy, tls_root_ca_file, tls_min_version: See `TLSSettings`.
        auth_file: Tokens and certificates, with what each may do: `access/auth_file.py`. None: clients may do
            everything.
        http_allowed_hosts: Names by which HTTP clients may address the service, besides localhost, this machine's host
            name, the broadcast address and IP addresses; see `HostNames`. `*` stands for any characters.
        http_read_only: Refuse HTTP requests that change something.
        audit_log: The file of the audit log, or `-` for standard output; empty for none.
    """

    tcp_address: str = "127.0.0.1:4160"
    http_address: str = "127.0.0.1:4161"
    broadcast_address: str | None = None
    inactive_producer_timeout_ms: int = 5 * MINUTE_MS
    tombstone_lifetime_ms: int = 45 * SECOND_MS
    data_path: Path | None = None
    max_registrations: int = 100_000
    max_topics: int = 100_000
    max_channels: int = 100_000
    max_connections: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_required: bool = False
    tls_client_auth_policy: ClientAuthPolicy = ""
    tls_root_ca_file: Path | None = None
    tls_min_version: TLSVersion = "tls1.2"
    auth_file: Path | None = None
    http_allowed_hosts: tuple[str, ...] = ()
    http_read_only: bool = False
    audit_log: str = ""

    @property
    def tls(self) -> TLSSettings:
        """The TLS settings of both listeners."""
        return TLSSettings(
            self.tls_cert,
            self.tls_key,
            self.tls_client_auth_policy,
            self.tls_root_ca_file,
            self.tls_min_version,
            required=self.tls_required or requires_certificate(self.tls_client_auth_policy),
        )
