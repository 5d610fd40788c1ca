"""Connections of the members of a cluster: the link of a follower, and clients that a follower passes on."""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ...coordination.interface import CoordinatorError
from ...http.messages import HTTPError, Request, Response, given, switching
from ...protocol.address import is_ip_peer
from ...server.admission import leave_place
from ...server.relay import relay
from ..addresses import BoundAddresses
from ..cluster_control import ClusterControl
from ..errors import ClusterRefusal
from ..server import Server

_NO_CLUSTER: Final = "NO_CLUSTER: this broker is not a member of a cluster; see --cluster"


async def status(server: Server, request: Request) -> Response:
    """Return the cluster and its members."""
    return Response.json(_control(server).status() | {"refuses_because": server.refuses_because})


async def member(server: Server, request: Request) -> Response:
    """Return this member; a follower answers this itself."""
    return Response.json(_control(server).member())


async def switch(server: Server, request: Request) -> Response:
    """Let another member lead. The broker stops soon after the answer."""
    try:
        return Response.json({"to": _control(server).switch(request.query.get("to", ""))})
    except ClusterRefusal as exc:
        raise HTTPError(409, f"REFUSED: {exc}") from exc


async def remove(server: Server, request: Request) -> Response:
    """Forget a member that is gone."""
    try:
        await _control(server).remove(given(request, "member"))
    except ClusterRefusal as exc:
        raise HTTPError(409, f"REFUSED: {exc}") from exc
    except CoordinatorError as exc:
        raise HTTPError(503, f"COORDINATOR: {exc}") from exc
    return Response.empty()


async def promote(server: Server, request: Request) -> Response:
    """Refuse to lead, because this member does already."""
    _control(server)
    raise HTTPError(409, "REFUSED: this member leads already")


def _control(server: Server) -> ClusterControl:
    replication = server.replication
    if replication is None or replication.control is None:
        raise HTTPError(404, _NO_CLUSTER)
    return replication.control


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
