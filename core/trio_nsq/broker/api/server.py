"""The broker's HTTP and HTTPS servers: connections, routes, and the request log."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from ...access.policy import Rule
from ...http.auditing import audited
from ...http.guard import Guard
from ...http.limiting import AnswerLimiter
from ...http.messages import CutOff, ForeignRequest, HTTPError, Request, Response
from ...http.routing import Handler, Route, Router, TLSRequiredRouter
from ...http.serving import log_request, peer_of, serve_connection
from ...http.upgrade import CLUSTER_PROTOCOL
from ...http.web_pages import HostNames
from ...log import LogError
from ...protocol.address import host_of, is_unix_path
from ...server.body_memory import BodyMemoryLimit
from ...server.listening import port_of
from ..addresses import BoundAddresses, Broadcast
from ..errors import BatchRefused, DeletedError, MoveRefused, OtherLog, PublishRefused, SaveError
from ..options import BrokerOptions
from ..server import Server
from ..state.reported_jobs import MAX_REPORT_BYTES
from ..state.settings import SettingsError
from . import backlog, cluster, dead_letters, debug, definitions, jobs, moves, read, topics
from .config import Config
from .publishing import Publishing, refusal
from .status import Status

if TYPE_CHECKING:
    from ...tls.session import TLSSession

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_HANDSHAKE_TIMEOUT_S = 5.0
"""nsqd's limit for TCP clients."""
_UNLOGGED = {
    ("POST", "/pub"),
    ("POST", "/mpub"),
    ("POST", "/hpub"),
    ("GET", "/topic/producer"),
    ("POST", "/topic/producer/forget"),
    ("POST", "/topic/move/next"),
    ("POST", "/topic/move/store"),
    ("GET", "/cluster/forward"),
}
"""Publishes, as in nsqd; requests about idempotent producers: for a new topic, the answer is 404; moved messages; and
clients that a follower passes on, who are logged as clients."""
_JOB_PATH = "/jobs/"
_CONSOLE = "trio-nsq-admin/"
_POLLED = ("/info", "/stats", "/jobs", "/access")


class HTTPServer:
    """Serves HTTP clients.

    Args:
        bound: The broker's addresses.
        make: Makes the router from the broker's routes.

    Attributes:
        hosts: The names of the broker.
    """

    def __init__(
        self, server: Server, bound: BoundAddresses, make: Callable[[Iterable[Route]], Router] = Router
    ) -> None:
        self._server = server
        self._poller = server.poller
        self._bodies = server.session_deps.bodies
        self.hosts: HostNames = HostNames(host_names(server.options, bound))
        # A browser cannot connect to a unix socket.
        on_socket = is_unix_path(server.options.http_address)
        self._plain_guard = self._guard(HostNames("*") if on_socket else self.hosts)
        self._router = self._plain_router = make(broker_routes(server, bound))
        if server.options.required_tls == "true":
            self._plain_router = TLSRequiredRouter(port_of(bound.https_address) or 0)

    def _guard(self, hosts: HostNames, tls: "TLSSession | None" = None, *, encrypted: bool = False) -> Guard:
        return Guard(
            self._server.authentication.access,
            hosts,
            read_only=self._server.options.http_read_only,
            encrypted=encrypted or tls is not None,
            subject=tls.subject if tls is not None else "",
            common_name=tls.common_name if tls is not None else "",
        )

    async def handle_http(self, stream: trio.SocketStream, peer: str | None = None) -> None:
        """Serve one client of the HTTP listener; `peer` is its address if it is not the socket's."""
        try:
            await serve_connection(
                stream,
                self._plain_router,
                peer=peer,
                on_request=self._log_plain,
                poller=self._poller,
                bodies=self._bodies,
                guard=self._plain_guard,
            )
        except Exception:
            # A bug in the broker: it must not affect other clients.
            logger.exception("HTTP: internal error")

    async def handle_internal(self, stream: trio.SocketStream) -> None:
        """Serve another process of this node, which passes on requests with the tokens of its clients."""
        try:
            await serve_connection(
                stream,
                self._router,
                peer="",
                bodies=self._bodies,
                guard=self._guard(HostNames("*"), encrypted=True),
            )
        except Exception:
            logger.exception("HTTP: internal error")

    def _log_plain(self, request: Request, status: int, elapsed_s: float) -> None:
        if (request.method, request.path) in _UNLOGGED:  # first, as most are publishes
            return
        if isinstance(request, ForeignRequest):
            self._server.session_deps.wrong_ports.report(request.peer, request.spoken, "HTTP")
        else:
            log_unless_publish(request, status, elapsed_s)

    async def handle_https(self, stream: trio.SocketStream, peer: str | None = None) -> None:
        """Serve one client of the HTTPS listener; `peer` is its address if it is not the socket's."""
        # Here, because it is slow to import, and most brokers have no certificate.
        from ...tls.errors import TLSError
        from ...tls.session import TLSSession
        from ...tls.stream import TLSStream

        tls_context = self._server.session_deps.tls_context
        assert tls_context is not None  # without it there is no HTTPS listener
        peer = peer_of(stream) if peer is None else peer
        secure = TLSStream(stream, TLSSession(tls_context))
        try:
            with trio.fail_after(_HANDSHAKE_TIMEOUT_S):
                await secure.do_handshake()
            await serve_connection(
                secure,
                self._router,
                peer=peer,
                on_request=log_unless_publish,
                bodies=self._bodies,
                guard=self._guard(self.hosts, secure.session),
            )
        except trio.TooSlowError:
            logger.warning(
                "http: TLS handshake error from %s: not complete within %g s", peer, _HANDSHAKE_TIMEOUT_S
            )
        except (TLSError, trio.BrokenResourceError) as exc:
            logger.warning("http: TLS handshake error from %s: %s", peer, exc)
        except Exception:
            logger.exception("HTTPS: internal error")


