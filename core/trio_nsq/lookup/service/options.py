"""What can be set on a discovery service. Names and defaults are nsqlookupd's, unless a comment says why."""

from dataclasses import dataclass
from pathlib import Path

from ...protocol.limits import MINUTE_MS, SECOND_MS


@dataclass(frozen=True, slots=True)
class LookupdOptions:
    """One discovery service's configuration.

    Addresses are `host:port`, port 0 picking a free one. They are loopback unless told otherwise, so that nobody is let
    in by accident (nsqlookupd listens on all interfaces).

    Attributes:
        tcp_address: Where brokers register.
        http_address: Where consumers and administrators ask.
        broadcast_address: The host brokers are told to ask at; None is this machine's host name, or the loopback
            address if it listens there alone.
        inactive_producer_timeout_ms: A broker that has not pinged for longer is not told to anybody.
        tombstone_lifetime_ms: How long a tombstone hides a broker from a topic's consumers.
        data_path: A folder for the names of topics and channels, so that a restart does not forget those that no
            broker has at the time; made if it is missing (its parent must exist). None: they are forgotten, as by
            nsqlookupd.
        max_registrations: Topics and channels that one broker may register; nsqlookupd has no limit.
    """

    tcp_address: str = "127.0.0.1:4160"
    http_address: str = "127.0.0.1:4161"
    broadcast_address: str | None = None
    inactive_producer_timeout_ms: int = 5 * MINUTE_MS
    tombstone_lifetime_ms: int = 45 * SECOND_MS
    data_path: Path | None = None
    max_registrations: int = 100_000
