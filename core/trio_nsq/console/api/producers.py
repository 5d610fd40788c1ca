"""Brokers as nsqadmin's API shows them. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...api.lookupd import Node
from ...protocol.address import format_address

_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:-([0-9A-Za-z.-]+))?(?:\+.*)?")


@dataclass(frozen=True, slots=True)
class Producer:
    """A broker.

    Attributes:
        address: Where requests go.
        hostname, broadcast_address, tcp_port, http_port, version: As it registered them.
        topics: Its topics; true: hidden from consumers.
        remote_addresses: The discovery services where it is registered, each with the broker's address there.
        remote_address: The broker's address at the first of them.
    """

    address: str
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    version: str = ""
    topics: Mapping[str, bool] = field(default_factory=dict)
    remote_addresses: tuple[str, ...] = ()
    remote_address: str = ""

    @property
    def node(self) -> str:
        """The HTTP address that the API shows."""
        has_place = self.broadcast_address and self.http_port
        return format_address(self.broadcast_address, self.http_port) if has_place else self.address

    def shown(self, out_of_date: bool, sees: Callable[[str], bool]) -> dict[str, Any]:
        """Return it as in `/api/nodes`, with the topics that a viewer sees."""
        topics = [{"topic": name, "tombstoned": hidden} for name, hidden in self.topics.items() if sees(name)]
        return {
            "remote_addresses": list(self.remote_addresses) or None,
            "remote_address": self.remote_address,
            "hostname": self.hostname,
            "broadcast_address": self.broadcast_address,
            "tcp_port": self.tcp_port,
            "http_port": self.http_port,
            "version": self.version,
            "topics": topics or None,
            "out_of_date": out_of_date,
        }


def merge(nodes: Mapping[str, Iterable[Node]], address_of: Callable[[str], str]) -> list[Producer]:
    """Return the brokers that discovery services list, each once, by the host's name.

    Args:
        nodes: What each service lists; the first one that lists a broker counts.
        address_of: Returns the address for requests to a registered address.
    """
    first: dict[tuple[str, int], Node] = {}
    remotes: dict[tuple[str, int], list[str]] = {}
    for lookupd, listed in nodes.items():
        for node in listed:
            key = (node.broadcast_address, node.tcp_port)
            first.setdefault(key, node)
            remotes.setdefault(key, []).append(f"{lookupd}/{node.remote_address or 'N/A'}")
    return in_order(
        Producer(
            address_of(node.http_address or ""),
            node.hostname,
            node.broadcast_address,
            node.tcp_port,
            node.http_port,
            node.version,
            {topic: topic in node.tombstones for topic in sorted(node.topics)},
            tuple(remotes[key]),
            node.remote_address,
        )
        for key, node in first.items()
        if node.http_address
    )


def in_order(producers: Iterable[Producer]) -> list[Producer]:
    """Sort brokers by the names of their machines."""
    return sorted(producers, key=lambda each: (each.hostname, each.node))


def out_of_date(producers: Iterable[Producer], kind: Callable[[Producer], object]) -> set[str]:
    """Return the addresses of brokers of which another one of the same kind has a newer version."""
    by_kind: dict[object, list[Producer]] = {}
    for producer in producers:
        by_kind.setdefault(kind(producer), []).append(producer)
    old: set[str] = set()
    for alike in by_kind.values():
        newest = max(_version(each.version) for each in alike)
        old.update(each.address for each in alike if _version(each.version) < newest)
    return old


def _version(version: str) -> tuple[int, int, int, bool, str]:
    """Return a key by which versions are in order; a pre-release comes before its release."""
    found = _VERSION.fullmatch(version)
    if found is None:
        return 0, 0, 0, False, ""
    return int(found[1]), int(found[2]), int(found[3]), found[4] is None, found[4] or ""
