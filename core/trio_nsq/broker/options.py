"""What can be set on a broker. Names are nsqd's, with the unit added; defaults are nsqd's unless a comment says why."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..protocol.limits import MIB, SECOND_MS, Limits

Sync = Literal["always", "interval"]


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """One broker's configuration.

    Attributes:
        data_path: The data folder; made if it is missing (its parent must exist).
        tcp_address: `host:port` to listen on for the V2 protocol; port 0 picks a free one. Loopback unless told
            otherwise, so that nobody is let in by accident (nsqd listens on all interfaces).
        http_address: The same for HTTP; empty means no HTTP.
        broadcast_address: The address others are told; None is this machine's host name.
        node_id: 0..1023, the first ten bits of every message id; None derives it from the host name as nsqd does.
        sync: `always`: an OK means on stable storage. `interval`: an OK means written to the file; synced after
            `sync_every` messages or `sync_timeout_ms`, whichever comes first.
        sync_every: Messages, for `interval`.
        sync_timeout_ms: For `interval`.
        mem_queue_size: Messages of each topic, its newest, kept decoded in memory.
        cache_bytes: Bytes of decoded messages kept in memory over all topics, whatever `mem_queue_size` says.
        max_bytes_per_file: Size at which a topic's log goes on in a new segment.
        checkpoint_interval_ms: How often changed channel positions are written; after a crash what was finished
            since is delivered again.
        max_channel_consumers: Consumers of one channel; 0 is no limit.
        limits: What clients may ask for and send.
    """

    data_path: Path
    tcp_address: str = "127.0.0.1:4150"
    http_address: str = "127.0.0.1:4151"
    broadcast_address: str | None = None
    node_id: int | None = None
    sync: Sync = "always"
    sync_every: int = 2500
    sync_timeout_ms: int = 2 * SECOND_MS
    mem_queue_size: int = 10_000
    cache_bytes: int = 64 * MIB
    max_bytes_per_file: int = 100 * MIB
    checkpoint_interval_ms: int = 2 * SECOND_MS
    max_channel_consumers: int = 0
    limits: Limits = field(default_factory=Limits)
