"""Finds the handler for a method and path; pure and synchronous.

It also builds the answers that need no handler: unknown path, wrong method, OPTIONS, redirects.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import quote

from ..access.policy import Rule
from ..server.body_memory import BodyMemoryLimit
from .limiting import AnswerLimiter
from .messages import HTTPError, Request, Response

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
"""Answers a request; may raise HTTPError. Any other exception is logged and answered with 500."""

Begin: TypeAlias = Callable[[Request, Callable[[Response], None]], bool]
"""Answers a request without a task. If it returns True, it later calls the callback once with the response, whose body
is bytes. If it returns False, it has done nothing, and the handler must answer. May raise HTTPError.
"""

DEFAULT_MAX_BODY_BYTES = 64 * 1024
"""Limit for routes without a body: some clients send one all the same, and handlers can ignore it."""

NOT_FOUND = HTTPError(404, "NOT_FOUND").response()
INVALID_REQUEST = HTTPError(400, "INVALID_REQUEST").response()


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path.

    Attributes:
        method: The method in upper case.
        path: The path in lower case, without a trailing slash. The last segment may be a name in braces, as in
            `/config/{opt}`. It matches any one segment, which the handler takes from the end of `Request.path`.
        max_body_bytes: The longest body accepted.
        too_big: The error code of the 413 response to a longer body.
        plain: Leave out the X-NSQ-Content-Type header, as /ping does.
        begin: Called before the handler if a poller serves the client; None always uses the handler.
        rule: What the client needs, if it must authenticate; None refuses every client then.
        limiter: Shared by routes whose answers take long or are large; None for others.
        pieces: Shared by routes that generate large pieces; the generator uses `Request.room`.
        parses_query: The query must be valid, and `Request.query` has its parameters. False: the handler parses it.
        notices_end: A generated answer is closed as soon as the client disconnects, not only with the next piece. Not
            for clients that a poller serves.
        upgrade: The protocol, in lower case, that follows the answer to a valid request, by `Response.takes_over`. A
            request that does not ask for it with `Upgrade` is answered with 426. Empty: HTTP goes on.
    """

    method: str
    path: str
    handler: Handler
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    too_big: str = "BODY_TOO_BIG"
    plain: bool = False
    begin: Begin | None = None
    rule: Rule | None = None
    limiter: AnswerLimiter | None = None
    pieces: BodyMemoryLimit | None = None
    parses_query: bool = True
    notices_end: bool = False
    upgrade: str = ""


class _Resource:
    """All routes of one path, and the answers to its other methods."""

    def __init__(self, routes: Mapping[str, Route], methods: Iterable[str]) -> None:
        self.routes = routes
        self._methods = methods

    def resolve(self, method: str) -> Route | Response:
        return self.routes.get(method) or self._without_route(method)

    def _without_route(self, method: str) -> Response:
        """Return a response, made on demand: making those of all paths would be a tenth of a broker's start."""
        allow = {"Allow": ", ".join(sorted({*self._methods, "OPTIONS"}))}
        found = Response.empty() if method == "OPTIONS" else HTTPError(405, "METHOD_NOT_ALLOWED").response()
        return replace(found, headers=allow)


class Router:
    """Finds the route of a request. Immutable, so that connections share it.

    A subclass may override `resolve`, for example to give every request the same answer.

    Attributes:
        routes: All routes.
        other_version: The answer to requests that are not HTTP/1.1 or HTTP/1.0.

    Raises:
        ValueError: A path does not have the form that `Route` requires, or two routes have the same method and path.
    """

    other_version = INVALID_REQUEST

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes: tuple[Route, ...] = tuple(routes)
        exact: dict[str, dict[str, Route]] = {}
        parents: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            parent = _parent_of_braces(route.path)
            methods = exact.setdefault(route.path, {}) if parent is None else parents.setdefault(parent, {})
            if methods.setdefault(route.method, route) is not route:
                raise ValueError(f"two routes for {route.method} {route.path}")
        self._exact = {path: _Resource(methods, methods) for path, methods in exact.items()}
        self._parents = {path: _Resource(methods, methods) for path, methods in parents.items()}
        # RFC 9110 9.3.7: OPTIONS * asks about the server as a whole.
        everything = {
            method for table in (exact, parents) for methods in table.values() for method in methods
        }
        self._exact["*"] = _Resource({}, everything)

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        """Return the route of a request, or its response: 404, 405, the answer to OPTIONS, or a redirect.

        The redirect leads to the normalized path and keeps the query.
        """
        resource = self._find(path)
        if resource is not None:
            return resource.resolve(method)
        return self._redirect(method, path, query) or NOT_FOUND

    def _find(self, path: str) -> _Resource | None:
        found = self._exact.get(path)
        if found is None:
            parent, _, name = path.rpartition("/")
            if name:
                found = self._parents.get(parent)
        return found

    def _redirect(self, method: str, path: str, query: str) -> Response | None:
        clean = posixpath.normpath("/" + path.lstrip("/"))
        parent, _, name = clean.rpartition("/")
        right_path, resource = clean.lower(), self._exact.get(clean.lower())
        if resource is None and name:
            # A segment that matches braces is data: keep its letter case.
            right_path, resource = f"{parent.lower()}/{name}", self._parents.get(parent.lower())
        # As nsqd: redirect only if the normalized path has the method.
        if resource is None or method not in resource.routes:
            return None
        location = quote(right_path) + (f"?{query}" if query else "")
        return Response(301 if method == "GET" else 307, content_type=None, headers={"Location": location})


def _parent_of_braces(path: str) -> str | None:
    """Return the path without its last segment if that is a name in braces, else None."""
    parent, _, name = path.rpartition("/")
    braces = name.startswith("{") and name.endswith("}")
    literal = (parent or "/") if braces else path
    clean = posixpath.normpath("/" + literal.lstrip("/")).lower()
    if literal != clean or "{" in literal + name[1:-1] or "}" in literal + name[1:-1]:
        raise ValueError(f"not a path: {path!r}")
    return parent if braces else None


class TLSRequiredRouter(Router):
    """Refers every request to the HTTPS port (0 without one), in the form that NSQ's HTTP clients understand."""

    def __init__(self, https_port: int) -> None:
        super().__init__([])
        # With the blanks that nsqd sends.
        body = json.dumps({"message": "TLS_REQUIRED", "https_port": https_port})
        self._answer = Response(403, body.encode(), "application/json; charset=utf-8")

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        """Return the same answer for every request."""
        return self._answer
