"""How many clients may be connected: each costs a descriptor, and logs need descriptors, too."""

import logging
import resource
from collections.abc import Callable, Coroutine
from typing import Any

import trio

from ..log import reasonable_limit
from ..protocol import CommandError, encode_error

logger = logging.getLogger("trio_nsq.broker")

_OTHER_DESCRIPTORS = 64
"""For listeners, discovery services, state that is being saved, and clients that are being refused."""
_REFUSED_AT_ONCE = 32
_LINGER_S = 1.0
"""What a refused client sends is read for so long: closing with unread input can overtake the refusal."""
_FEWEST = 16


def possible_connections(listeners: int) -> int:
    """How many clients of each of so many listeners have a descriptor each, besides those that logs need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 2**31
    return max(_FEWEST, (limit - reasonable_limit() - _OTHER_DESCRIPTORS) // listeners)


def connection_limit(asked: int, listeners: int = 2) -> int:
    """How many each listener may have where `--max-connections` asks for so many; 0: as many as are possible."""
    possible = possible_connections(listeners)
    if asked > possible:
        logger.warning(
            "--max-connections is %d, but the process may open files for %d only. Raise the limit: ulimit -n",
            asked, possible,
        )  # fmt: skip
    return min(asked or possible, possible)


def tcp_refusal(most: int) -> bytes:
    """What a client over TCP is sent that is one too many."""
    text = f"too many connections: the broker accepts {most} (--max-connections)"
    return encode_error(CommandError("E_INVALID", text).wire)


def http_refusal(most: int) -> bytes:
    """What a client over HTTP is sent that is one too many."""
    body = b'{"message":"TOO_MANY_CONNECTIONS: the broker accepts %d (--max-connections)"}' % most
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def https_refusal() -> bytes:
    """What a client over HTTPS is sent that is one too many: the TLS alert `internal_error`, not encrypted.

    An answer in words would need a handshake first, which costs the event loop more than a request.
    """
    return b"\x15\x03\x03\x00\x02\x02\x50"


class Admission:
    """Lets so many clients of one kind in, and tells the others that there are too many.

    Args:
        name: The kind, for the log.
        most: So many at a time.
        handler: Serves one.
        refusal: Sent to those who are too many, before they are closed.

    Attributes:
        refused_count: Clients refused so far.
    """

    def __init__(
        self,
        name: str,
        most: int,
        handler: Callable[[trio.SocketStream], Coroutine[Any, Any, None]],
        refusal: bytes,
    ) -> None:
        self._name = name
        self._most = most
        self._handler = handler
        self._refusal = refusal
        self._connected = self._being_refused = 0
        self.refused_count = 0
        self._told = False  # in the log, since there was room

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve a client, or refuse it."""
        if self._connected >= self._most:
            await self._refuse(stream)
            return
        self._connected += 1
        try:
            await self._handler(stream)
        finally:
            self._connected -= 1
            self._told &= self._connected > self._most // 2

    async def _refuse(self, stream: trio.SocketStream) -> None:
        self.refused_count += 1
        if not self._told:
            self._told = True
            logger.error(
                "%s: %d clients are connected, and no more are accepted; see --max-connections",
                self._name, self._connected,
            )  # fmt: skip
        if self._being_refused >= _REFUSED_AT_ONCE:
            stream.socket.close()  # they are many: what is left of descriptors is not for them
            return
        self._being_refused += 1
        try:
            with trio.move_on_after(_LINGER_S):
                async with stream:
                    await stream.send_all(self._refusal)
                    await stream.send_eof()
                    while await stream.receive_some(65536):
                        pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has gone
        finally:
            self._being_refused -= 1
