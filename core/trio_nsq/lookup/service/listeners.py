"""The two listeners of the discovery service: TCP for brokers, HTTP for consumers and administrators."""

import logging
from collections.abc import Iterable
from functools import partial

import trio

from ...access.access import Access
from ...http.guard import Guard
from ...http.routing import Router, TLSRequiredRouter
from ...http.serving import log_request, peer_of, serve_connection
from ...http.web_pages import HostNames
from ...protocol.address import host_of
from ...tls.accepting import Acceptor, NotAccepted
from ..protocol import PeerInfo
from .broker_connection import GREETING_TIMEOUT_S, BrokerConnection
from .http_api import make_router
from .options import LookupdOptions
from .registry import Registry

logger: logging.Logger = logging.getLogger("trio_nsq.lookup")


class Listeners:
    """Serves the clients of both listeners, over TLS and in plain text.

    Args:
        info: The response to IDENTIFY.
        hosts: Names by which HTTP clients may address the service, besides those that every server has.

    Attributes:
        hosts: All these names.
    """

    def __init__(
        self,
        options: LookupdOptions,
        registry: Registry,
        info: PeerInfo,
        access: Access,
        acceptor: Acceptor,
        hosts: Iterable[str],
    ) -> None:
        self._options = options
        self._registry = registry
        self._info = info
        self._access = access
        self._acceptor = acceptor
        self.hosts: HostNames = HostNames(hosts)
        self._brokers: set[BrokerConnection] = set()
        self._silence_s = max(GREETING_TIMEOUT_S, 2 * options.inactive_producer_timeout_ms / 1000)
        self._router = make_router(registry, access.audit, read_only=options.http_read_only)
        self._plain_router: Router = self._router
        if options.tls.required:
            self._plain_router = TLSRequiredRouter(info.http_port)

    async def handle_broker(self, stream: trio.SocketStream) -> None:
        """Serve one client of the TCP listener."""
        peer = peer_of(stream)
        async with stream:
            try:
                secure = await self._acceptor.accept(stream, host_of(peer))
                async with secure:
                    encrypted = not isinstance(secure, trio.SocketStream)
                    connection = BrokerConnection(
                        secure,
                        peer,
                        self._registry,
                        self._info,
                        access=self._access,
                        subject="" if isinstance(secure, trio.SocketStream) else secure.session.subject,
                        silence_s=self._silence_s,
                        refuses_plain_text=self._options.tls.required and not encrypted,
                    )
                    self._brokers.add(connection)
                    try:
                        await connection.serve()
                    finally:
                        self._brokers.remove(connection)
            except (NotAccepted, trio.BrokenResourceError) as exc:
                logger.warning("TCP: client(%s): %s", peer, exc)
            except Exception:
                # A bug must not affect the other clients.
                logger.exception("TCP: client(%s): internal error", peer)

    async def handle_http(self, stream: trio.SocketStream) -> None:
        """Serve one client of the HTTP listener."""
        peer = peer_of(stream)
        async with stream:
            try:
                secure = await self._acceptor.accept(stream, host_of(peer))
                plain = isinstance(secure, trio.SocketStream)
                await serve_connection(
                    secure,
                    self._plain_router if plain else self._router,
                    peer=peer,
                    on_request=partial(log_request, logger),
                    guard=Guard(
                        self._access,
                        self.hosts,
                        read_only=self._options.http_read_only,
                        encrypted=not plain,
                        subject="" if isinstance(secure, trio.SocketStream) else secure.session.subject,
                    ),
                )
            except (NotAccepted, trio.BrokenResourceError) as exc:
                logger.warning("HTTP: client(%s): %s", peer, exc)
            except Exception:
                # A bug must not affect the other clients.
                logger.exception("HTTP: internal error")

    def renew_identities(self) -> int:
        """End the connections of brokers whose token or certificate was revoked or has expired; return their number."""
        return sum(not connection.renew() for connection in list(self._brokers))
