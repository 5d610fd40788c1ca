"""Refuses requests that a foreign web page makes through its reader's browser.

A page can make the browser send a POST to any address that the browser reaches, and, if the page's own name is changed
to that address (DNS rebinding), also read the answers. Browsers tell in headers which page a request comes from and
which host name it is for; other clients send no such headers, and a Host that they were configured with.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable, Mapping

import trio

from ..access.patterns import ALL, compile_glob
from .top_level_domains import GENERIC

logger: logging.Logger = logging.getLogger("trio_nsq.http")

_PRIVATE_DOMAIN = ".home.arpa"  # RFC 8375
_LETTERS_OF_COUNTRY = 2
_RESERVED = ("test", "example", "invalid")
"""RFC 2606: for tests and documentation, so attacks can be tested with them."""
_OWN_SITES = ("same-origin", "none")  # "none": the address bar, a bookmark
_MAX_KNOWN = 256
_MAX_LOGGED = 100
_MAX_SHOWN = 100
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))(?::[0-9]{0,5})?", re.ASCII)
"""A Host header. Two of them, joined with a comma, do not match."""
_OF_BROWSERS = frozenset(("accept-language", "origin", "referer", "cookie", "upgrade-insecure-requests"))
"""Besides `Sec-*` and the browser's name. `Accept-Language` is in every request of a browser; a page can change it, but
not remove it. `Origin` is in every request of a page that may change something."""


def is_public_name(name: str) -> bool:
    """Whether the public DNS may have a lower-case host name, by its last label."""
    if name.endswith(_PRIVATE_DOMAIN):
        return False
    label = name.rpartition(".")[2]
    return (
        len(label) == _LETTERS_OF_COUNTRY
        or label in GENERIC
        or label in _RESERVED
        or label.startswith("xn--")
        or not label[:1].isalpha()  # no name; browsers read 127.1 as an address
    )


def sent_by_browser(headers: Mapping[str, str]) -> bool:
    """Whether a browser may have sent a request. If False, no browser can have sent it."""
    return (
        not _OF_BROWSERS.isdisjoint(headers)
        or any(name.startswith("sec-") for name in headers)
        or "mozilla/" in headers.get("user-agent", "").lower()
    )


def host_name(header: str) -> str:
    """Return the lower-case name or address in a Host header; empty if it has none."""
    match = _HOST.fullmatch(header)
    return "" if match is None else (match[1] or match[2]).lower().rstrip(".")


class HostNames:
    """The names by which clients may address a server.

    Always allowed: the names of this machine, and what the owner of a web page cannot make the public DNS resolve: IP
    addresses, names without a dot (of Docker, Kubernetes or a search domain), and names in no public top-level domain.

    Args:
        names: Further names, without a port. `*` stands for any characters.

    Attributes:
        known: Headers that were allowed.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        given = [name.lower().rstrip(".") for name in ("localhost", socket.gethostname(), *names)]
        self._names = set(given)
        self._patterns = [compile_glob(name) for name in given if ALL in name]
        self._logged: set[str] = set()
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
        if not host or ALL in self._names:
            return True
        name = host_name(host)
        if not name or not self._is_own(name):
            return False
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known.add(host)
        return True

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request is safe from DNS rebinding: its Host is allowed, or no browser has sent it.

        A refusal is logged once for each name.
        """
        host = headers.get("host", "")
        if self.allows(host):
            return True
        match = _HOST.fullmatch(host)
        if match is not None and not sent_by_browser(headers):
            return True
        if match is None:
            self._log_refusal(ascii(host)[:_MAX_SHOWN], "it is not a host name")
        else:
            name = match[2].lower()  # an address is allowed
            self._log_refusal(
                name,
                "a browser has sent it, and the owner of a web page could point this public name here (DNS "
                f"rebinding). If it is a name of this server: --http-allowed-host {name}",
            )
        return False

    def _is_own(self, name: str) -> bool:
        if name in self._names or (name and "." not in name):
            return True
        if any(pattern.fullmatch(name) for pattern in self._patterns):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return not is_public_name(name)
        return True

    def _log_refusal(self, host: str, reason: str) -> None:
        if host in self._logged or len(self._logged) >= _MAX_LOGGED:  # a page can use any number of names
            return
        self._logged.add(host)
        logger.warning("HTTP: a request with the Host %s was refused: %s", host, reason)


def foreign_page(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another origin made a request, as far as the browser tells."""
    if headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        return True
    page = headers.get("origin", headers.get("referer"))
    if page is None:
        return False
    host = page.partition("://")[2].partition("/")[0]  # none in `null`, the origin of a sandboxed page
    return not host or host.lower() != headers.get("host", "").lower()


def perhaps_foreign_page(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another origin may have made a request: it did, or a browser does not tell.

    By plain HTTP, browsers send `Sec-Fetch-*` to loopback addresses only; and a page can have its images requested
    without a Referer.
    """
    if foreign_page(headers):
        return True
    tells = "sec-fetch-site" in headers or "origin" in headers or "referer" in headers
    return not tells and sent_by_browser(headers)
