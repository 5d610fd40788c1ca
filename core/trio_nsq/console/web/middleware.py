"""Each request passes here before it reaches a page: its viewer, the page that sent it, its body, and the audit log."""

from collections.abc import Callable, Iterable, Mapping

import trio
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..access.access import Access, Identified
from ..access.bodies import MAX_BODY_BYTES, SMALL_BODY_BYTES, Bodies
from ..access.changes import has_changed_nothing, noted_change
from ..access.cookies import session_cookie
from ..access.incoming import Incoming, Refused
from ..access.rights import NOTHING
from ..access.viewer import Viewer
from .forms import CSRF_FIELD, CSRF_HEADER, FORM_TYPE, UPLOAD_TYPE, parse_form, parse_upload

_NOBODY = Viewer(rights=NOTHING)
_OPEN_PATHS = ("/login", "/logout", "/ping", "/favicon.ico")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Refuse = Callable[[Request, Refused], Response]


class AccessMiddleware:
    """Identifies the viewer of each request, and refuses what it may not send.

    Args:
        refuse: Renders a refusal.
        images_from: The origin of pictures on pages, besides the console; empty: none.
    """

    def __init__(self, app: Starlette, access: Access, refuse: Refuse, images_from: str = "") -> None:
        self._app = app
        self._access = access
        self._refuse = refuse
        self._bodies = Bodies()
        self._headers = {"Content-Security-Policy": _content_policy(images_from), **_HEADERS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["type"] == "http":
            # The requests of a connection share the state that the server gives.
            scope["state"] = {**scope.get("state", {}), "viewer": _NOBODY}
            scope["app"] = self._app
            await self._answer(scope, receive, _Answer(send, self._headers))
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        incoming = Incoming.of(scope, self._access.base_path)
        scope["state"]["incoming"] = incoming
        if incoming.path.startswith("/static/"):
            await self._app(scope, receive, answer.send)
            return
        answer.is_private = True
        try:
            identified = await self._identify(scope, incoming, answer)
            if incoming.is_safe:
                await self._pass(scope, receive, answer, incoming, identified)
            else:
                await self._change(scope, receive, answer, incoming, identified)
        except Refused as exc:
            if not answer.status:
                await self._refuse(Request(scope), exc)(scope, receive, answer.send)
            if exc.is_notable:
                self._record(scope, incoming, exc.status, exc.code)

    async def _identify(self, scope: Scope, incoming: Incoming, answer: "_Answer") -> Identified:
        """Find out who the viewer is. Raises Refused."""
        access, host = self._access, incoming.headers.get("host", "")
        if not access.hosts.allows(host):
            text = f"{host[:100]} is not a name of this console: see --http-allowed-host."
            raise Refused(403, "HOST_NOT_ALLOWED", text)
        try:
            identified = await access.identify(incoming)
        except Refused as exc:
            if exc.ends_session and session_cookie(incoming) in incoming.cookies:
                answer.cookies.append(access.session_header(incoming, "", 0))
            raise
        scope["state"] |= {"viewer": identified.viewer, "identified": identified}
        if identified.is_new_visitor and not incoming.is_api:
            answer.cookies.append(access.visitor_header(incoming, identified))
        if not incoming.is_safe:
            access.check_page(incoming, identified)
        if identified.viewer.rights == NOTHING and incoming.path not in _OPEN_PATHS:
            raise Refused(401, "AUTH_REQUIRED", "Log in first.", is_notable=not incoming.is_safe)
        return identified

    async def _change(
        self, scope: Scope, receive: Receive, answer: "_Answer", incoming: Incoming, identified: Identified
    ) -> None:
        """Read and check the body of a request that changes something, and pass the request on. Raises Refused."""
        limit = SMALL_BODY_BYTES if identified.viewer.rights == NOTHING else MAX_BODY_BYTES
        async with self._bodies.read(receive, incoming.headers.get("content-length", ""), limit) as body:
            given = incoming.headers.get(CSRF_HEADER, "")
            content_type = incoming.headers.get("content-type", "")
            kind = content_type.partition(";")[0].strip().lower()
            if kind in (FORM_TYPE, UPLOAD_TYPE):
                state = scope["state"]
                try:
                    if kind == FORM_TYPE:
                        state["form"] = parse_form(body)
                    else:
                        state["form"], state["uploads"] = await parse_upload(content_type, body)
                except HTTPException as exc:
                    raise Refused(exc.status_code, "BAD_FORM", exc.detail) from exc
                given = given or state["form"].get(CSRF_FIELD, "")
            if self._access.needs_form_token(incoming, identified):
                self._access.check_form_token(identified, given)
            await self._pass(scope, _replaying(body, receive), answer, incoming, identified)

    async def _pass(
        self, scope: Scope, receive: Receive, answer: "_Answer", incoming: Incoming, identified: Identified
    ) -> None:
        """Pass a request on; end its answer when the viewer may not see it any more."""
        with trio.CancelScope() as running:
            answer.keep = lambda: self._access.is_current(incoming, identified) or running.cancel()
            try:
                await self._app(scope, receive, answer.send)
            finally:
                is_action = not (incoming.is_safe or has_changed_nothing(scope)) or answer.status == 403
                if is_action and incoming.path not in _OPEN_PATHS:
                    self._record(scope, incoming, answer.status or 500, "")
        if running.cancelled_caught:
            await answer.end()

    def _record(self, scope: Scope, incoming: Incoming, status: int, code: str) -> None:
        code = code or ("FORBIDDEN" if status == 403 else "")
        self._access.record_change(incoming, scope["state"]["viewer"], status, code, noted_change(scope))


class _Answer:
    """Adds headers to an answer, and checks a stream before each piece that it may go on.

    Attributes:
        status: Of the answer; 0 before its head.
        cookies: `Set-Cookie` headers.
        is_private: The answer must not be stored.
        keep: Called before each piece of a stream.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = headers
        self.status = 0
        self.cookies: list[str] = []
        self.is_private = False
        self.keep: Callable[[], object] = bool
        self._has_ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            _set_missing(headers, self._headers.items())
            if self.is_private:
                _set_missing(headers, [("Cache-Control", "no-store")])
            for cookie in self.cookies:
                headers.append("Set-Cookie", cookie)
        elif message["type"] == "http.response.body":
            self._has_ended = not message.get("more_body", False)
            if not self._has_ended:
                self.keep()
                await trio.lowlevel.checkpoint_if_cancelled()
        await self._send(message)

    async def end(self) -> None:
        """End an answer that was cut off."""
        if self.status and not self._has_ended:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _content_policy(images_from: str) -> str:
    images = f"'self' {images_from}".rstrip()
    return (
        f"default-src 'none'; style-src 'self'; script-src 'self'; img-src {images}; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def _set_missing(headers: MutableHeaders, values: Iterable[tuple[str, str]]) -> None:
    for name, value in values:
        headers.setdefault(name, value)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return what gives the application a body that was read already."""
    bodies = [body]

    async def again() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await receive()

    return again
