"""URLs of servers for the HTTP client."""

import re
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from ..protocol.address import format_address, is_unix_path

_MAX_URL = 65_536
_PORTS = {"http": 80, "https": 443}
_NOT_IN_HOSTS = re.compile(r"[\x00-\x20\x7f/?#@<>\\^`{|}\"]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_KEPT = "/?:@!$&'()*+,;=-._~%"
"""What stays as it is in paths and queries; escapes are not escaped again."""


@dataclass(frozen=True, slots=True)
class URL:
    """A URL of http or https.

    Attributes:
        host: A name, or an IP address without brackets.
        target: Path and query, encoded.
        credentials: `user:password`, decoded; empty: there are none.
    """

    scheme: str
    host: str
    port: int
    target: str
    credentials: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL. Raises ValueError, whose text does not repeat it."""
        if _CONTROLS.search(text):
            raise ValueError("it has control characters")
        if len(text) > _MAX_URL:
            raise ValueError("URL too long")
        parts = urlsplit(text)
        host = parts.hostname or ""
        host = host if host.isascii() else host.encode("idna").decode()
        if parts.scheme not in _PORTS or not host or _NOT_IN_HOSTS.search(host):
            raise ValueError("it is not a URL of http or https with a host")
        target = quote(f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", safe=_KEPT)
        has_user = "@" in parts.netloc
        credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if has_user else ""
        return cls(parts.scheme, host, parts.port or _PORTS[parts.scheme], target, credentials)

    @classmethod
    def at(cls, server: str, target: str) -> Self:
        """Return the URL of a path at `host:port`, a URL without a path, or the path of a unix socket; as `parse`."""
        base = "localhost" if is_unix_path(server) else server.rstrip("/")
        return cls.parse((base if "://" in base else f"http://{base}") + target)

    @property
    def netloc(self) -> str:
        """The value of the Host header: the host, and the port unless it is the default."""
        address = format_address(self.host, self.port)
        return address.rpartition(":")[0] if self.port == _PORTS[self.scheme] else address

    def on_https(self, port: int) -> Self:
        """Return the same URL on a port of https."""
        return replace(self, scheme="https", port=port)
