"""Live updates: the block `live` of a page as server-sent events.

A block is rendered once for each snapshot, page, set of rights, and preferences where they matter, by the first viewer
that needs it, and sent to all.
A viewer that reads slowly gets the newest block when it can take one, and none of those between.

Events: `update` has the block, `beat` says that it is as before; the id of both is the time of the snapshot. After
`again` the browser connects again, and its rights are checked again. `end` has the reason why no more will come.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from ..access.viewer import Forbidden, viewer_of
from ..console import console_of, take_snapshot
from ..upstream.client import UpstreamError
from .formats import moment
from .page import NotFound, Page, View
from .paths import name_of
from .preferences import preferences_of
from .streamed import Streamed

logger: logging.Logger = logging.getLogger("trio_nsq.console")

MAX_VIEWERS = 200
_TOO_MANY = "Too many pages get live updates. Reload this one for new numbers."
BEAT_S = 15.0
"""Below the time after which proxies close idle connections; the browser waits for three of them."""
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
            raise HTTPException(503, _TOO_MANY)
        await console_of(request).watcher.changed(0)
        await page.handler(asked)  # raises what the page itself would answer
        if request.method == "HEAD":
            return Response(headers=_HEADERS)
        key = (path, viewer_of(request).rights.key, preferences_of(request) if page.personal else None)
        return Streamed(self._events(page, asked, key), _HEADERS)

    def _find(self, request: Request, path: str) -> tuple[Page, Request]:
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

    async def _events(self, page: Page, asked: Request, key: Hashable) -> AsyncGenerator[bytes, None]:
        """Yield events until the page is gone."""
        if self._viewers >= self._max_viewers:  # others have been admitted since `answer`
            yield _event("end", _TOO_MANY)
            return
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
                    event, sent = feed.beat if feed.update is sent else feed.update, feed.update
                    yield event
            yield _event("again", "")
        except _ENDINGS as exc:
            yield _event("end", str(exc))
        except Exception:
            logger.exception("GET /live: internal error")
            yield _event("end", "Internal error. The console's log has the details.")
        finally:
            self._viewers -= 1
            feed.viewers -= 1
            if not feed.viewers:
                del self._feeds[key]

    async def _refresh(self, page: Page, asked: Request, feed: _Feed) -> None:
        """Render the newest snapshot, unless another viewer has. `update` stays the same object if nothing changed."""
        async with feed.rendering:
            snapshot = take_snapshot(asked)
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


def _event(kind: str, text: str, identity: str = "") -> bytes:
    """Encode an event. Its text may have several lines."""
    lines = [f"event: {kind}", *(f"id: {identity}" for _ in [0] if identity)]
    return "\n".join([*lines, *(f"data: {line}" for line in text.splitlines() or [""])]).encode() + b"\n\n"
