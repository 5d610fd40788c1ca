"""The connection limit: each client needs a file descriptor, and logs need descriptors too."""

import logging
import resource
import socket
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import trio

from ..log import reasonable_limit
from ..protocol import CommandError
from ..protocol.frames import encode_error

logger: logging.Logger = logging.getLogger("trio_nsq.server.admission")

_OTHER_DESCRIPTORS = 64
"""Descriptors for listeners, discovery services, checkpoints, and clients that are being refused."""
_REFUSED_AT_ONCE = 32
"""Limit of clients being refused at the same time; further ones are closed without a refusal."""
_LINGER_S = 1.0
"""After a refusal, input is read and dropped for this long: a close with unread input may discard the refusal."""
_FEWEST = 16
"""Each listener accepts this many clients, however low the limit of open files is."""


def connection_limit(asked: int, listeners: int = 2, *, logs: bool = True) -> int:
    """Compute how many clients each listener accepts, so that descriptors remain for logs.

    Args:
        asked: `--max-connections`; 0 means as many as the limit of open files allows.
        listeners: Number of listeners; they share the descriptors evenly.
        logs: The server has logs of topics.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for_logs = reasonable_limit() if logs else 0
    possible = max(_FEWEST, (limit - for_logs - _OTHER_DESCRIPTORS) // listeners)
    if limit == resource.RLIM_INFINITY:
        possible = 2**31
    if asked > possible:
        logger.warning(
            "--max-connections is %d, but the limit of open files allows only %d. Raise that limit: ulimit -n",
            asked, possible,
        )  # fmt: skip
    return min(asked or possible, possible)


def tcp_refusal(most: int) -> bytes:
    """The error frame for a TCP client above the limit."""
    text = f"too many connections: {refusal_text(most, 'broker')}"
    return encode_error(CommandError("E_INVALID", text).wire)


def refusal_text(most: int, server: str) -> str:
    """The reason for a client above the limit."""
    return f"the {server} accepts {most} (--max-connections)"


def http_refusal(most: int, server: str = "broker") -> bytes:
    """The response for an HTTP client above the limit."""
    return http_unavailable(f"TOO_MANY_CONNECTIONS: {refusal_text(most, server)}")


def http_unavailable(message: str) -> bytes:
    """The response for an HTTP client whose request is not read; the message needs no escapes."""
    body = f'{{"message":"{message}"}}'.encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def https_refusal() -> bytes:
    """The TLS alert for an HTTPS client above the limit: `internal_error`, unencrypted.

    A response would need a handshake first, which costs the event loop more than a request.
    """
    return b"\x15\x03\x03\x00\x02\x02\x50"


class _Place:
    """That a client counts for the limit of its listener."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


_current_place: ContextVar[_Place] = ContextVar("place")


def leave_place() -> None:
    """Have the connection that this task serves count no longer, because another listener counts its client."""
    if (place := _current_place.get(None)) is not None:
        place.leave()


class Admission:
    """Limits the clients of one listener, and refuses those above the limit.

    Args:
        name: The listener's kind, for the log.
        handler: Serves a client: its stream, and what `handle` gets besides.
        refusal: Sent to a client above the limit, before its connection is closed.
        make_room: Ends the connection of a client that does nothing; returns whether there was one.
    """

    def __init__(
        self,
        name: str,
        most: int,
        handler: Callable[..., Coroutine[Any, Any, None]],
        refusal: bytes,
        *,
        make_room: Callable[[], bool] = bool,
    ) -> None:
        self._name = name
        self._most = most
        self._handler = handler
        self._refusal = refusal
        self._make_room = make_room
        self._connected = self._being_refused = 0
        self.refused_count: int = 0
        self._limit_logged = False  # reset when half of the connections are free

    def begin(
        self,
        begin: Callable[[socket.socket, str, Callable[[], None]], object],
        nursery: trio.Nursery,
        sock: socket.socket,
        peer: str,
    ) -> None:
        """Begin to serve a client, or refuse it. Unlike `handle`, this needs no task for each client.

        Args:
            begin: Serves a client: its socket, its address, and what it calls at the end. If it raises an error, the
                client counts no longer, and the caller gets the error.
            nursery: Runs the refusals.
        """
        place = self._take_place()
        if place is None:
            # Counted here: many clients may come before a task runs.
            if self._begin_refusal():
                nursery.start_soon(self._refuse, trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
            else:
                sock.close()
            return
        try:
            begin(sock, peer, place.leave)
        except BaseException:
            place.leave()
            raise

    async def handle(self, stream: trio.SocketStream, *about: str) -> None:
        """Serve a client, or refuse it."""
        place = self._take_place()
        if place is None:
            if self._begin_refusal():
                await self._refuse(stream)
            else:
                stream.socket.close()
            return
        before = _current_place.set(place)
        try:
            await self._handler(stream, *about)
        finally:
            _current_place.reset(before)
            place.leave()

    def _take_place(self) -> _Place | None:
        """Count a client; None: it is above the limit."""
        if self._connected >= self._most and not self._make_room():
            return None
        self._connected += 1
        return _Place(self._leave)

    def _leave(self) -> None:
        self._connected -= 1
        self._limit_logged &= self._connected > self._most // 2

    def _begin_refusal(self) -> bool:
        """Count a client above the limit. Returns False if it is to be closed without a refusal."""
        self.refused_count += 1
        if not self._limit_logged:
            self._limit_logged = True
            logger.error(
                "%s: %d clients are connected, the limit; further clients are refused. To raise it: --max-connections",
                self._name, self._connected,
            )  # fmt: skip
        if self._being_refused >= _REFUSED_AT_ONCE:
            return False  # keeps the remaining descriptors in a flood of refused clients
        self._being_refused += 1
        return True

    async def _refuse(self, stream: trio.SocketStream) -> None:
        """Send the refusal to a client that `_begin_refusal` has counted."""
        try:
            await refuse(stream, self._refusal)
        finally:
            self._being_refused -= 1


async def refuse(stream: trio.SocketStream, refusal: bytes) -> None:
    """Send a refusal to a client, and close its connection."""
    try:
        with trio.move_on_after(_LINGER_S):
            async with stream:
                await stream.send_all(refusal)
                await stream.send_eof()
                while await stream.receive_some(65536):
                    pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the client has closed
