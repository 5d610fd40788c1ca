"""The application: routes, and pages for errors."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from ..access.changes import note_nothing_changed
from ..access.viewer import Forbidden
from ..api.routes import api_routes
from ..console import Console, console_of, take_snapshot
from ..fleet.watcher import Watcher
from ..graphite import Graphite
from ..upstream.client import UpstreamError
from . import static_files
from .live import Live
from .page import NotFound, Page, Unanswered, View
from .pages import (
    changes,
    channel,
    clusters,
    counter,
    dead_letters,
    deferred,
    definitions,
    disconnect,
    find,
    health,
    jobs,
    login,
    lookup,
    message,
    messages,
    node_changes,
    nodes,
    oidc,
    peek,
    preferences,
    publish,
    seek,
    settings,
    tail,
    topic,
    topics,
)
from .paths import name_of, reserved_segments
from .rendering import render
from .site import Site
from .table_files import table_file

logger: logging.Logger = logging.getLogger("trio_nsq.console")

_NEW_S = 1.0
"""Unknown names cause a poll at most this often."""
_FIND_S = 3.0
"""A page waits this long for that poll."""

PAGES: tuple[Page, ...] = (
    *topics.PAGES,
    *messages.PAGES,
    *message.PAGES,
    *peek.PAGES,
    *publish.PAGES,
    *tail.PAGES,
    *changes.PAGES,
    *node_changes.PAGES,
    *seek.PAGES,
    *disconnect.PAGES,
    *dead_letters.PAGES,
    *deferred.PAGES,
    *definitions.PAGES,
    *settings.PAGES,
    *topic.PAGES,
    *channel.PAGES,
    *nodes.PAGES,
    *clusters.PAGES,
    *lookup.PAGES,
    *counter.PAGES,
    *login.PAGES,
    *oidc.PAGES,
    *health.PAGES,
    *jobs.PAGES,
    *preferences.PAGES,
    *find.PAGES,
)


def make_site(console: Console) -> Site:
    """Build the application."""
    routes: list[BaseRoute] = [
        *(
            Route(page.path, _endpoint(page), methods=list(page.methods), name=page.name)
            for page in sorted(PAGES, key=_specificity)
        ),
        static_files.ROUTE,
        *api_routes(),
    ]
    live = Live(partial(render, block="live"), PAGES, tuple(routes))
    routes.append(Route("/live", live.answer, name="live"))
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: _http_error,
            NotFound: _not_found,
            Forbidden: _forbidden,
            UpstreamError: _upstream_error,
            Exception: _internal_error,
        },
    )
    app.state.console = console
    app.state.reserved = reserved_segments(page.path for page in PAGES)
    options = console.options
    entrances = (options.base_path, f"{options.base_path.rstrip('/')}/") if options.fleet else ()
    return Site(app, console.access, _error, Graphite(options).origin, entrances)


def _specificity(page: Page) -> list[bool]:
    """Sort `/topics/{topic}/delete` before `/topics/{topic}/{channel}`, which matches it, too."""
    return [part.startswith("{") for part in page.path.split("/")]


def _endpoint(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        request.state.page = page
        watcher = console_of(request).watcher
        watcher.touch()
        await watcher.changed(0)  # the first round takes 2 s at most; without it, every page would be empty
        request.scope["path_params"] = {key: name_of(part) for key, part in request.path_params.items()}
        await _find_new(watcher, request.path_params)
        take_snapshot(request)
        found = await page.handler(request)
        if isinstance(found, View) and found.only_asks:
            note_nothing_changed(request)
        if isinstance(found, View) and (file := table_file(request, found)) is not None:
            return file
        return _response(request, found, live=page.live) if isinstance(found, View) else found

    return answer


async def _find_new(watcher: Watcher, names: Mapping[str, str]) -> None:
    """Poll again if the last poll lacks the topic or channel of a path: it may have been created since."""
    topic = watcher.snapshot.topics.get(names.get("topic", ""))
    is_known = topic is not None and names.get("channel", "") in {"", *topic.channels}
    if "topic" in names and not is_known and time.time() > watcher.snapshot.taken_at_s + _NEW_S:
        with trio.move_on_after(_FIND_S):
            await watcher.refresh()


def _response(request: Request, view: View, *, live: bool = False) -> HTMLResponse:
    return HTMLResponse(render(request, view, live=live), view.status)


def _error(request: Request, status: int, title: str, texts: Iterable[str]) -> Response:
    view = View("error.html", {"title": title, "texts": list(texts), "status": status}, status)
    return _response(request, view)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    text = "There is no such page." if exc.status_code == 404 else exc.detail
    return _error(request, exc.status_code, "Not found" if exc.status_code == 404 else "Error", [text])


async def _not_found(request: Request, exc: Exception) -> Response:
    status, title = (503, "No answer") if isinstance(exc, Unanswered) else (404, "Not found")
    return _error(request, status, title, [str(exc)])


async def _forbidden(request: Request, exc: Exception) -> Response:
    return _error(request, 403, "Not allowed", [str(exc)])


async def _upstream_error(request: Request, exc: Exception) -> Response:
    return _error(request, 502, "A broker did not do it", [str(exc)])


async def _internal_error(request: Request, exc: Exception) -> Response:
    logger.error("%s %s: internal error", request.method, request.url.path, exc_info=exc)
    return _error(request, 500, "Internal error", ["The console's log has the details."])
