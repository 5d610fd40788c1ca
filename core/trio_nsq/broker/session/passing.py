"""Passes a client of a shared port on to the process that has to serve it."""

import socket

import trio

from ...protocol.address import parse_address
from ...server.relay import relay


async def pass_on(client: socket.socket, address: str, opening: bytes) -> None:
    """Pass a client on, until its connection ends.

    Args:
        client: Its socket, which the caller closes.
        address: The TCP address of the other process.
        opening: What the client has sent.
    """
    try:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(client.dup()))
        async with stream, await trio.open_tcp_stream(*parse_address(address)) as server:
            await server.send_all(opening)
            await relay(stream, server)
    except (OSError, trio.BrokenResourceError):
        pass  # it connects again, as after the end of a broker
