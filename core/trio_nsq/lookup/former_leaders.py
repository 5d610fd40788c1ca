"""The registrations of a former leader of a cluster, which one discovery service is to hide. Pure.

A service lists a broker whose machine is lost until its connection is known to be broken, up to 5 minutes. A tombstone
hides it from the consumers of a topic, as long as it lasts.
"""

from collections.abc import Iterable

from ..api.lookupd import Node
from .hosts import normal_host


class FormerLeader:
    """The registrations of a broker, as a service lists them.

    Args:
        broadcast_address, http_port: The address that it has registered.
    """

    def __init__(self, broadcast_address: str, http_port: int) -> None:
        self._place = normal_host(broadcast_address), http_port
        self._connections: frozenset[str] | None = None

    def tombstones(self, nodes: Iterable[Node]) -> list[tuple[str, str]]:
        """Return which tombstones to create, or to renew.

        Args:
            nodes: All brokers that the service lists now.

        Returns:
            Topics, each with the name of the broker for the request. Empty: nothing is to be hidden any longer. The
            broker is not listed, or has registered since the first call: it is alive, and tombstones would hide it.
        """
        found = [
            node for node in nodes if (normal_host(node.broadcast_address), node.http_port) == self._place
        ]
        connections = frozenset(node.remote_address for node in found)
        if self._connections is None:
            self._connections = connections
        if connections - self._connections:
            return []
        # Not `format_address`: nsqlookupd compares an IPv6 address without brackets.
        return [
            (topic, f"{node.broadcast_address}:{node.http_port}") for node in found for topic in node.topics
        ]
