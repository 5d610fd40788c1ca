"""Finds out whether a topic would be copied to itself."""

import trio

from ...fleet.identity import BrokerIdentity
from ...protocol.address import next_port, parse_address
from ..source.broker_http import BrokerFinder
from ..source.options import BrokerAddresses
from .errors import LoopFound
from .options import CopyOptions

_HTTPS = "https://"


class LoopCheck:
    """Compares brokers by their addresses, and by what their HTTP APIs tell of them.

    Args:
        finder: Makes the requests.
    """

    def __init__(self, options: CopyOptions, finder: BrokerFinder) -> None:
        self._options = options
        self._finder = finder
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
            for destination in self._options.destinations:
                if await self._is_same(broker, destination):
                    raise LoopFound(topic, broker)
        self._checked.add((topic, brokers))

    async def _is_same(self, broker: str, destination: BrokerAddresses) -> bool:
        addresses = [each for each in (destination.tcp, *destination.http) if each]
        if broker in addresses:
            return True
        source = await self._identity(broker)
        places = await _tcp_places(broker, source)
        for address in addresses:
            found = await self._identity(address)
            if found is not None and source is not None:
                return found == source
            if places & await _tcp_places(address, found):
                return True
        return False

    async def _identity(self, address: str) -> BrokerIdentity | None:
        """Return what tells a broker from others; None: it is not known. The address is of HTTP or TCP."""
        found = await self._finder.identity(address)
        if found is None and "/" not in address and address.rpartition(":")[2].isdecimal():
            found = await self._finder.identity(next_port(address))
            if found is not None and found.tcp_port != address.rpartition(":")[2]:
                return None  # another broker's
        return found


async def _tcp_places(address: str, identity: BrokerIdentity | None) -> set[tuple[str, int]]:
    """Return where a broker listens with the TCP protocol, as far as it is known from an address of HTTP or TCP."""
    if identity is None:
        return await _places(address)
    return await _places(f"{address.removeprefix(_HTTPS).rpartition(':')[0]}:{identity.tcp_port}")


async def _places(address: str) -> set[tuple[str, int]]:
    """Return the IP addresses and port of an address; nothing if they are not known."""
    if "/" in address:
        return set()
    try:
        host, port = parse_address(address.removeprefix(_HTTPS))
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except (OSError, ValueError):
        return set()
    return {(str(place[0]), port) for *_, place in found}
