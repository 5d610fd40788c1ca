"""A request before anything of it is believed."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import cookie_parser
from starlette.types import Scope

from ...http.credentials import is_bearer
from ...protocol.address import format_address
from ...protocol.errors import NSQError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Refused(NSQError):
    """A request is refused before it reaches a page.

    Attributes:
        status: Of the answer.
        code: For programs.
        text: For people: what to do.
        ends_session: The session of the request is not valid any more.
        is_notable: The audit log has to tell it, and does not yet.
    """

    def __init__(
        self, status: int, code: str, text: str, *, ends_session: bool = False, is_notable: bool | None = None
    ) -> None:
        super().__init__(f"{code}: {text}")
        self.status = status
        self.code = code
        self.text = text
        self.ends_session = ends_session
        self.is_notable = status == 403 if is_notable is None else is_notable


@dataclass(frozen=True, slots=True)
class Incoming:
    """The head of a request.

    Attributes:
        path: Below the base path.
        headers: By lower-case name; repeated ones are joined with a comma.
        cookies: By name.
        host: The address of the client, without its port.
        peer: With its port, for the audit log.
        port: That of the listener; 0 if unknown.
        scheme: `http` or `https`, between the client and this server.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    cookies: Mapping[str, str]
    host: str
    peer: str
    port: int
    scheme: str

    @classmethod
    def of(cls, scope: Scope, base_path: str) -> "Incoming":
        """Read the head of a request."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            separator = "; " if name == "cookie" else ", "
            headers[name] = f"{headers[name]}{separator}{value}" if name in headers else value
        client, server = scope.get("client"), scope.get("server")
        host = client[0] if client else ""
        return cls(
            scope["method"],
            scope["path"].removeprefix(base_path.rstrip("/")) or "/",
            headers,
            cookie_parser(headers.get("cookie", "")),
            host,
            format_address(host, client[1]) if client else "",
            server[1] or 0 if server else 0,
            scope.get("scheme", "http"),
        )

    @property
    def is_safe(self) -> bool:
        """Whether the request changes nothing."""
        return self.method in SAFE_METHODS

    @property
    def is_bearer(self) -> bool:
        """Whether the request has a Bearer token: only programs send one."""
        return is_bearer(self.headers)

    @property
    def is_api(self) -> bool:
        """Whether the request is for a program: it is answered with JSON."""
        return self.path.startswith(("/api/", "/config/")) or self.path == "/ping"

    @property
    def is_program(self) -> bool:
        """Whether no browser has sent the request: all browsers tell which page a change comes from."""
        of_browsers = ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode")
        return not any(name in self.headers for name in of_browsers)

    @property
    def is_forwarded(self) -> bool:
        """Whether a proxy has passed the request on."""
        return any(
            name in ("forwarded", "via", "x-real-ip") or name.startswith("x-forwarded-")
            for name in self.headers
        )
