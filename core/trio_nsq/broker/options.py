"""The broker's options. Names are nsqd's with the unit added; defaults are nsqd's unless a comment gives a reason."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from ..event_loop.pacing import Pacing
from ..protocol.limits import MIB, MINUTE_MS, SECOND_MS, Limits
from ..text.arguments import check_int, check_options
from ..tls.settings import ClientAuthPolicy, TLSSettings, TLSVersion, requires_certificate
from .state.settings import TopicSettings

Sync = Literal["always", "interval"]
TLSRequired = Literal["false", "true", "tcp-https"]

_RANGES: dict[str, tuple[int, int | None]] = {
    "node_id": (0, 1023),
    "broadcast_tcp_port": (0, 65535),
    "broadcast_http_port": (0, 65535),
    **dict.fromkeys(
        (
            *("sync_every", "sync_timeout_ms", "checkpoint_interval_ms", "max_bytes_per_file"),
            "archive_interval_ms",
            *("http_client_connect_timeout_ms", "http_client_request_timeout_ms"),
            *("statsd_interval_ms", "statsd_udp_packet_size", "e2e_processing_latency_window_time_ms"),
        ),
        (1, None),
    ),
}
"""The least and the greatest value of numbers; others are at least 0."""


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """The configuration of one broker.

    An address is `host:port` (port 0 picks a free port) or the path of a unix socket (contains a slash). The defaults
    are loopback, so that no broker is exposed by accident (nsqd listens on all interfaces).

    Attributes:
        data_path: The data folder. Created if it is missing; its parent must exist.
        tcp_address: Where to listen for the V2 protocol.
        http_address: Where to listen for HTTP; empty means no HTTP.
        https_address: Where to listen for HTTPS, if there is a certificate; empty means no HTTPS.
        broadcast_address: The address to announce; None is this machine's host name.
        broadcast_tcp_port, broadcast_http_port: The ports to announce; 0 is the bound port.
        topology_region, topology_zone: Where the broker runs: messages go to ready consumers of the same zone first,
            then to those of the same region, then to all others. Empty: no preference.
        nsqlookupd_tcp_addresses: Discovery services to register with, `host:port` each.
        lookupd_tls: Connect to them over TLS only. `tls_root_ca_file` verifies their certificates, and they may ask for
            `tls_cert`.
        lookupd_auth_secret_file: A file whose first line is the token for them. It is read for each connection.
        node_id: 0..1023, the first ten bits of every message id; None derives it from the host name as nsqd does.
        sync: `always`: an OK means on stable storage. `interval`: an OK means written to the file; synced after
            `sync_every` messages or `sync_timeout_ms`, whichever comes first.
        sync_every: For `interval`: sync after this many messages.
        sync_timeout_ms: For `interval`: sync after this time.
        topic_defaults: Settings of each topic, unless changed for the topic.
        mem_queue_size: Newest messages of each topic that are kept decoded in memory.
        cache_bytes: Limit of the bytes of decoded messages kept in memory, over all topics; overrides `mem_queue_size`.
        max_bytes_per_file: Size at which a topic's log starts a new segment.
        checkpoint_interval_ms: Interval of writing changed channel positions. After a crash, messages finished since
            the last checkpoint are delivered again.
        archive: Where file operations are archived: a folder on another disk, or the URL of a bucket; empty: nowhere.
        archive_interval_ms: How often they are archived.
        archive_retention_ms: How long messages and states stay in the archive; 0: for ever.
        archive_before_ok: An OK waits until what was published is archived.
        restore_from: An archive; the data folder is restored from it if it is missing or empty.
        max_channel_consumers: Consumers of one channel; 0 is no limit.
        max_connections: Clients of each listener (TCP, HTTP, HTTPS); 0 is as many as the limit of open files allows.
        max_topics: Topics that clients can create; 0 is no limit.
        max_channels: Channels of one topic; 0 is no limit.
        limits: Limits of client requests and of the values clients can negotiate.
        tls_cert, tls_key: PEM files; both or neither. They enable TLS.
        tls_client_auth_policy: Whether clients need a certificate: `""` no; `require` any; `require-verify` one that
            `tls_root_ca_file`, or the system's store, verifies. These two imply `tls_required="true"`.
            `verify-if-given`: clients may have one, and it must be valid.
        tls_root_ca_file: PEM file with the CAs of client certificates, https auth servers and discovery services; None
            is the system's.
        tls_required: Whether clients must use TLS: `true` over TCP and HTTP, `tcp-https` over TCP only.
        tls_min_version: The oldest TLS version accepted. nsqd's default is tls1.0, which RFC 8996 deprecates.
        auth_file: Tokens and certificates, with what each may do: `access/auth_file.py`. None without one.
        auth_http_addresses: Authorization services, `host:port` or a URL each, for secrets that are not in the auth
            file. Without them and an auth file, all clients may do everything.
        http_allowed_hosts: Names by which HTTP clients may address the broker, besides localhost, this machine's host
            name, the broadcast address and IP addresses; see `HostNames`. `*` stands for any characters.
        http_read_only: Refuse HTTP requests that change something.
        http_open_metrics: `/metrics` needs no authentication.
        audit_log: The file of the audit log, or `-` for standard output; empty for none.
        http_client_connect_timeout_ms, http_client_request_timeout_ms: For the broker's own HTTP requests.
        statsd_address: `host:port` (UDP) to send metrics to; empty sends none.
        statsd_prefix: Prefix of the metric names; `%s` stands for the broadcast address and HTTP port.
        statsd_interval_ms: Interval of sending metrics.
        statsd_mem_stats: Whether to send the process's memory metrics.
        statsd_udp_packet_size: Maximum bytes of a datagram; a longer single line is sent whole.
        statsd_exclude_ephemeral: Whether to leave out ephemeral topics and channels.
        e2e_processing_latency_percentiles: Quantiles in (0, 1], descending, of the time from publish to FIN; empty
            disables the measurement.
        e2e_processing_latency_window_time_ms: Time window of the quantiles.
        pacing: How long one kind of work may keep others waiting; not a setting.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range. `serve` checks the addresses and files.
    """

    data_path: Path
    tcp_address: str = "127.0.0.1:4150"
    http_address: str = "127.0.0.1:4151"
    https_address: str = "127.0.0.1:4152"
    broadcast_address: str | None = None
    broadcast_tcp_port: int = 0
    broadcast_http_port: int = 0
    topology_region: str = ""
    topology_zone: str = ""
    nsqlookupd_tcp_addresses: tuple[str, ...] = ()
    lookupd_tls: bool = False
    lookupd_auth_secret_file: Path | None = None
    node_id: int | None = None
    sync: Sync = "always"
    sync_every: int = 2500
    sync_timeout_ms: int = 2 * SECOND_MS
    topic_defaults: TopicSettings = TopicSettings()  # noqa: RUF009 - immutable
    mem_queue_size: int = 10_000
    cache_bytes: int = 64 * MIB
    max_bytes_per_file: int = 100 * MIB
    checkpoint_interval_ms: int = 2 * SECOND_MS
    archive: str = ""
    archive_interval_ms: int = SECOND_MS
    archive_retention_ms: int = 0
    archive_before_ok: bool = False
    restore_from: str = ""
    max_channel_consumers: int = 0
    max_connections: int = 0
    max_topics: int = 0
    max_channels: int = 0
    limits: Limits = field(default_factory=Limits)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_auth_policy: ClientAuthPolicy = ""
    tls_root_ca_file: Path | None = None
    tls_required: TLSRequired = "false"
    tls_min_version: TLSVersion = "tls1.2"
    auth_file: Path | None = None
    auth_http_addresses: tuple[str, ...] = ()
    http_allowed_hosts: tuple[str, ...] = ()
    http_read_only: bool = False
    http_open_metrics: bool = False
    audit_log: str = ""
    http_client_connect_timeout_ms: int = 2 * SECOND_MS
    http_client_request_timeout_ms: int = 5 * SECOND_MS
    statsd_address: str = ""
    statsd_prefix: str = "nsq.%s"
    statsd_interval_ms: int = MINUTE_MS
    statsd_mem_stats: bool = True
    statsd_udp_packet_size: int = 508
    statsd_exclude_ephemeral: bool = False
    e2e_processing_latency_percentiles: tuple[float, ...] = ()
    e2e_processing_latency_window_time_ms: int = 10 * MINUTE_MS
    pacing: Pacing = Pacing()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        check_options(self)
        for options, prefix in ((self, ""), (self.limits, "limits.")):
            for each in fields(options):
                if type(value := getattr(options, each.name)) is int:
                    check_int(f"{prefix}{each.name}", value, *_RANGES.get(each.name, (0, None)))
        if self.limits.min_output_buffer_timeout_ms > self.limits.max_output_buffer_timeout_ms:
            raise ValueError("limits.min_output_buffer_timeout_ms is more than max_output_buffer_timeout_ms")
        for quantile in self.e2e_processing_latency_percentiles:
            if not 0 < quantile <= 1:
                raise ValueError(
                    f"an item of e2e_processing_latency_percentiles is {quantile}; it must be within (0, 1]"
                )

    @property
    def required_tls(self) -> TLSRequired:
        """`tls_required`; a client certificate policy implies at least `true`."""
        implied = requires_certificate(self.tls_client_auth_policy) and self.tls_required == "false"
        return "true" if implied else self.tls_required

    @property
    def tls(self) -> TLSSettings:
        """The TLS settings of the listeners."""
        return TLSSettings(
            self.tls_cert,
            self.tls_key,
            self.tls_client_auth_policy,
            self.tls_root_ca_file,
            self.tls_min_version,
            required=self.required_tls != "false",
        )
