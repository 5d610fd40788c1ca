"""Listening at an address of a server's options: a TCP port, or a unix socket."""

import errno
import ipaddress
import socket
import stat
from pathlib import Path

import trio

from .protocol import NSQError
from .protocol.address import format_address

_BACKLOG = 1024


class StartupError(NSQError):
    """A server cannot start; the text says what is wrong and what to do, for the person who started it."""


def is_unix_path(address: str) -> bool:
    """Whether an address is the path of a unix socket: anything with a slash is."""
    return "/" in address


def port_of(address: str | None) -> int | None:
    """The port of an address; None if it has none, being a unix socket, or there is no address."""
    if not address or is_unix_path(address):
        return None
    return int(address.rpartition(":")[2])


def loopback_host(address: str) -> str | None:
    """The host of a bound address that nobody reaches but from this machine; None of any other."""
    if is_unix_path(address):
        return None
    host = address.rpartition(":")[0].strip("[]")
    return host if ipaddress.ip_address(host.partition("%")[0]).is_loopback else None


class Listening:
    """Open listeners of one address, until `close`.

    Attributes:
        listeners: For `trio.serve_listeners`; at least one.
        address: Where clients find them: `host:port`, or the path as it was given.
    """

    def __init__(self, listeners: list[trio.SocketListener], unix_path: str | None = None) -> None:
        self.listeners = listeners
        self._path = Path(unix_path) if unix_path is not None else None
        self.address = unix_path or format_address(*listeners[0].socket.getsockname()[:2])
        self._identity = _identity(self._path) if self._path is not None else None

    def close(self) -> None:
        """Listen no more. A unix socket's file goes, unless it has become another's meanwhile."""
        for listener in self.listeners:
            listener.socket.close()
        try:
            if self._path is not None and _identity(self._path) == self._identity:
                self._path.unlink()
        except OSError:
            pass  # somebody has taken it away; or if not, the next start removes it


async def listen(flag: str, address: str) -> Listening:
    """Begin to listen.

    Args:
        flag: The option the address comes from, for errors.
        address: `host:port`, port 0 picking a free one and no host meaning all interfaces; or anything with a slash
            in it, the path of a unix socket. A socket file that nobody listens at any more is replaced.

    Raises:
        StartupError: That cannot be.
    """
    if is_unix_path(address):
        return _listen_at_path(flag, address)
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise StartupError(f"{flag}: {address} is neither host:port nor the path of a unix socket")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None, backlog=_BACKLOG)
    except OSError as exc:
        raise StartupError(f"{flag}: cannot listen on {address}: {exc.strerror or exc}") from exc
    return Listening(listeners)


def _listen_at_path(flag: str, path: str) -> Listening:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _remove_stale(flag, path)
        # As nsqd: the mode is what the umask leaves, by default 0755, which lets only the owner connect.
        sock.bind(path)
        sock.listen(_BACKLOG)
        return Listening([trio.SocketListener(trio.socket.from_stdlib_socket(sock))], path)
    except BaseException as exc:
        sock.close()
        if isinstance(exc, OSError):
            raise StartupError(f"{flag}: cannot listen on {path}: {exc.strerror or exc}") from exc
        raise


def _remove_stale(flag: str, path: str) -> None:
    """Remove the socket file of a server that was killed, if there is one. Raises OSError, StartupError."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{flag}: {path} is there already, and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # it would wait for a listener whose backlog is full
        error = probe.connect_ex(path)
    if error == errno.ECONNREFUSED:
        Path(path).unlink()
    elif error in (0, errno.EAGAIN):
        raise StartupError(f"{flag}: {path} is in use by another program")


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
