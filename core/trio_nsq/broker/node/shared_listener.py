"""A listener that several processes accept from."""

import errno
import os
import socket
from collections.abc import Callable

import trio

_OF_CLIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EPROTO,
        errno.EPERM,
        errno.ETIMEDOUT,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
    }
)
"""Another process has taken the client, or its connection is lost: accept(2) returns errors of the network, too."""


class SharedListener(trio.abc.Listener[trio.SocketStream]):
    """Accepts clients that no other process has taken.

    Args:
        listener: Its descriptor is duplicated.
        waits_s: Returns how long to leave a client to the other processes.
    """

    def __init__(self, listener: trio.SocketListener, waits_s: Callable[[], float]) -> None:
        self._socket = socket.socket(fileno=os.dup(listener.socket.fileno()))
        self._socket.setblocking(False)
        self._waits_s = waits_s

    async def accept(self) -> trio.SocketStream:
        """Wait for a client. Raises OSError: as `socket.accept`."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            if seconds := self._waits_s():
                await trio.sleep(seconds)
            try:
                client, _ = self._socket.accept()
            except OSError as exc:
                if exc.errno not in _OF_CLIENT:
                    raise
                continue
            return trio.SocketStream(trio.socket.from_stdlib_socket(client))

    async def aclose(self) -> None:
        """Close this descriptor."""
        self._socket.close()
        await trio.lowlevel.checkpoint()
