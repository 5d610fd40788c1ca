"""Refuses requests that a foreign web page makes through its reader's browser.

A page can make the browser send a POST to any address that the browser reaches, and, if the page's own name is changed
to that address (DNS rebinding), also read the answers. Browsers tell in headers which page a request comes from and
which host name it is for; other clients send no such headers, and a Host that they were configured with.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

import trio

_OWN_SITES = ("same-origin", "none")  # "none": the address bar, a bookmark
_PRIVATE_DOMAINS = (
    ".localhost",
    ".local",
    ".internal",
    ".home.arpa",
)  # RFC 6761, 6762, 8375, and ICANN's for networks
_MAX_KNOWN = 256
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))(?::[0-9]{0,5})?", re.ASCII)
"""A Host header. Two of them, joined with a comma, do not match."""


class HostNames:
    """The names by which clients may address a server.

    Always allowed: the names of this machine, and what the owner of a web page cannot make the public DNS resolve: IP
    addresses, names without a dot (of Docker, Kubernetes or a search domain), and names in private domains.

    Args:
        names: Further names, without a port. `*` allows every name.

    Attributes:
        known: Headers that were allowed.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {name.lower().rstrip(".") for name in ("localhost", socket.gethostname(), *names)}
        self.known: set[str] = set()

    async def learn_own_name(self) -> None:
        """Allow this machine's fully qualified name. It is looked up in a thread: with a broken DNS it takes long."""
        name = await trio.to_thread.run_sync(
            socket.getfqdn, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
        )
        self._names.add(name.lower().rstrip("."))

    def allows(self, host: str) -> bool:
        """Whether a Host header, `name` or `name:port`, names this server. An empty one does: HTTP/1.0 has none."""
        if host in self.known:
            return True
        if not host or "*" in self._names:
            return True
        match = _HOST.fullmatch(host)
        if match is None or not self._is_own((match[1] or match[2]).lower().rstrip(".")):
            return False
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known.add(host)
        return True

    def _is_own(self, name: str) -> bool:
        if name in self._names or (name and "." not in name) or name.endswith(_PRIVATE_DOMAINS):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def foreign_page(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another origin made a request, as far as the browser tells."""
    if headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        return True
    page = headers.get("origin", headers.get("referer"))
    if page is None:
        return False
    host = page.partition("://")[2].partition("/")[0]  # none in `null`, the origin of a sandboxed page
    return not host or host.lower() != headers.get("host", "").lower()
