"""Accepts TLS and plain text on one port."""

import socket
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import trio

from ..protocol import NSQError
from .errors import TLSError
from .stream import TLSStream

if TYPE_CHECKING:
    from .session import ServerContext, TLSSession

FIRST_BYTE_TIMEOUT_S = 60.0
HANDSHAKE_TIMEOUT_S = 5.0
"""nsqd's limit."""
HANDSHAKES_PER_HOST = 16
"""Handshakes of one client host at the same time; others of that host wait. A handshake costs the server more than the
client, so one host must not fill the event loop with them."""

_HANDSHAKE_RECORD = b"\x16"
"""The first byte of every TLS client (RFC 8446 5.1). NSQ's protocols begin with a blank, HTTP with a letter."""


class NotAccepted(NSQError):
    """The client sent nothing in time, or the TLS handshake failed. The text is the reason."""


class Acceptor:
    """Starts TLS for the clients that begin with it, and leaves the others in plain text.

    Attributes:
        context: For new TLS sessions; None: TLS is not offered. It may be replaced at any time.
    """

    def __init__(self, context: "ServerContext | None") -> None:
        self.context = context
        # By client host; only those in use.
        self._turns: WeakValueDictionary[str, trio.CapacityLimiter] = WeakValueDictionary()

    async def accept(
        self, stream: trio.SocketStream, host: str
    ) -> "trio.SocketStream | TLSStream[TLSSession]":
        """Return the stream to use. The caller closes it, or the given stream after an error.

        Args:
            host: The client's address without the port.

        Raises:
            NotAccepted, trio.BrokenResourceError: Nothing can be sent to the client.
        """
        if self.context is None:
            return stream
        try:
            with trio.fail_after(FIRST_BYTE_TIMEOUT_S):
                first = await stream.socket.recv(1, socket.MSG_PEEK)
        except trio.TooSlowError:
            raise NotAccepted(f"nothing received within {FIRST_BYTE_TIMEOUT_S:g} s") from None
        except OSError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc
        return await self.shake_hands(stream, host) if first == _HANDSHAKE_RECORD else stream

    async def shake_hands(self, stream: trio.SocketStream, host: str) -> "TLSStream[TLSSession]":
        """Start TLS. As `accept`, for a listener without plain text; there must be a context."""
        from .session import TLSSession  # imports OpenSSL

        assert self.context is not None  # the caller has checked it
        secure = TLSStream(stream, TLSSession(self.context))
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                async with self._turns.setdefault(host, trio.CapacityLimiter(HANDSHAKES_PER_HOST)):
                    await secure.do_handshake()
        except trio.TooSlowError:
            raise NotAccepted(f"no TLS handshake within {HANDSHAKE_TIMEOUT_S:g} s") from None
        except TLSError as exc:
            raise NotAccepted(f"the TLS handshake failed: {exc}") from exc
        return secure
