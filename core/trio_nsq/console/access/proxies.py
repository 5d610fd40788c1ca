"""Trusted reverse proxies: they name the viewer, and the host and address that they were asked by. Pure."""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from ...protocol.errors import StartupError

_MAX_NAME = 128


class Proxies:
    """Decides whose headers count.

    Args:
        networks: Addresses and networks of trusted proxies.
        header: The header with the viewer's name.
        admins: The viewers that may change everything; the others may only read. Without any, the header is ignored.

    Raises:
        StartupError: A network is not valid.
    """

    def __init__(self, networks: Iterable[str], header: str, admins: Iterable[str]) -> None:
        self._networks = [_network(text) for text in networks]
        self._header = header.lower()
        self.admins: frozenset[str] = frozenset(admins)

    def trusts(self, peer: str) -> bool:
        """Whether a client of this address is a trusted proxy."""
        return is_within(peer, self._networks)

    def viewer(self, peer: str, headers: Mapping[str, str]) -> str:
        """Return the name of the viewer; empty if no trusted proxy has named one.

        A name with a comma may come from two headers, one of them the viewer's own, so it does not count.
        """
        if not self.admins or not self.trusts(peer):
            return ""
        name = headers.get(self._header, "").strip()
        return name if 0 < len(name) <= _MAX_NAME and name.isprintable() and "," not in name else ""

    def host(self, peer: str, headers: Mapping[str, str]) -> str:
        """Return the host that the viewer's browser asked for."""
        forwarded = headers.get("x-forwarded-host", "").strip()
        return forwarded if forwarded and self.trusts(peer) else headers.get("host", "")

    def is_secure(self, peer: str, headers: Mapping[str, str], scheme: str) -> bool:
        """Whether the viewer's browser uses https."""
        forwarded = headers.get("x-forwarded-proto", "").strip().lower()
        return (forwarded if forwarded and self.trusts(peer) else scheme) == "https"

    def client(self, peer: str, headers: Mapping[str, str]) -> str:
        """Return the address of the viewer: the last one that a trusted proxy has added, or the peer's."""
        last = headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
        if not last or not self.trusts(peer):
            return peer
        try:
            return str(ip_address(last))
        except ValueError:
            return peer


def is_within(host: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Whether a client's address is in one of these networks."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # no address: a unix socket, for example
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError as exc:
        raise StartupError(f"--trusted-proxy: {text} is not an address or a network: {exc}") from exc
