"""Live updates: the block `live` of a page as server-sent events.

A block is rendered once for each snapshot, page and set of rights, by the first viewer that needs it, and sent to all.
A viewer that reads slowly gets the newest block when it can take one, and none of those between.

Events: `update` has the block, `beat` says that it is as before; the id of both is the time of the snapshot. After
`again` the browser connects again, and its rights are checked again. `end` has the reason why no more will come.
"""

import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from ..access.viewer import Forbidden, viewer_of
from ..console import console_of
from ..upstream.client import UpstreamError
from .formats import moment
from .page import NotFound, Page, View
from .paths import name_of

logger = logging.getLogger("trio_nsq.console")

MAX_VIEWERS = 200
BEAT_S = 15.0
"""Below the time after which proxies close idle connections; the browser waits for three of them."""
_SEND_S = 20.0
"""A viewer that takes nothing for this long is dropped."""
_AGAIN_S = 600.0
_MAX_PATH = 4000
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_ENDINGS = (NotFound, Forbidden, UpstreamError)

Render = Callable[[Request, View], str]


@dataclass(slots=True)
class _Feed:
    """The newest block of a page, for viewers with the same rights. `update` and `beat` are events."""

    viewers: int = 0
    version: int = -1
    block: str = ""
    update: bytes = b""
    beat: bytes = b""
    rendering: trio.Lock = field(default_factory=trio.Lock)


class Live:
    """Sends events to all viewers. One for an application.

    Args:
        render: Renders the block of a view.
        pages: All pages.
        routes: All routes, in the order in which they are tried.
        max_viewers: Further ones get status 503.
    """

    def __init__(
        self,
        render: Render,
        pages: Sequence[Page],
        routes: Sequence[BaseRoute],
        *,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        self._render = render
        self._pages = {page.name: page for page in pages if page.live}
        self._routes = routes
        self._max_viewers = max_viewers
        self._viewers = 0
        self._feeds: dict[Hashable, _Feed] = {}

    async def answer(self, request: Request) -> Response:
        """Answer a request for the events of the page in the parameter `path`. HEAD tells whether GET would work."""
        path = request.query_params.get("path", "")
        page, asked = self._find(request, path)
        if self._viewers >= self._max_viewers:
            raise HTTPException(503, "Too many pages get live updates. Reload this one for new numbers.")
        await console_of(request).watcher.changed(0)
        await page.handler(asked)  # raises what the page itself would answer
        if request.method == "HEAD":
            return Response(headers=_HEADERS)
        key = (path, viewer_of(request).rights.key)
        return _EventStream(lambda send: self._run(page, asked, key, send))

    def _find(self, request: Request, path: str) -> tuple[Page, Request]:
        """Return the page at a path, and a request for it."""
        if not path.startswith("/") or len(path) > _MAX_PATH:
            raise NotFound("The parameter path has to be the path of a page.")
        plain, _, query = path.partition("?")
        scope: Scope = {
            **request.scope,
            "method": "GET",
            "path": unquote(plain),
            "raw_path": plain.encode(),
            "query_string": query.encode(),
            "path_params": {},
        }
        for route in self._routes:
            match, found = route.matches(scope)
            if match == Match.FULL:
                page = self._pages.get(route.name) if isinstance(route, Route) else None
                if page is None:
                    break
                names = {key: name_of(part) for key, part in found["path_params"].items()}
                return page, Request({**scope, **found, "path_params": names}, request.receive)
        raise NotFound("There is no page with live updates at this path.")

    async def _run(
        self, page: Page, asked: Request, key: Hashable, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send events until the page is gone."""
        watcher = console_of(asked).watcher
        feed = self._feeds.setdefault(key, _Feed())
        feed.viewers += 1
        self._viewers += 1
        try:
            sent: bytes = b""
            until_s = trio.current_time() + _AGAIN_S
            version = watcher.snapshot.version - 1
            with watcher.viewing():
                while trio.current_time() < until_s:
                    with trio.move_on_after(BEAT_S):
                        version = (await watcher.changed(version)).version
                    await self._refresh(page, asked, feed)
                    await send(feed.beat if feed.update is sent else feed.update)
                    sent = feed.update
            await send(_event("again", ""))
        except _ENDINGS as exc:
            await send(_event("end", str(exc)))
        except (trio.TooSlowError, OSError):
            pass  # the viewer has gone, or does not read
        except Exception:
            logger.exception("GET /live: internal error")
            await send(_event("end", "Internal error. The console's log has the details."))
        finally:
            self._viewers -= 1
            feed.viewers -= 1
            if not feed.viewers:
                del self._feeds[key]

    async def _refresh(self, page: Page, asked: Request, feed: _Feed) -> None:
        """Render the newest snapshot, unless another viewer has. `update` stays the same object if nothing changed."""
        async with feed.rendering:
            snapshot = console_of(asked).watcher.snapshot
            if feed.version == snapshot.version:
                return
            found = await page.handler(asked)
            if not isinstance(found, View):
                raise NotFound("This page has moved. Reload it.")
            block, taken_at = self._render(asked, found), moment(snapshot.taken_at_s)
            if block != feed.block or not feed.update:
                feed.block, feed.update = block, _event("update", block, taken_at)
            feed.beat = _event("beat", "", taken_at)
            feed.version = snapshot.version


class _EventStream(Response):
    """An answer that lasts until the viewer disconnects, stops reading, or `run` returns."""

    def __init__(self, run: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]]) -> None:
        super().__init__(headers=_HEADERS)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (ASGI)."""
        headers = [each for each in self.raw_headers if each[0] != b"content-length"]

        async def send_event(event: bytes) -> None:
            with trio.fail_after(_SEND_S):
                await send({"type": "http.response.body", "body": event, "more_body": True})

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_disconnect)
            await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
            await self._run(send_event)
            with trio.move_on_after(_SEND_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()


def _event(kind: str, text: str, identity: str = "") -> bytes:
    """Encode an event. Its text may have several lines."""
    lines = [f"event: {kind}", *(f"id: {identity}" for _ in [0] if identity)]
    return "\n".join([*lines, *(f"data: {line}" for line in text.splitlines() or [""])]).encode() + b"\n\n"