def host_names(options: BrokerOptions, bound: BoundAddresses) -> Iterable[str]:
    """Return the names of a broker, besides those that every server has."""
    yield from options.http_allowed_hosts
    yield Broadcast.of(options, bound).address
    for address in (options.http_address, options.https_address):
        if not is_unix_path(address):
            yield host_of(address)


def log_unless_publish(request: Request, status: int, elapsed_s: float) -> None:
    """Log a request, unless it is a publish, or comes every few seconds: reports of jobs, polls of consoles."""
    if (request.method, request.path) in _UNLOGGED or request.path.startswith(_JOB_PATH):
        return
    is_poll = status == 200 and request.method == "GET" and request.path in _POLLED
    if not (is_poll and request.headers.get("user-agent", "").startswith(_CONSOLE)):
        log_request(logger, request, status, elapsed_s)


# ---------------------------------------------------------------------- routes

_OPEN = Rule(open=True)
_ANY_ROLE, _SEEN = Rule(), Rule(anonymous=True)
_PUBLISH = Rule("publish", "topic")
_READ_TOPIC, _READ_CHANNEL, _READ_ALL = Rule("read", "topic"), Rule("read", "channel"), Rule("read")
_MANAGE_TOPIC, _MANAGE_CHANNEL = Rule("manage", "topic"), Rule("manage", "channel")
_ADMIN, _REPLICATE = Rule("admin"), Rule("replicate")

_Handlers = dict[tuple[str, str], tuple[Rule, Callable[[Server, Request], Awaitable[Response]]]]

