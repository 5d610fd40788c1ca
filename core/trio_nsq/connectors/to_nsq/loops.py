"""Finds out whether a topic would be copied to itself."""

import ssl
from collections.abc import Iterable

import trio

from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.http.broker_http import BrokerHTTP
from ...protocol.address import parse_address
from ...secret import Secret
from ..source.options import BrokerAddresses
from .errors import LoopFound
from .options import CopyOptions

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 * 1024
_FIELDS = ("hostname", "broadcast_address", "tcp_port", "http_port", "start_time")


class LoopCheck:
    """Compares brokers by their addresses, and by what their HTTP APIs tell of them.

    Args:
        destinations: The addresses of the destinations.
        tls: For https; None: the system's CAs.
        secret: For brokers that require authentication.
    """

    def __init__(
        self,
        options: CopyOptions,
        destinations: Iterable[BrokerAddresses],
        tls: ssl.SSLContext | None,
        secret: Secret,
    ) -> None:
        self._options = options
        self._destinations = list(destinations)
        self._tls = tls
        self._secret = secret
        self._checked: set[tuple[str, str]] = set()

    async def check(self, topic: str, brokers: str) -> None:
        """Raise LoopFound if copies of a topic from these brokers, separated by commas, go to the same topic there."""
        options = self._options
        targets = {options.topic_for(topic)}
        if options.filter.needs_json:
            targets.add(options.not_json_topic_for(topic))
        if topic not in targets or (topic, brokers) in self._checked:
            return
        for broker in brokers.split(","):
            for destination in self._destinations:
                if await self._is_same(broker, destination):
                    raise LoopFound(topic, broker)
        self._checked.add((topic, brokers))

    async def _is_same(self, broker: str, destination: BrokerAddresses) -> bool:
        if broker in (destination.tcp, *destination.http):
            return True
        if destination.tcp and await _places(broker) & await _places(destination.tcp):
            return True
        source = await self._identity(broker)
        if source is None:
            return False
        for address in destination.http or (destination.tcp,):
            if await self._identity(address) == source:
                return True
        return False

    async def _identity(self, address: str) -> tuple[str, ...] | None:
        """Return what tells a broker from others; None: it is not known. The address is of HTTP or TCP."""
        return await self._info(address) or await self._info(_next_port(address))

    async def _info(self, address: str) -> tuple[str, ...] | None:
        def ask() -> tuple[str, ...] | None:
            http = BrokerHTTP(
                address,
                self._tls,
                self._secret,
                connect_timeout_s=_TIMEOUT_S,
                answer_timeout_s=_TIMEOUT_S,
                max_answer_bytes=_MAX_ANSWER_BYTES,
            )
            try:
                info = http.request_json("GET", "/info")
                return tuple(str(info[name]) for name in _FIELDS)
            except (BrokerUnreachable, RequestRefused, KeyError, TypeError):
                return None

        return await trio.to_thread.run_sync(ask, abandon_on_cancel=True) if address else None


def _next_port(address: str) -> str:
    """Return the HTTP address that belongs to a TCP address by convention; empty if there is none."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal() or int(port) >= 65535:
        return ""
    return f"{host}:{int(port) + 1}"


async def _places(address: str) -> set[tuple[str, int]]:
    """Return the IP addresses and port of an address; nothing if they are not known."""
    if "/" in address:
        return set()
    try:
        host, port = parse_address(address)
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except (OSError, ValueError):
        return set()
    return {(str(place[0]), port) for *_, place in found}
