"""The identity of a broker: which addresses reach the same one.

`localhost` and `127.0.0.1`, a name and a mapped IPv6 address, or a given address and the one that a discovery service
has may all be one broker. Whatever asks several brokers asks each broker once.
"""

import ipaddress
import socket
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..api.broker import info
from ..client.errors import BrokerUnreachable, RequestRefused
from ..event_loop.fan_out import start_all
from ..protocol.address import parse_address

if TYPE_CHECKING:  # slow to import, and every start of qcli imports this
    from concurrent.futures import Future

    from ..client.http.broker_http import BrokerHTTP

PROMPT_S = 2.0
"""How long other addresses are waited for, once one has answered: a broker answers alike at all of its addresses."""


class BrokerIdentity(NamedTuple):
    """What `/info` says of a broker, and of no other one, until it restarts.

    Attributes:
        instance: A random name; empty for nsqd and older brokers. Without it, two brokers that have the same ports on
            different IP addresses of one host are taken for one if they started in the same second.
    """

    hostname: str
    broadcast_address: str
    tcp_port: str
    http_port: str
    start_time: str
    instance: str

    @classmethod
    def of(cls, info: Mapping[str, object]) -> "BrokerIdentity | None":
        """Return the identity in an answer of `/info`; None: the answer is not a broker's."""
        try:
            fields = {"instance": "", **info}
            return cls(*(str(fields[name]) for name in cls._fields))
        except (KeyError, TypeError):
            return None

    @classmethod
    def at(cls, http: "BrokerHTTP") -> "BrokerIdentity | None":
        """Ask a broker for its identity; None: it is unknown."""
        try:
            return cls.of(http.ask(info()))
        except (BrokerUnreachable, RequestRefused):
            return None


def resolved(address: str) -> tuple[str, int] | None:
    """Return the IP address and port of an address: what is known of a broker without HTTP; None if it has none.

    Of several IP addresses it is one of IPv4, so that `localhost` is `127.0.0.1`, as `[::ffff:127.0.0.1]` is.
    """
    try:
        host, port = parse_address(address)
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):  # ValueError: also of the resolver
        return None
    numbers = []
    for each in map(ipaddress.ip_address, found):
        mapped = each.ipv4_mapped if isinstance(each, ipaddress.IPv6Address) else None
        numbers.append(mapped or each)
    chosen = min(numbers, key=lambda each: (each.version, each.packed), default=None)
    return None if chosen is None else (str(chosen), port)


def first_addresses(addresses: Iterable[str], identify: Callable[[str], Hashable | None]) -> dict[str, str]:
    """Return for each address the first one that reaches the same broker.

    An address without an answer stands for itself. So does one that answers more than `PROMPT_S` after the first.

    Args:
        identify: Returns the identity at an address; None: unknown. Called in a thread for each address.
    """
    distinct = list(dict.fromkeys(addresses))
    if len(distinct) < 2:
        return dict(zip(distinct, distinct, strict=True))
    futures = start_all(identify, distinct, at_most=len(distinct))
    _wait(futures.values())
    known = {
        address: identity
        for address, future in futures.items()
        if future.done() and (identity := _result(future)) is not None
    }
    by_identity: dict[Hashable, str] = {}
    return {
        address: by_identity.setdefault(known[address], address) if address in known else address
        for address in distinct
    }


def _wait(futures: "Iterable[Future[Hashable | None]]") -> None:
    """Wait for the first identity, and then for the others for `PROMPT_S`."""
    from concurrent.futures import FIRST_COMPLETED, wait

    running = set(futures)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        if any(_result(each) is not None for each in done):
            wait(running, PROMPT_S)
            return


def _result(future: "Future[Hashable | None]") -> Hashable | None:
    return None if future.exception() is not None else future.result()
