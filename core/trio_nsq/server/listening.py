"""Listeners for the addresses in a server's options: a TCP port, or a unix socket."""

import errno
import ipaddress
import logging
import socket
import stat
from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import trio

from ..protocol.address import format_address, is_unix_path
from ..protocol.errors import StartupError

logger: logging.Logger = logging.getLogger("trio_nsq.server.listening")

_OVERLOADED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
_OVERLOADED_S = 0.1
_BACKLOG = 1024
_IN_USE = ". Another server may be running: stop it, or choose another {flag}"


def port_of(address: str | None) -> int | None:
    """Return the port of an address; None for a unix socket or without an address."""
    if not address or is_unix_path(address):
        return None
    return int(address.rpartition(":")[2])


def loopback_host(address: str) -> str | None:
    """Return the host of a bound loopback address; None for any other address."""
    if is_unix_path(address):
        return None
    host = address.rpartition(":")[0].strip("[]")
    return host if ipaddress.ip_address(host.partition("%")[0]).is_loopback else None


def is_exposed(address: str) -> bool:
    """Whether clients on other machines can reach a bound address."""
    return not is_unix_path(address) and loopback_host(address) is None


class Listening:
    """The open listeners of one address.

    Attributes:
        listeners: For `trio.serve_listeners`; at least one.
        address: The address for clients: `host:port`, or the path as configured.
    """

    def __init__(self, listeners: list[trio.SocketListener], unix_path: str | None = None) -> None:
        self.listeners = listeners
        self._path = Path(unix_path) if unix_path is not None else None
        self.address: str = unix_path or format_address(*listeners[0].socket.getsockname()[:2])
        self._identity = _identity(self._path) if self._path is not None else None

    def duplicate(self) -> "Listening":
        """Return the same listeners with descriptors of their own: when they are closed, these stay open."""
        duplicate = copy(self)
        duplicate.listeners = [trio.SocketListener(each.socket.dup()) for each in self.listeners]
        duplicate._path = None
        return duplicate

    def close(self) -> None:
        """Close the listeners. Remove the file of a unix socket, unless another program has replaced it."""
        for listener in self.listeners:
            listener.socket.close()
        try:
            if self._path is not None and _identity(self._path) == self._identity:
                self._path.unlink()
        except OSError:
            pass  # it is already removed; if not, the next start removes it


async def serve_sockets(
    handle: Callable[[trio.SocketStream], Coroutine[Any, Any, None]],
    listeners: Sequence[trio.SocketListener],
    nursery: trio.Nursery,
) -> None:
    """Run `handle`, which closes its stream, in the nursery for each client; runs until cancelled.

    `trio.serve_listeners` closes the streams as well, and keeps them: for thousands of clients, that is 40 % of the
    processor time of a stop.
    """
    async with trio.open_nursery() as accepting:
        for listener in listeners:
            accepting.start_soon(_accept, handle, listener, nursery)


async def _accept(
    handle: Callable[[trio.SocketStream], Coroutine[Any, Any, None]],
    listener: trio.SocketListener,
    nursery: trio.Nursery,
) -> None:
    async with listener:
        while True:
            try:
                stream = await listener.accept()
            except OSError as exc:
                if exc.errno not in _OVERLOADED:
                    raise
                logger.error("cannot accept a client: %s; retrying in %g s", exc.strerror, _OVERLOADED_S)
                await trio.sleep(_OVERLOADED_S)
            else:
                nursery.start_soon(handle, stream)
                del stream


async def listen(flag: str, address: str) -> Listening:
    """Open the listeners of an address.

    Args:
        flag: The option that sets the address, for errors.
        address: `host:port` (port 0 picks a free port, no host means all interfaces), or the path of a unix socket
            (see `is_unix_path`). A stale socket file is replaced.

    Raises:
        StartupError: The address is invalid or cannot be bound.
    """
    if is_unix_path(address):
        return _listen_at_path(flag, address)
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise StartupError(f"{flag}: {address} is neither host:port nor the path of a unix socket")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None, backlog=_BACKLOG)
    except OSError as exc:
        hint = _IN_USE.format(flag=flag) if exc.errno == errno.EADDRINUSE else ""
        raise StartupError(f"{flag}: cannot listen on {address}: {exc.strerror or exc}{hint}") from exc
    return Listening(listeners)


def _listen_at_path(flag: str, path: str) -> Listening:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _remove_stale(flag, path)
        # As nsqd, the umask sets the mode: 0755 by default, so only the owner can connect.
        sock.bind(path)
        sock.listen(_BACKLOG)
        return Listening([trio.SocketListener(trio.socket.from_stdlib_socket(sock))], path)
    except BaseException as exc:
        sock.close()
        if isinstance(exc, OSError):
            raise StartupError(f"{flag}: cannot listen on {path}: {exc.strerror or exc}") from exc
        raise


def _remove_stale(flag: str, path: str) -> None:
    """Remove the socket file of a killed server, if there is one. Raises OSError, StartupError."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{flag}: {path} already exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # it would wait for a listener whose backlog is full
        error = probe.connect_ex(path)
    if error == errno.ECONNREFUSED:
        Path(path).unlink()
    elif error in (0, errno.EAGAIN):
        raise StartupError(f"{flag}: {path} is in use{_IN_USE.format(flag=flag)}")


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
