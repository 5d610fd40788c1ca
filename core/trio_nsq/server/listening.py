"""Listeners for the addresses in a server's options: a TCP port, or a unix socket."""

import errno
import ipaddress
import logging
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TypeAlias

import trio

from ..event_loop.reactor import RESTING, PolledEndpoint, Poller
from ..protocol.address import format_address, format_peer, host_of, is_unix_path
from ..protocol.errors import StartupError

logger: logging.Logger = logging.getLogger("trio_nsq.server.listening")

_RETRY_S = 0.1
"""Until then, a client may have freed its file descriptor or its memory."""
_LOST = {
    *(errno.ECONNABORTED, errno.ECONNRESET, errno.EPERM, errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP),
    *(errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET),
}
"""Errors of one connection, which Linux reports at its accept."""
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16
"""So many clients are accepted before others are served."""
_UNSENT_BYTES = 16 * 1024
"""As of trio's streams: the kernel accepts no more while so much is not sent, so a client that does not read is noticed
early."""
_IN_USE = ". Another server may be running: stop it, or choose another {flag}"
_HINTS = {
    errno.EADDRINUSE: _IN_USE,
    errno.EADDRNOTAVAIL: ". This machine does not have the address: use one of its own, or 0.0.0.0:{port} for all",
    errno.EACCES: ". Ports below 1024 need root or CAP_NET_BIND_SERVICE: choose another {flag}",
}


def port_of(address: str | None) -> int | None:
    """Return the port of an address; None for a unix socket or without an address."""
    if not address or is_unix_path(address):
        return None
    return int(address.rpartition(":")[2])


def loopback_host(address: str) -> str | None:
    """Return the host of a bound loopback address; None for any other address."""
    if is_unix_path(address):
        return None
    host = host_of(address)
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


Begin: TypeAlias = Callable[[socket.socket, str], object]
"""Begins to serve a client: its non-blocking socket, and its address."""


async def accept_clients(begin: Begin, listeners: Sequence[trio.SocketListener], poller: Poller) -> None:
    """Call `begin` in the poller for each client; runs until cancelled.

    `trio.serve_listeners` runs a task for each client. With thousands of them, that is most of the processor time of a
    start and of a stop.
    """
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            sock = socket.socket(fileno=listener.socket.detach())
            nursery.start_soon(_PolledListener(sock, poller, begin).run)


class _PolledListener(PolledEndpoint):
    """A listener from which the poller accepts clients: their first commands often arrive in the same round."""

    def __init__(self, sock: socket.socket, poller: Poller, begin: Begin) -> None:
        super().__init__(sock, poller)
        self._begin = begin
        self._is_tcp = sock.family != socket.AF_UNIX
        self._failed = trio.Event()

    async def run(self) -> None:
        """Have the poller accept clients, until cancelled."""
        with self._sock as sock:
            sock.setblocking(False)
            self.start_polling()
            self.rest()
            try:
                while True:
                    await self._failed.wait()
                    await trio.sleep(_RETRY_S)
                    self._failed = trio.Event()
                    self._poller.poll_again(sock.fileno())
            finally:
                self.stop_polling()

    def serve(self) -> bool:
        """Accept the clients that are there. Returns True if there may be more."""
        if self._failed.is_set() or self.state is not RESTING:  # or it was closed after it was queued
            return False
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return False
            except OSError as exc:
                if exc.errno in _LOST:
                    continue
                logger.error("cannot accept a client: %s; retrying in %g s", exc.strerror, _RETRY_S)
                self._failed.set()
                return False
            sock.setblocking(False)
            if self._is_tcp:
                with suppress(OSError):  # the client has disconnected already
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            try:
                self._begin(sock, format_peer(address))
            except Exception:
                # A bug, or the kernel refuses to watch the socket: it must not affect other clients.
                logger.exception("a client cannot be served: internal error")
                sock.close()
        return True


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
        hint = _HINTS.get(exc.errno or 0, "").format(flag=flag, port=port)
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
