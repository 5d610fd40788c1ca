"""Connections of the members of a cluster: the link of a follower, and clients that a follower passes on."""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ...http import HTTPError, Request, Response, given, switching
from ...protocol.address import is_ip_peer
from ...server.admission import leave_place
from ...server.relay import relay
from ..addresses import BoundAddresses
from ..server import Server

_NO_CLUSTER: Final = "NO_CLUSTER: this broker is not a member of a cluster; see --cluster"


async def replicate(server: Server, request: Request) -> Response:
    """Serve a follower."""
    replication = server.replication
    if replication is None:
        raise HTTPError(404, _NO_CLUSTER)
    server.members.record(request)
    return switching(server.members.until_revoked(request, replication.accept))


async def forward(server: Server, bound: BoundAddresses, request: Request) -> Response:
    """Serve a client of a follower as one of the same listener here."""
    listener = given(request, "listener")
    if listener not in ("tcp", "http", "https") or (listener == "https" and bound.https_address is None):
        raise HTTPError(400, "INVALID_ARG_LISTENER: it is tcp, http or https, and this broker must have it")
    client = request.query.get("client", "")
    if client and not is_ip_peer(client):
        raise HTTPError(400, "INVALID_ARG_CLIENT: it is not IP:PORT")
    if server.replication is None:
        raise HTTPError(404, _NO_CLUSTER)
    admission = server.admissions[listener.upper()]

    peer = client or request.peer

    async def take_over(stream: trio.abc.Stream) -> None:
        leave_place()
        await _with_socket(stream, lambda socket: admission.handle(socket, peer))

    return switching(server.members.until_revoked(request, take_over))


async def _with_socket(
    stream: trio.abc.Stream, handle: Callable[[trio.SocketStream], Awaitable[None]]
) -> None:
    """Handle a connection that needs a socket, which a stream with TLS is not."""
    if isinstance(stream, trio.SocketStream):
        await handle(stream)
        return
    ours, theirs = trio.socket.socketpair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay, stream, trio.SocketStream(ours))
        async with trio.SocketStream(theirs) as socket:
            await handle(socket)
