"""The addresses a broker listens at, and the addresses it announces."""

import socket
from dataclasses import dataclass, replace

from ..server.listening import loopback_host, port_of
from .options import BrokerOptions


@dataclass(frozen=True, slots=True)
class BoundAddresses:
    """The addresses a broker listens at.

    Attributes:
        tcp_address, http_address, https_address: `host:port`, or the path of a unix socket; None if HTTP, or HTTPS,
            is off.
    """

    tcp_address: str
    http_address: str | None
    https_address: str | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The address that a broker announces to discovery services and clients.

    Attributes:
        address: A host.
        tcp_port, http_port: 0 without such a listener.
    """

    address: str
    tcp_port: int
    http_port: int

    @classmethod
    def of(cls, options: BrokerOptions, bound: BoundAddresses) -> "Broadcast":
        """Take each value from the options; if it is not set, use the host name or the bound port."""
        return cls(
            options.broadcast_address or socket.gethostname(),
            options.broadcast_tcp_port or port_of(bound.tcp_address) or 0,
            options.broadcast_http_port or port_of(bound.http_address) or 0,
        )

    @classmethod
    def reachable(cls, options: BrokerOptions, bound: BoundAddresses) -> "Broadcast":
        """As `of`, but the loopback address if the broker listens only there: the host name may resolve to another."""
        broadcast = cls.of(options, bound)
        host = options.broadcast_address or loopback_host(bound.tcp_address) or broadcast.address
        return replace(broadcast, address=host)

    def statsd_prefix(self, template: str) -> str:
        """Fill in `%s` as nsqd does: `nsq.%s` becomes `nsq.127_0_0_1_4151.`. An empty template stays empty."""
        name = f"{self.address}:{self.http_port}".translate(_NO_SEPARATORS)
        prefix = template.replace("%s", name)
        return prefix if not prefix or prefix.endswith(".") else prefix + "."


_NO_SEPARATORS = str.maketrans(".:", "__")
