"""A request before anything of it is believed."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import cookie_parser

from ...http.credentials import is_bearer
from ...http.guard import SAFE_METHODS
from ...http.messages import Request
from ...http.web_pages import host_name
from ...protocol.address import host_of, is_loopback
from ...protocol.errors import NSQError

_OF_PROXIES = ("forwarded", "via", "x-real-ip")


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
        self.is_notable: bool = status == 403 if is_notable is None else is_notable


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request.

    Attributes:
        path: Below the base path.
        headers: By lower-case name; repeated ones are joined with a comma.
        cookies: By name.
        host: The address of the client, without its port.
        peer: With its port, for the audit log.
        port: That of the listener; 0 if unknown.
        scheme: `http` or `https`, between the client and this server.
        http_version: Of the request.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    cookies: Mapping[str, str]
    host: str
    peer: str
    port: int
    scheme: str
    http_version: str

    @classmethod
    def of(cls, request: Request, base_path: str, port: int, scheme: str) -> "RequestHead":
        host = host_of(request.peer)
        return cls(
            request.method,
            request.path.removeprefix(base_path.rstrip("/")) or "/",
            request.headers,
            cookie_parser(request.headers.get("cookie", "")),
            host,
            request.peer if host else "",
            port,
            scheme,
            request.version,
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
        """Whether a proxy may have passed the request on, if the console listens on loopback only.

        A proxy need not name itself in a header. But it passes on the host that its client asked for, or it speaks
        HTTP/1.0, as nginx does without further settings; and a client of this machine asks for a loopback host.
        """
        return (
            self.http_version == "1.0"
            or not is_loopback(host_name(self.headers.get("host", "")))
            or any(name in _OF_PROXIES or name.startswith("x-forwarded-") for name in self.headers)
        )
