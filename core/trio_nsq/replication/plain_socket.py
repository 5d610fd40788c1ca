"""A plain socket for any stream, so that a link needs one way to send and receive."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

_COPY_BYTES = 256 * 1024


@asynccontextmanager
async def plain_socket(stream: trio.abc.Stream) -> AsyncIterator[socket.socket]:
    """Have a non-blocking socket that sends and receives what the stream does, in the block.

    It is the stream's own socket, or, of a stream with TLS, one end of a pair whose other end two tasks copy. Nothing
    else may use the stream meanwhile.
    """
    if isinstance(stream, trio.SocketStream):
        with socket.socket(fileno=os.dup(stream.socket.fileno())) as sock:
            yield sock
        return
    error: Exception | None = None
    near, far = socket.socketpair()
    near.setblocking(False)
    with near:
        async with (
            trio.SocketStream(trio.socket.from_stdlib_socket(far)) as end,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_copy, stream, end, end)
            nursery.start_soon(_copy, end, stream, end)
            try:
                yield near
            except Exception as exc:
                error = exc  # raised below, outside of the nursery, which would make a group of it
            nursery.cancel_scope.cancel()
    if error is not None:
        raise error


async def _copy(source: trio.abc.Stream, sink: trio.abc.Stream, end: trio.SocketStream) -> None:
    """Copy until one side ends; then end the pair of sockets."""
    try:
        while data := await source.receive_some(_COPY_BYTES):
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        try:
            end.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end is closed already