_HANDLERS: _Handlers = {
    ("GET", "/cluster"): (_READ_ALL, cluster.status),
    ("GET", "/cluster/member"): (_ANY_ROLE, cluster.member),
    ("POST", "/cluster/switch"): (_ADMIN, cluster.switch),
    ("POST", "/cluster/remove"): (_ADMIN, cluster.remove),
    ("POST", "/cluster/promote"): (_ADMIN, cluster.promote),
    ("GET", "/definitions"): (_ANY_ROLE, definitions.definitions),
    ("POST", "/topic/create"): (_MANAGE_TOPIC, topics.create_topic),
    ("POST", "/topic/delete"): (_MANAGE_TOPIC, topics.delete_topic),
    ("POST", "/topic/empty"): (_MANAGE_TOPIC, topics.empty_topic),
    ("POST", "/topic/pause"): (_MANAGE_TOPIC, partial(topics.pause_topic, paused=True)),
    ("POST", "/topic/unpause"): (_MANAGE_TOPIC, partial(topics.pause_topic, paused=False)),
    ("GET", "/topic/producer"): (_PUBLISH, topics.get_producer),
    ("POST", "/topic/producer/forget"): (_PUBLISH, topics.forget_producer),
    ("GET", "/topic/settings"): (_READ_TOPIC, topics.get_topic_settings),
    ("PUT", "/topic/settings"): (_MANAGE_TOPIC, topics.put_topic_settings),
    ("GET", "/topic/move"): (_MANAGE_TOPIC, moves.status),
    ("POST", "/topic/move/begin"): (_MANAGE_TOPIC, moves.begin),
    ("POST", "/topic/move/next"): (_MANAGE_TOPIC, moves.next_batch),
    ("POST", "/topic/move/end"): (_MANAGE_TOPIC, moves.end),
    ("GET", "/topic/read"): (_READ_TOPIC, read.read),
    ("GET", "/topic/bounds"): (_READ_TOPIC, read.bounds),
    ("POST", "/channel/create"): (_MANAGE_CHANNEL, topics.create_channel),
    ("POST", "/channel/delete"): (_MANAGE_CHANNEL, topics.delete_channel),
    ("POST", "/channel/empty"): (_MANAGE_CHANNEL, topics.empty_channel),
    ("POST", "/channel/pause"): (_MANAGE_CHANNEL, partial(topics.pause_channel, paused=True)),
    ("POST", "/channel/unpause"): (_MANAGE_CHANNEL, partial(topics.pause_channel, paused=False)),
    ("POST", "/channel/disconnect"): (_MANAGE_CHANNEL, topics.disconnect_consumers),
    ("GET", "/channel/settings"): (_READ_CHANNEL, topics.get_channel_settings),
    ("PUT", "/channel/settings"): (_MANAGE_CHANNEL, topics.put_channel_settings),
    ("GET", "/channel/peek"): (_READ_CHANNEL, backlog.peek),
    ("POST", "/channel/seek"): (_MANAGE_CHANNEL, backlog.seek),
    ("GET", "/channel/deferred"): (_READ_CHANNEL, backlog.deferred),
    ("GET", "/channel/deferred/counts"): (_READ_CHANNEL, backlog.deferred_counts),
    ("POST", "/channel/deferred/cancel"): (_MANAGE_CHANNEL, backlog.cancel),
    ("GET", "/dead_letters/messages"): (_READ_TOPIC, dead_letters.messages),
    ("POST", "/dead_letters/requeue"): (_MANAGE_TOPIC, dead_letters.requeue),
    ("POST", "/dead_letters/drop"): (_MANAGE_TOPIC, dead_letters.drop),
}
_IN_PIECES = {("GET", "/topic/read"), ("GET", "/channel/peek"), ("GET", "/channel/deferred")}
_DEBUG_HANDLERS: _Handlers = {
    ("GET", "/debug"): (_ADMIN, debug.index),
    ("GET", "/debug/tasks"): (_ADMIN, debug.tasks),
    ("GET", "/debug/profile"): (_ADMIN, debug.profile),
    ("GET", "/debug/memory"): (_ADMIN, debug.memory),
    ("POST", "/debug/freememory"): (_ADMIN, debug.free_memory),
    # nsqd's other endpoints.
    ("GET", "/debug/pprof"): (_ADMIN, debug.pprof),
    ("GET", "/debug/pprof/{profile}"): (_ADMIN, debug.pprof),
    ("POST", "/debug/pprof/{profile}"): (_ADMIN, debug.pprof),
    ("PUT", "/debug/setblockrate"): (_ADMIN, debug.pprof),
}


def metrics_rule(options: BrokerOptions) -> Rule:
    """Return who may read `/metrics`."""
    return _OPEN if options.http_open_metrics else _READ_ALL


