"""The guard of brokers and discovery services: tokens, certificates, auth servers, and pages of other origins."""

import logging
from collections.abc import Callable
from typing import TypedDict

import trio

from ..access.access import Access, AuthError
from ..access.attempts import Reason
from ..access.policy import Identity, Rule
from ..protocol.address import host_of
from .auditing import record_closing, record_refusal
from .credentials import CONSOLE_HEADER, is_bearer, token_of
from .decisions import ALLOW, NEEDS_LOOKUP, Allow, Decision, Deny
from .messages import CutOff, HTTPError, Request, Response
from .routing import Route
from .web_pages import HostNames, foreign_page, perhaps_foreign_page

logger: logging.Logger = logging.getLogger("trio_nsq.http")

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="trio-nsq", Basic realm="trio-nsq"'}
_INVALID_TOKEN = "INVALID_TOKEN"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that change nothing."""


class _Question(TypedDict):
    """What auth servers are asked about a client."""

    remote_ip: str
    tls: bool
    common_name: str
    secret: bytes


class Guard:
    """Checks the requests of a listener, or of one TLS connection. A `RequestGuard`.

    Args:
        hosts: The names of this server.
        read_only: Refuse every request that changes something.
        encrypted: Requests arrive over TLS.
        subject: The subject of the client's verified certificate; empty without one.
        common_name: The common name of the client's certificate, for auth servers; empty without one.
        names_hint: What a user can do whose name of this server is refused.
        clock_s: Returns the time in seconds.
    """

    def __init__(
        self,
        access: Access,
        hosts: HostNames,
        *,
        read_only: bool = False,
        encrypted: bool = False,
        subject: str = "",
        common_name: str = "",
        names_hint: str = "see --http-allowed-host",
        clock_s: Callable[[], float] = trio.current_time,
    ) -> None:
        self._access = access
        self._hosts = hosts
        self._read_only = read_only
        self._encrypted = encrypted
        self._subject = subject
        self._common_name = common_name
        self._names_hint = names_hint
        self._clock_s = clock_s
        self._is_open = access.is_open

    def check(self, request: Request, route: Route | None) -> Decision:
        """Decide about a request whose body has not arrived, and set its `identity`."""
        if self._is_open:
            headers = request.headers
            # The fast path of most requests, without further calls.
            if (
                "sec-fetch-site" not in headers
                and "origin" not in headers
                and "referer" not in headers
                and not self._read_only
                and headers.get("host") in self._hosts.known
                and (request.method == "POST" or not _is_admin(route))
            ):
                return ALLOW
            refusal = self._check_page(request, route) or self._check_method(request, route)
            return ALLOW if refusal is None else self._refuse(request, refusal)
        token = token_of(request.headers)
        identity = self._access.find(token, self._subject)
        if identity is None and token is None and route is not None and route.rule and route.rule.anonymous:
            identity = self._access.anonymous
        if identity is None and token and self._access.service is not None:
            identity = self._access.known_answer(**self._question(request, token))
            if identity is None and self._needs_identity(request, route):
                return NEEDS_LOOKUP
        return self._decide(request, route, token, identity)

    async def look_up(self, request: Request, route: Route | None) -> Allow | Deny:
        """As `check`, by the auth servers."""
        token = token_of(request.headers)
        assert token is not None  # otherwise there is nothing to look up
        try:
            identity = await self._access.query_cached(**self._question(request, token))
        except AuthError as exc:
            logger.error("%s: authentication failed: %s", request.peer, exc)
            return self._refuse(request, HTTPError(503, "AUTH_UNAVAILABLE"))
        return self._decide(request, route, token, identity)

    def is_current(self, request: Request, route: Route) -> bool:
        identity, rule = request.identity, route.rule
        if identity is None or rule is None or rule.open:
            return True
        current = self._access.renew(identity)
        if current is identity:
            return True
        if current is None or not rule.allows(current, request.query):
            return False
        request.identity = current
        return True

    def refuse_late(self, request: Request, route: Route) -> Response:
        if request.identity is not None:
            request.identity = self._access.renew(request.identity)
        error = self._check_rule(request, route.rule, token_of(request.headers), request.identity)
        error = error or HTTPError(403, "FORBIDDEN: the rights of this client have changed")
        return self._refuse(request, error).response

    def check_again(self, request: Request, route: Route) -> None:
        if not self.is_current(request, route):
            record_closing(self._access.audit, request, self._subject)
            name = request.identity.name if request.identity is not None else ""
            raise CutOff(f"the authentication of {name} was revoked or has expired")

    def _question(self, request: Request, token: bytes) -> _Question:
        return {
            "remote_ip": host_of(request.peer),
            "tls": self._encrypted,
            "common_name": self._common_name,
            "secret": token,
        }

    def _needs_identity(self, request: Request, route: Route | None) -> bool:
        """Whether it matters who sends a request. Otherwise strangers could make the broker ask auth servers."""
        return (route is not None and not (route.rule and route.rule.open)) or self._check_page(
            request, route
        ) is not None

    def _decide(
        self, request: Request, route: Route | None, token: bytes | None, identity: Identity | None
    ) -> Allow | Deny:
        request.identity = identity
        if identity is None or identity.source in ("certificate", "anonymous"):
            refusal = self._check_page(request, route)  # browsers send certificates by themselves
        elif is_bearer(request.headers):
            refusal = None
        else:
            # Browsers repeat Basic credentials by themselves, but not for another name of the server.
            refusal = self._check_origin(request, route)
        refusal = refusal or self._check_method(request, route)
        if refusal is None and route is not None:
            refusal = self._check_rule(request, route.rule, token, identity)
        return ALLOW if refusal is None else self._refuse(request, refusal)

    def _check_page(self, request: Request, route: Route | None) -> HTTPError | None:
        if not self._hosts.admits(request.headers):
            host = request.headers["host"]
            return HTTPError(
                403, f"HOST_NOT_ALLOWED: {host[:100]} is not a name of this server; {self._names_hint}"
            )
        return self._check_origin(request, route)

    def _check_origin(self, request: Request, route: Route | None) -> HTTPError | None:
        headers = request.headers
        # A page cannot see the answers to its GETs, but some cost much: a profile of the broker takes minutes.
        if request.method in SAFE_METHODS and not _is_admin(route):
            return None
        if foreign_page(headers):
            return HTTPError(403, "NOT_FOR_WEB_PAGES: a web page of another origin made this request")
        if request.method in SAFE_METHODS and perhaps_foreign_page(headers):
            return HTTPError(
                403,
                "NOT_FOR_WEB_PAGES: a web page of another origin may have made this request; use curl, or a loopback "
                "address in the browser",
            )
        return None

    def _check_method(self, request: Request, route: Route | None) -> HTTPError | None:
        if self._read_only and route is not None and request.method not in SAFE_METHODS:
            return HTTPError(403, "READ_ONLY: this server runs with --http-read-only")
        return None

    def _check_rule(
        self, request: Request, rule: Rule | None, token: bytes | None, identity: Identity | None
    ) -> HTTPError | None:
        if rule is not None and rule.open:
            return None
        if identity is None:
            return HTTPError(401, "AUTH_REQUIRED" if token is None else _INVALID_TOKEN)
        if rule is None:
            return HTTPError(403, "FORBIDDEN: no role allows this")
        if not rule.allows(identity, request.query):
            return HTTPError(403, f"FORBIDDEN: this needs {rule.describe(request.query)}")
        return None

    def _is_console(self, request: Request) -> bool:
        """Whether a console has asked about a viewer's token: its own credentials allow to read everything."""
        token = token_of(request.headers, CONSOLE_HEADER)
        console = self._access.find(token, self._subject)
        if console is None and token and self._access.service is not None:
            console = self._access.known_answer(**self._question(request, token))
        return console is not None and console.allows_everywhere("read")

    def _refuse(self, request: Request, error: HTTPError) -> Deny:
        """Record a refusal, and build its response."""
        delay_s = 0.0
        is_login = error.code == _INVALID_TOKEN
        if is_login:
            reason: Reason = "token" if self._access.service is None else "auth_server"
            failures = self._access.failures
            if self._is_console(request):
                failures.count("http", reason)
            else:
                delay_s = failures.record_failure(host_of(request.peer), self._clock_s(), "http", reason)
        record_refusal(self._access.audit, request, error, self._subject, is_login=is_login)
        return Deny(error.response(_CHALLENGE if error.status == 401 else None, delay_s))


def _is_admin(route: Route | None) -> bool:
    return route is not None and route.rule is not None and route.rule.role == "admin"
