"""The broker's HTTP and HTTPS connections: who answers them, over TLS or not, and what is logged of them."""

import json
import logging
from typing import TYPE_CHECKING

import trio

from ...http import Request, Response, Route, Router, peer_of, request_log, serve_connection
from ...listening import port_of
from ..addresses import BoundAddresses
from .endpoints import make_router

if TYPE_CHECKING:
    from ..server import Server

logger = logging.getLogger("trio_nsq.broker")

_HANDSHAKE_TIMEOUT_S = 5.0
"""As nsqd allows TCP clients."""
_UNLOGGED = {("POST", "/pub"), ("POST", "/mpub")}


class HTTPServer:
    """Serves HTTP clients.

    Args:
        server: The broker.
        bound: Where it listens.
    """

    def __init__(self, server: "Server", bound: BoundAddresses) -> None:
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
                stream, self._plain_router, on_request=log_request, poller=self._poller, bodies=self._bodies
            )
        except Exception:
            # A mistake of ours: it must not reach the other clients.
            logger.exception("HTTP: internal error")

    async def handle_https(self, stream: trio.SocketStream) -> None:
        """Serve one client of the HTTPS listener."""
        from ..session.tls import (
            TLSError,
            TLSStream,
        )  # takes a while to be imported, and few brokers have a certificate

        tls_context = self._server.services.tls_context
        assert tls_context is not None  # without it nobody listens
        peer = peer_of(stream)
        secure = TLSStream(stream, tls_context)
        try:
            with trio.fail_after(_HANDSHAKE_TIMEOUT_S):
                await secure.do_handshake()
            await serve_connection(
                secure, self._router, peer=peer, on_request=log_request, bodies=self._bodies
            )
        except trio.TooSlowError:
            logger.warning("http: TLS handshake error from %s: it took too long", peer)
        except (TLSError, trio.BrokenResourceError) as exc:
            logger.warning("http: TLS handshake error from %s: %s", peer, exc)
        except Exception:
            logger.exception("HTTPS: internal error")


class TLSRequiredRouter(Router):
    """Sends every request to HTTPS, in the words that NSQ's HTTP clients understand.

    Args:
        https_port: Where; 0 if there is none.
    """

    def __init__(self, https_port: int) -> None:
        super().__init__([])
        # With the blanks that nsqd sends.
        body = json.dumps({"message": "TLS_REQUIRED", "https_port": https_port})
        self._answer = Response(403, body.encode(), "application/json; charset=utf-8")

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        """The same for every request."""
        return self._answer


def log_request(request: Request, status: int, elapsed_s: float) -> None:
    """Log a request, unless it is a publish."""
    if (request.method, request.path) not in _UNLOGGED:
        request_log.log_request(logger, request, status, elapsed_s)