def make_router(server: Server, bound: BoundAddresses) -> Router:
    """Build the broker's router."""
    return Router(broker_routes(server, bound))


def broker_routes(server: Server, bound: BoundAddresses) -> Iterator[Route]:
    """Build the broker's routes."""
    message, body = server.options.limits.max_msg_size, server.options.limits.max_body_size
    publishing, status, config = Publishing(server), Status(server, bound), Config(server, bound)
    # A count of dead letters waits for a disk, and `/stats` and `/metrics` must not wait for it.
    limiter, slow_limiter = AnswerLimiter(), AnswerLimiter()
    pieces = BodyMemoryLimit(late="it reads large messages too slowly")
    letters = partial(dead_letters.overview, server)
    of_members = {
        ("GET", "/cluster/replicate"): partial(cluster.replicate, server),
        ("GET", "/cluster/forward"): partial(cluster.forward, server, bound),
    }
    routes = [
        Route("GET", "/ping", status.ping, plain=True, rule=_OPEN),
        Route("GET", "/info", status.info, rule=_ANY_ROLE),
        Route("GET", "/access", status.access, rule=_ANY_ROLE),
        Route("GET", "/stats", status.stats, rule=_SEEN, limiter=limiter),
        Route(
            "GET", "/metrics", status.metrics, plain=True, rule=metrics_rule(server.options), limiter=limiter
        ),
        Route("GET", "/config/{opt}", config.get, rule=_ADMIN),
        Route("PUT", "/config/{opt}", config.put, message, "INVALID_VALUE", rule=_ADMIN),
        Route(
            "POST", "/pub", publishing.pub, message, "MSG_TOO_BIG", begin=publishing.begin_pub, rule=_PUBLISH
        ),
        Route(
            "POST", "/mpub", publishing.mpub, body, "BODY_TOO_BIG", begin=publishing.begin_mpub, rule=_PUBLISH
        ),
        Route("POST", "/hpub", publishing.hpub, body, "BODY_TOO_BIG", rule=_PUBLISH),
        Route("POST", "/channel/pub", publishing.channel_pub, message, "MSG_TOO_BIG", rule=_PUBLISH),
        Route("POST", "/topic/move/store", partial(moves.store, server), body, "BODY_TOO_BIG", rule=_PUBLISH),
        Route("GET", "/jobs", partial(jobs.list_jobs, server), rule=_ANY_ROLE, limiter=slow_limiter),
        Route("GET", "/dead_letters", letters, rule=_READ_TOPIC, limiter=slow_limiter),
        Route("PUT", "/jobs/{id}", partial(jobs.put_job, server), MAX_REPORT_BYTES, rule=_ANY_ROLE),
        *(
            Route(*place, partial(handler, server), rule=rule, pieces=pieces if place in _IN_PIECES else None)
            for place, (rule, handler) in _HANDLERS.items()
        ),
        *(
            Route(*place, partial(handler, server), plain=True, rule=rule)
            for place, (rule, handler) in _DEBUG_HANDLERS.items()
        ),
        *(
            Route(*place, handler, rule=_REPLICATE, upgrade=CLUSTER_PROTOCOL)
            for place, handler in of_members.items()
        ),
    ]
    answered = (replace(route, handler=partial(_answer, route.handler)) for route in routes)
    audit = server.authentication.access.audit
    return (audited(route, audit) for route in answered)


async def _answer(handler: Handler, request: Request) -> Response:
    """Call a handler, and turn errors of state, log and disk into NSQ's error responses."""
    try:
        return await handler(request)
    except PublishRefused as exc:
        raise refusal(exc) from exc
    except SettingsError as exc:
        raise HTTPError(400, f"INVALID_SETTING: {exc}") from exc
    except (BatchRefused, MoveRefused, OtherLog) as exc:
        raise HTTPError(409, str(exc)) from exc
    except DeletedError as exc:
        what = "CHANNEL" if "channel" in request.query else "TOPIC"
        raise HTTPError(404, f"{what}_NOT_FOUND") from exc
    except (SaveError, LogError, CutOff) as exc:
        raise HTTPError(503, str(exc)) from exc
