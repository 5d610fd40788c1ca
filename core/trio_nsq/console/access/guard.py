"""Decides which requests of viewers may go on: who sends them, to which host, and from which page."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...access.policy import Identity
from ...http.decisions import ALLOW, NEEDS_LOOKUP, Allow, Decision, Deny
from ...http.messages import EndOfAnswer, Request, Response
from ...http.routing import Route
from ...protocol.limits import MIB
from ..oidc.options import BEGIN, CALLBACK
from .access import Access
from .cookies import session_cookie
from .identified import Identified
from .request_head import Refused, RequestHead
from .rights import NOTHING

MAX_BODY_BYTES = 8 * MIB
"""A message of 2 MiB, percent-encoded."""
SMALL_BODY_BYTES = 64 * 1024
OPEN_PATHS = ("/login", "/logout", BEGIN, CALLBACK, "/ping", "/favicon.ico")


@dataclass(slots=True)
class Visit:
    """What is known of a request: `Request.context`.

    Attributes:
        identified: The viewer; None for the console's own files, and outside of the base path.
        cookies: `Set-Cookie` headers of the answer.
    """

    incoming: RequestHead
    identified: Identified | None = None
    cookies: list[str] = field(default_factory=list)


def visit_of(request: Request) -> Visit:
    """Return what the guard has noted about a request."""
    assert isinstance(request.context, Visit)
    return request.context


class ViewerGuard:
    """Checks the requests of one connection. A `RequestGuard`.

    Args:
        refuse: Renders and records a refusal.
        port: That of the listener; 0 if unknown.
        scheme: `http` or `https`.
    """

    def __init__(
        self, access: Access, refuse: Callable[[Request, Refused], Response], *, port: int, scheme: str
    ) -> None:
        self._access = access
        self._refuse = refuse
        self._port = port
        self._scheme = scheme

    def check(self, request: Request, route: Route | None) -> Decision:
        incoming = RequestHead.of(request, self._access.base_path, self._port, self._scheme)
        request.context = visit = Visit(incoming)
        is_below = request.path.startswith(f"{self._access.base_path.rstrip('/')}/")
        if not is_below or incoming.path.startswith("/static/"):
            return ALLOW
        try:
            if not self._access.hosts.admits(incoming.headers):
                text = f"{incoming.headers['host'][:100]} is not a name of this console: see --http-allowed-host."
                raise Refused(403, "HOST_NOT_ALLOWED", text)
            identified = self._access.identify(incoming)
            return NEEDS_LOOKUP if identified is None else self._decide(request, visit, identified)
        except Refused as exc:
            return Deny(self._refuse(request, exc))

    async def look_up(self, request: Request, route: Route | None) -> Allow | Deny:
        """As `RequestGuard.look_up`: brokers are asked."""
        visit = visit_of(request)
        try:
            return self._decide(request, visit, await self._access.look_up(visit.incoming))
        except Refused as exc:
            if exc.ends_session and session_cookie(visit.incoming) in visit.incoming.cookies:
                visit.cookies.append(self._access.session_header(visit.incoming, "", 0))
            return Deny(self._refuse(request, exc))

    def is_current(self, request: Request, route: Route) -> bool:
        visit = visit_of(request)
        return visit.identified is None or self._access.is_current(visit.incoming, visit.identified)

    def refuse_late(self, request: Request, route: Route) -> Response:
        return self._refuse(request, _log_in(visit_of(request).incoming))

    def check_again(self, request: Request, route: Route) -> None:
        """As `RequestGuard.check_again`. The browser asks again, with its new rights."""
        if not self.is_current(request, route):
            raise EndOfAnswer

    def _decide(self, request: Request, visit: Visit, identified: Identified) -> Allow:
        """Decide about a request of a known viewer. Raises Refused."""
        access, incoming, viewer = self._access, visit.incoming, identified.viewer
        visit.identified = identified
        if identified.is_new_visitor and not incoming.is_api:
            visit.cookies.append(access.visitor_header(incoming, identified))
        if not incoming.is_safe:
            access.forms.check_page(incoming, identified)
        if viewer.rights == NOTHING and incoming.path not in OPEN_PATHS:
            raise _log_in(incoming)
        if identified.token:
            request.identity = Identity(viewer.name, "token", ())
        limit = SMALL_BODY_BYTES if viewer.rights == NOTHING else MAX_BODY_BYTES
        if int(incoming.headers.get("content-length", 0)) > limit:
            raise Refused(413, "BODY_TOO_BIG", f"The body of this request has at most {limit // 1024} KiB.")
        return Allow(limit)


def _log_in(incoming: RequestHead) -> Refused:
    return Refused(401, "AUTH_REQUIRED", "Log in first.", is_notable=not incoming.is_safe)
