"""The options of opening a client and of finding brokers through discovery services, in addition to those of every
connection."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..connection.options import ConnectionOptions, ConnectionSettings

MINUTE_S = 60.0


class DiscoveryOptions(ConnectionOptions, total=False):
    """The keyword arguments that `Consumer` and `Producer` share; see `DiscoverySettings` and `ConnectionSettings`."""

    connect_timeout_s: float
    lookupd_poll_interval_s: float
    lookupd_poll_jitter: float
    lookupd_poll_timeout_s: float
    lookupd_allowed_hosts: Sequence[str]


@dataclass(frozen=True, slots=True)
class DiscoverySettings(ConnectionSettings):
    """Settings of opening and discovery, with the Go client's names and defaults where it has them.

    The options for TLS and the secret of `ConnectionSettings` also apply to discovery services.

    Attributes:
        connect_timeout_s: How long entering the block tries again while no broker can be reached, at least 0. With 0,
            each broker and discovery service is tried once; with `math.inf`, there is no limit. A refused secret is not
            tried again.
        lookupd_poll_interval_s: The interval between queries of the discovery services, more than 0. They are also
            queried when brokers are lost, and after 1, 2, 4, ... seconds while none knows a broker.
        lookupd_poll_jitter: Up to this fraction of the interval, at random, is added once, before the second query, so
            that clients that start together do not query together; within 0..1.
        lookupd_poll_timeout_s: The timeout for an answer of a discovery service, more than 0.
        lookupd_allowed_hosts: Connect only to brokers with these host names or addresses, if discovery services return
            others; `*` in a name stands for any characters. Empty: all.

    Raises:
        ValueError: A value is invalid.
    """

    connect_timeout_s: float = 0.0
    lookupd_poll_interval_s: float = MINUTE_S
    lookupd_poll_jitter: float = 0.3
    lookupd_poll_timeout_s: float = MINUTE_S
    lookupd_allowed_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        ConnectionSettings.__post_init__(self)  # super() fails here: slots=True creates a new class
        self._require("connect_timeout_s", self.connect_timeout_s >= 0, "at least 0")
        for name in ("lookupd_poll_interval_s", "lookupd_poll_timeout_s"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        self._require("lookupd_poll_jitter", 0 <= self.lookupd_poll_jitter <= 1, "within 0..1")
