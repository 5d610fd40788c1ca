"""The paths of the API. Methods, redirections and errors are nsqadmin's."""

import logging
from collections.abc import Awaitable, Callable, Mapping

import trio
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ..access.viewer import Forbidden
from ..upstream.client import UpstreamError
from . import config, graphite, topics
from .answers import APIError, failure
from .questions import AllFailed

logger: logging.Logger = logging.getLogger("trio_nsq.console")

Handler = Callable[[Request], Awaitable[Response]]

_PATHS: dict[str, dict[str, Handler]] = {
    "/ping": {"GET": topics.ping},
    "/api/topics": {"GET": topics.topics, "POST": topics.create},
    "/api/topics/{topic}": {
        "GET": topics.topic,
        "POST": topics.act_on_topic,
        "DELETE": topics.delete_topic,
    },
    "/api/topics/{topic}/{channel}": {
        "GET": topics.channel,
        "POST": topics.act_on_channel,
        "DELETE": topics.delete_channel,
    },
    "/api/nodes": {"GET": topics.nodes},
    "/api/nodes/{node}": {"GET": topics.node, "DELETE": topics.hide_node},
    "/api/counter": {"GET": topics.counter},
    "/api/graphite": {"GET": graphite.show},
    "/config/{opt}": {"GET": config.show, "PUT": config.change},
    "/render": {"GET": graphite.render},
}
_ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
_MAX_AT_ONCE = 16
"""Requests for one path that ask brokers at the same time; further ones wait."""


def api_routes() -> list[BaseRoute]:
    routes: list[BaseRoute] = []
    for path, handlers in _PATHS.items():
        routes.append(Route(path, _endpoint(handlers), methods=_ALL_METHODS))
        routes.append(Route(f"{path}/", _redirect, methods=["GET"]))
    routes += [
        Route(f"{prefix}{{rest:path}}", _missing, methods=_ALL_METHODS) for prefix in ("/api/", "/config/")
    ]
    return routes


def _endpoint(handlers: Mapping[str, Handler]) -> Handler:
    slots = trio.CapacityLimiter(_MAX_AT_ONCE)
    allowed = {"Allow": ", ".join(sorted([*handlers, "OPTIONS"]))}

    async def respond(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        if method == "OPTIONS":
            return Response(headers=allowed)
        if method not in handlers:
            return failure(405, "METHOD_NOT_ALLOWED", allowed)
        try:
            async with slots:
                return await handlers[method](request)
        except APIError as exc:
            return failure(exc.status, exc.message)
        except Forbidden as exc:
            return failure(403, f"FORBIDDEN: {exc}")
        except (AllFailed, UpstreamError) as exc:
            return failure(502, f"UPSTREAM_ERROR: {exc}")
        except Exception as exc:
            logger.error("%s %s: internal error", request.method, request.url.path, exc_info=exc)
            return failure(500, "INTERNAL_ERROR")

    return respond


async def _redirect(request: Request) -> Response:
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(request.url.path.rstrip("/") + query, 301)


async def _missing(request: Request) -> Response:
    return failure(404, "NOT_FOUND")
