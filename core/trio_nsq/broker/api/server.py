"""The broker's HTTP and HTTPS servers: connections, routes, and the request log."""

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import trio

from ...http import (
    CutOff,
    Handler,
    HTTPError,
    Request,
    Response,
    Route,
    Router,
    log_request,
    peer_of,
    serve_connection,
)
from ...listening import port_of
from ...log import LogError
from ..addresses import BoundAddresses
from ..errors import DeletedError, PublishRefused, SaveError
from ..server import Server
from ..state.settings import SettingsError
from . import backlog, dead_letters, debug, read, topics
from .config import Config
from .publishing import Publishing, refusal
from .status import Status

logger = logging.getLogger("trio_nsq.broker")

_HANDSHAKE_TIMEOUT_S = 5.0
"""nsqd's limit for TCP clients."""
_UNLOGGED = {("POST", "/pub"), ("POST", "/mpub")}


class HTTPServer:
    """Serves HTTP clients. `bound` has the broker's addresses."""

    def __init__(self, server: Server, bound: BoundAddresses) -> None:
        self._server = server
        self._poller = server.poller
        self._bodies = server.services.bodies
        self._router = self._plain_router = make_router(server, bound)
        if server.options.required_tls == "true":
            self._plain_router = TLSRequiredRouter(port_of(bound.https_address) or 0)

    async def handle_http(self, stream: trio.SocketStream) -> None:
        """Serve one client of the HTTP listener."""
        try:
            await serve_connection(
                stream,
                self._plain_router,
                on_request=log_unless_publish,
                poller=self._poller,
                bodies=self._bodies,
            )
        except Exception:
            # A bug in the broker: it must not affect other clients.
            logger.exception("HTTP: internal error")

    async def handle_https(self, stream: trio.SocketStream) -> None:
        """Serve one client of the HTTPS listener."""
        from ..session.tls import TLSError, TLSStream  # slow to import, and most brokers have no certificate

        tls_context = self._server.services.tls_context
        assert tls_context is not None  # without it there is no HTTPS listener
        peer = peer_of(stream)
        secure = TLSStream(stream, tls_context)
        try:
            with trio.fail_after(_HANDSHAKE_TIMEOUT_S):
                await secure.do_handshake()
            await serve_connection(
                secure, self._router, peer=peer, on_request=log_unless_publish, bodies=self._bodies
            )
        except trio.TooSlowError:
            logger.warning(
                "http: TLS handshake error from %s: not complete within %g s", peer, _HANDSHAKE_TIMEOUT_S
            )
        except (TLSError, trio.BrokenResourceError) as exc:
            logger.warning("http: TLS handshake error from %s: %s", peer, exc)
        except Exception:
            logger.exception("HTTPS: internal error")


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


def log_unless_publish(request: Request, status: int, elapsed_s: float) -> None:
    """Log a request, unless it is a publish."""
    if (request.method, request.path) not in _UNLOGGED:
        log_request(logger, request, status, elapsed_s)


# ---------------------------------------------------------------------- routes

_Handlers = dict[tuple[str, str], Callable[[Server, Request], Awaitable[Response]]]

_HANDLERS: _Handlers = {
    ("POST", "/topic/create"): topics.create_topic,
    ("POST", "/topic/delete"): topics.delete_topic,
    ("POST", "/topic/empty"): topics.empty_topic,
    ("POST", "/topic/pause"): partial(topics.pause_topic, paused=True),
    ("POST", "/topic/unpause"): partial(topics.pause_topic, paused=False),
    ("GET", "/topic/producer"): topics.get_producer,
    ("POST", "/topic/producer/forget"): topics.forget_producer,
    ("GET", "/topic/settings"): topics.get_topic_settings,
    ("PUT", "/topic/settings"): topics.put_topic_settings,
    ("GET", "/topic/read"): read.read,
    ("GET", "/topic/bounds"): read.bounds,
    ("POST", "/channel/create"): topics.create_channel,
    ("POST", "/channel/delete"): topics.delete_channel,
    ("POST", "/channel/empty"): topics.empty_channel,
    ("POST", "/channel/pause"): partial(topics.pause_channel, paused=True),
    ("POST", "/channel/unpause"): partial(topics.pause_channel, paused=False),
    ("GET", "/channel/settings"): topics.get_channel_settings,
    ("PUT", "/channel/settings"): topics.put_channel_settings,
    ("GET", "/channel/peek"): backlog.peek,
    ("POST", "/channel/seek"): backlog.seek,
    ("GET", "/channel/deferred"): backlog.deferred,
    ("POST", "/channel/deferred/cancel"): backlog.cancel,
    ("GET", "/dead_letters"): dead_letters.overview,
    ("GET", "/dead_letters/messages"): dead_letters.messages,
    ("POST", "/dead_letters/requeue"): dead_letters.requeue,
    ("POST", "/dead_letters/drop"): dead_letters.drop,
}
_DEBUG_HANDLERS: _Handlers = {
    ("GET", "/debug"): debug.index,
    ("GET", "/debug/tasks"): debug.tasks,
    ("GET", "/debug/profile"): debug.profile,
    ("GET", "/debug/memory"): debug.memory,
    ("POST", "/debug/freememory"): debug.free_memory,
    # nsqd's other endpoints.
    ("GET", "/debug/pprof"): debug.pprof,
    ("GET", "/debug/pprof/{profile}"): debug.pprof,
    ("POST", "/debug/pprof/{profile}"): debug.pprof,
    ("PUT", "/debug/setblockrate"): debug.pprof,
}


def make_router(server: Server, bound: BoundAddresses) -> Router:
    """Build the broker's routes."""
    message, body = server.options.limits.max_msg_size, server.options.limits.max_body_size
    publishing, status, config = Publishing(server), Status(server, bound), Config(server, bound)
    routes = [
        Route("GET", "/ping", status.ping, plain=True),
        Route("GET", "/info", status.info),
        Route("GET", "/stats", status.stats),
        Route("GET", "/metrics", status.metrics, plain=True),
        Route("GET", "/config/{opt}", config.get),
        Route("PUT", "/config/{opt}", config.put, message, "INVALID_VALUE"),
        Route("POST", "/pub", publishing.pub, message, "MSG_TOO_BIG", begin=publishing.begin_pub),
        Route("POST", "/mpub", publishing.mpub, body, "BODY_TOO_BIG", begin=publishing.begin_mpub),
        Route("POST", "/channel/pub", publishing.channel_pub, message, "MSG_TOO_BIG"),
        *(Route(*place, partial(handler, server)) for place, handler in _HANDLERS.items()),
        *(
            Route(*place, partial(debug.guarded, handler, server), plain=True)
            for place, handler in _DEBUG_HANDLERS.items()
        ),
    ]
    return Router(replace(route, handler=partial(_answer, route.handler)) for route in routes)


async def _answer(handler: Handler, request: Request) -> Response:
    """Call a handler, and turn errors of state, log and disk into NSQ's error responses."""
    try:
        return await handler(request)
    except PublishRefused as exc:
        raise refusal(exc) from exc
    except SettingsError as exc:
        raise HTTPError(400, f"INVALID_SETTING: {exc}") from exc
    except DeletedError as exc:
        what = "CHANNEL" if "channel" in request.query else "TOPIC"
        raise HTTPError(404, f"{what}_NOT_FOUND") from exc
    except (SaveError, LogError, CutOff) as exc:
        raise HTTPError(503, str(exc)) from exc
