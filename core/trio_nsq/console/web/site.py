"""The pages as one route of the HTTP server: forms, headers of answers, and the audit log."""

from collections.abc import Collection, Iterable
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Scope

from ...http import messages as http
from ...http.routing import Route, Router
from ...protocol.address import parse_address
from ..access.access import Access
from ..access.changes import has_changed_nothing, noted_change
from ..access.guard import MAX_BODY_BYTES, OPEN_PATHS, ViewerGuard, Visit, visit_of
from ..access.request_head import Refused, RequestHead
from ..access.rights import NOTHING
from ..access.viewer import Viewer
from .forms import CSRF_FIELD, CSRF_HEADER, FORM_TYPE, UPLOAD_TYPE, parse_form, parse_upload
from .refusals import Error, refusal

_NOBODY = Viewer(rights=NOTHING)
_OTHER_VERSION = http.HTTPError(505, "HTTP_VERSION_NOT_SUPPORTED").response()
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Site(Router):
    """Answers every request with the application, after a `ViewerGuard`.

    If a reverse proxy passed `Upgrade: h2c` on, it would not see the client's further requests: it removes no header
    such as `X-Forwarded-User` from them. So HTTP/2 is refused.

    Args:
        error: Renders a page with a status, a title and texts.
        images_from: The origin of pictures on pages, besides the console; empty: none.
        entrances: Further paths outside of the base path that lead to the first page.
    """

    other_version = _OTHER_VERSION

    def __init__(
        self,
        app: Starlette,
        access: Access,
        error: Error,
        images_from: str = "",
        entrances: Collection[str] = (),
    ) -> None:
        route = partial(
            Route,
            path="/",
            handler=self._answer,
            max_body_bytes=MAX_BODY_BYTES,
            plain=True,
            parses_query=False,
            notices_end=True,
        )
        super().__init__(route(method) for method in ("GET", "HEAD", "POST", "PUT", "DELETE"))
        self._app = app
        self._access = access
        self._error = error
        self._base = access.base_path.rstrip("/")
        self._reason = "--fleet" if entrances else f"--base-path {self._base}"
        self._entrances = {self._base, *(entrances if self._base else ())}
        self._headers = {"Content-Security-Policy": _content_policy(images_from), **_HEADERS}
        self._route = self.routes[0]

    def resolve(self, method: str, path: str, query: str = "") -> Route | http.Response:
        """Return the one route; for `*` the answer to OPTIONS, or 405."""
        return self._route if path.startswith("/") else super().resolve(method, path, query)

    def guard(self, port: int, scheme: str) -> ViewerGuard:
        return ViewerGuard(self._access, self._refuse, port=port, scheme=scheme)

    async def _answer(self, request: http.Request) -> http.Response:
        visit = visit_of(request)
        if not request.path.startswith(f"{self._base}/"):
            return self._outside(request)
        scope = self._scope(request, visit)
        if visit.identified is None:
            return self._finish(await self._run(scope, b""), visit)
        try:
            if not visit.incoming.is_safe:
                await self._read_form(scope, visit, request.body)
            return self._finish(await self._run_audited(scope, visit, request.body), visit)
        except Refused as exc:
            return self._refuse(request, exc)

    def _outside(self, request: http.Request) -> http.Response:
        """Answer a request for a path that is not below the base path: mostly, a proxy has removed that."""
        # Starlette's own redirection has the Host header in it, which was not checked.
        if request.path in self._entrances and request.method in ("GET", "HEAD"):
            return http.Response(307, content_type=None, headers={"Location": f"{self._base}/"})
        text = (
            f"The pages of this console are below {self._base}/, because of {self._reason}. If a reverse "
            "proxy removes this prefix from the path, let it pass the path on unchanged (nginx: proxy_pass without a "
            "path).\n"
        )
        return http.Response(404, text.encode(), headers={"X-Content-Type-Options": "nosniff"})

    async def _read_form(self, scope: Scope, visit: Visit, body: bytes) -> None:
        """Parse and check the form of a request that changes something. Raises Refused."""
        headers, state = visit.incoming.headers, scope["state"]
        given = headers.get(CSRF_HEADER, "")
        content_type = headers.get("content-type", "")
        kind = content_type.partition(";")[0].strip().lower()
        if kind in (FORM_TYPE, UPLOAD_TYPE):
            try:
                if kind == FORM_TYPE:
                    state["form"] = parse_form(body)
                else:
                    state["form"], state["uploads"] = await parse_upload(content_type, body)
            except HTTPException as exc:
                raise Refused(exc.status_code, "BAD_FORM", exc.detail) from exc
            given = given or state["form"].get(CSRF_FIELD, "")
        assert visit.identified is not None
        if self._access.forms.needs_form_token(visit.incoming, visit.identified):
            self._access.forms.check_form_token(visit.identified, given)

    async def _run_audited(self, scope: Scope, visit: Visit, body: bytes) -> "_Answer":
        status = 500
        try:
            answer = await self._run(scope, body)
            status = answer.status
            return answer
        finally:
            incoming = visit.incoming
            is_action = not (incoming.is_safe or has_changed_nothing(scope)) or status == 403
            if is_action and incoming.path not in OPEN_PATHS:
                self._record(scope, incoming, status, "FORBIDDEN" if status == 403 else "")

    async def _run(self, scope: Scope, body: bytes) -> "_Answer":
        """Have the application answer a request whose body has arrived."""
        answer = _Answer()

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if not answer.status:  # otherwise it is logged, and answered with a page
                raise
        return answer

    def _refuse(self, request: http.Request, refused: Refused) -> http.Response:
        visit = visit_of(request)
        scope = self._scope(request, visit)
        found = refusal(Request(scope), refused, self._error)
        if refused.is_notable:
            self._record(scope, visit.incoming, refused.status, refused.code)
        return self._finish(_Answer(found.status_code, found.headers, bytes(found.body)), visit)

    def _record(self, scope: Scope, incoming: RequestHead, status: int, code: str) -> None:
        viewer, change = scope["state"]["viewer"], noted_change(scope)
        self._access.record_change(incoming, viewer, status, code, change)

    def _scope(self, request: http.Request, visit: Visit) -> Scope:
        """Return a request in the form of ASGI."""
        path, _, query = request.target.partition("?")
        incoming, identified = visit.incoming, visit.identified
        state = {"incoming": incoming, "identified": identified}
        return {
            "type": "http",
            "app": self._app,
            "method": request.method,
            "scheme": incoming.scheme,
            "path": request.path,
            "raw_path": path.encode(),
            "root_path": self._base,
            "query_string": query.encode(),
            "headers": [
                (name.encode("latin-1"), text.encode("latin-1")) for name, text in request.headers.items()
            ],
            "client": parse_address(incoming.peer) if incoming.peer else None,
            "state": {"viewer": _NOBODY if identified is None else identified.viewer, **state},
        }

    def _finish(self, answer: "_Answer", visit: Visit) -> http.Response:
        """Return an answer with the headers that all have."""
        headers = answer.headers
        del headers["content-length"]
        _set_missing(headers, self._headers.items())
        if not visit.incoming.path.startswith("/static/"):
            _set_missing(headers, [("Cache-Control", "no-store")])
        for cookie in visit.cookies:
            headers.append("Set-Cookie", cookie)
        return http.Response(answer.status, answer.body, None, headers)


class _Answer:
    """What the application sends. The body of a `Streamed` one is a generator."""

    def __init__(self, status: int = 0, headers: MutableHeaders | None = None, body: http.Body = b"") -> None:
        self.status = status
        self.headers = headers if headers is not None else MutableHeaders()
        self.body = body

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], MutableHeaders(raw=message["headers"])
        else:
            self.body = message.get("body", b"")


def _content_policy(images_from: str) -> str:
    images = f"'self' {images_from}".rstrip()
    return (
        f"default-src 'none'; style-src 'self'; script-src 'self'; img-src {images}; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def _set_missing(headers: MutableHeaders, values: Iterable[tuple[str, str]]) -> None:
    for name, value in values:
        headers.setdefault(name, value)
