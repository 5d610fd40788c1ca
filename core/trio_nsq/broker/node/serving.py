"""Serves the shared ports of a node, and the other processes of it, in one broker."""

import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import trio

from ...access.access import Access
from ...server.admission import Admission, http_refusal, https_refusal, tcp_refusal
from ..addresses import BoundAddresses
from ..api.server import HTTPServer
from ..server import Server
from ..session.shared_subscription import PREAMBLE_BYTES
from ..siblings import Kind, Siblings
from .front import Front
from .shared_listener import SharedListener

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_PREAMBLE_S: Final = 5.0


class NodeServing:
    """Accepts the clients that this broker has as a process of a node.

    Args:
        most: How many clients each listener accepts.
    """

    def __init__(self, siblings: Siblings, server: Server, http_server: HTTPServer, most: int) -> None:
        self._siblings = siblings
        self._server = server
        addresses = {kind: listening.address for kind, listening in siblings.shared.items()}
        shared = BoundAddresses(addresses["TCP"], addresses.get("HTTP"), addresses.get("HTTPS"))
        front = Front(siblings, server, shared)
        self._http = http = HTTPServer(server, shared, front.router)
        open_options = replace(server.options, tls_required="false", tls_client_auth_policy="")
        # The process that has accepted the client has checked what it may do, and has TLS with it.
        self._open_deps = replace(server.session_deps, options=open_options, access=Access())
        self._admissions: dict[Kind, Admission] = {
            "TCP": Admission(
                "TCP", most, partial(server.sessions.handle, siblings=siblings), tcp_refusal(most)
            ),
            "HTTP": Admission("HTTP", most, http.handle_http, http_refusal(most)),
            "HTTPS": Admission("HTTPS", most, http.handle_https, https_refusal()),
        }
        server.admissions |= {f"shared {kind}": self._admissions[kind] for kind in siblings.shared}
        self._internal: dict[Kind, Callable[[trio.SocketStream], Coroutine[Any, Any, None]]] = {
            "TCP": self._serve_sibling,
            "HTTP": http_server.handle_internal,
        }

    async def run(self, workers: trio.Nursery) -> None:
        """Accept clients until cancelled; `workers` serves them."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._http.hosts.learn_own_name)
            for listener, handler in self._listeners():
                nursery.start_soon(
                    partial(trio.serve_listeners, handler_nursery=workers), handler, [listener]
                )

    def _listeners(
        self,
    ) -> Iterator[
        tuple[trio.abc.Listener[trio.SocketStream], Callable[[trio.SocketStream], Coroutine[Any, Any, None]]]
    ]:
        for kind, listening in self._siblings.shared.items():
            for each in listening.listeners:
                yield SharedListener(each, partial(self._waits_s, kind)), partial(self._count, kind)
        for kind, listening in self._siblings.internal.items():
            for each in listening.duplicate().listeners:
                yield each, self._internal[kind]

    def _waits_s(self, kind: Kind) -> float:
        return self._siblings.waits_s(kind, draining=self._server.broker.draining)

    async def _count(self, kind: Kind, stream: trio.SocketStream) -> None:
        """Serve a client of a shared port, and count it meanwhile."""
        counts, index = self._siblings.counts, self._siblings.index
        counts.add(kind, index, 1)
        try:
            await self._admissions[kind].handle(stream)
        finally:
            counts.add(kind, index, -1)

    async def _serve_sibling(self, stream: trio.SocketStream) -> None:
        """Serve the subscription of a client that another process passes on."""
        preamble = bytearray()
        with trio.move_on_after(_PREAMBLE_S):
            try:
                while len(preamble) < PREAMBLE_BYTES:
                    data = await stream.receive_some(PREAMBLE_BYTES - len(preamble))
                    if not data:
                        break
                    preamble += data
            except trio.BrokenResourceError:
                pass
        if len(preamble) < PREAMBLE_BYTES:
            await stream.aclose()
            return
        peer = preamble.decode(errors="replace").strip()
        await self._server.sessions.handle(stream, peer, deps=self._open_deps)
