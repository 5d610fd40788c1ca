"""One HTTP connection, from its first request to its end."""

import socket

import trio

from ..protocol.address import format_peer
from ..reactor import Poller
from .connection import IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S, Bodies, Connection, OnRequest
from .parsing import RequestReader
from .polled import PolledConnection
from .routing import Router


async def serve_connection(
    stream: trio.abc.Stream,
    router: Router,
    *,
    peer: str | None = None,
    on_request: OnRequest | None = None,
    poller: Poller | None = None,
    bodies: Bodies | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
) -> None:
    """Serve one client until it leaves, breaks the rules or is too slow; none of that is an error.

    A handler that is running when this is cancelled is cancelled too; nothing is sent then.

    Args:
        stream: Closed at the end in every case.
        router: Who answers.
        peer: The client's address, for `Request.peer`; None: the stream's, if it is a socket.
        on_request: See `OnRequest`; None: not called.
        poller: Hears the client instead of the task that this is called in, if the stream is a socket; None: the
            task does.
        bodies: Gives large bodies room, for which the client waits; None: there is always room.
        idle_timeout_s: See `IDLE_TIMEOUT_S`. For a generated body, the time to accept one piece.
        request_timeout_s: See `REQUEST_TIMEOUT_S`.
    """
    reader = RequestReader(router, peer_of(stream) if peer is None else peer)
    connection: Connection
    if poller is None or not isinstance(stream, trio.SocketStream):
        connection = Connection(stream, reader, on_request, idle_timeout_s, request_timeout_s, bodies)
    else:
        # The plain socket can be used without a task switch; trio only waits for it.
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        connection = PolledConnection(
            stream, reader, on_request, idle_timeout_s, request_timeout_s, bodies, sock=sock, poller=poller
        )
    try:
        await connection.run()
    except trio.BrokenResourceError:
        pass  # the client has gone
    finally:
        # At once, for all has been said; and shielded, for a Cancelled raised here would take the place of an
        # exception on its way out.
        with trio.CancelScope(shield=True) as closing:
            closing.cancel()
            await stream.aclose()


def peer_of(stream: trio.abc.Stream) -> str:
    """The address of the client.

    Args:
        stream: Any stream.

    Returns:
        As `format_peer` puts it; `""` if the stream is not a socket, or the client has gone.
    """
    if not isinstance(stream, trio.SocketStream):
        return ""
    try:
        return format_peer(stream.socket.getpeername())
    except OSError:
        return ""
