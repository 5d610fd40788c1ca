"""A client's socket, and what IDENTIFY lays over it: TLS, and compression inside that."""

import socket
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import trio

from ...protocol import CommandError
from ...protocol.compression import Codec
from ...reactor import SendBuffer

if TYPE_CHECKING:
    from OpenSSL import SSL

    from .tls import TLSSession

HANDSHAKE_TIMEOUT_S = 5.0
RECEIVE_BYTES = 64 * 1024
LARGE_RECEIVE_BYTES = 256 * 1024
"""For the rest of a large body. A buffer of this size for each read would cost those more who have little to say."""
_LINGER_S = 1.0
_LINGER_BYTES = 16 * 1024 * 1024


class Transport:
    """Both directions of one connection.

    Attributes:
        sock: Non-blocking; For `recv`; what it gives goes through `decode`.
        tls: The session, if there is one.
        bare: Neither TLS nor compression is there.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.send_buffer = SendBuffer(sock)
        self.tls: TLSSession | None = None
        self.bare = True
        self._codecs: list[Codec] = []  # what is received goes through the first of them first

    def decode(self, data: bytes) -> Iterator[bytes]:
        """What was received, as the client meant it, in pieces; with b"", what the layers still have of it.

        Raises NSQError: it is not what was negotiated; the pieces before it are good.
        """
        pieces: Iterator[bytes] = iter((data,))
        for codec in self._codecs:
            pieces = chain.from_iterable(map(codec.decode, pieces))
        yield from pieces
        if self.tls is not None and (said := self.tls.outgoing()):
            self.send_buffer.put_encoded(said)
            self.send_buffer.flush()

    @property
    def ended(self) -> bool:
        """The client has ended a layer, and so the connection."""
        return any(codec.ended for codec in self._codecs)

    def add_codec(self, codec: Codec) -> None:
        """Lay another layer inside those that there are, from here on in both directions."""
        self._codecs.append(codec)
        self.bare = False
        self.send_buffer.add_codec(codec)

    async def start_tls(self, context: "SSL.Context", received: bytes) -> None:
        """Come to a TLS session with the client; what comes with the end of the handshake `decode` gives.

        `received` has come of the client's half of the handshake already. Raises CommandError: `E_IDENTIFY_FAILED`; it
        can be sent as it is, for there is no session.
        """
        from .tls import TLSError, TLSSession  # here, for most brokers have no certificate

        session = TLSSession(context)
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                while not self._shake_hands(session, received):
                    received = await self._receive()
                    if not received:
                        raise TLSError("EOF")
        except (TLSError, OSError) as exc:
            raise CommandError("E_IDENTIFY_FAILED", f"IDENTIFY failed {exc}") from exc
        except trio.TooSlowError:
            reason = f"no TLS handshake within {HANDSHAKE_TIMEOUT_S:g} s"
            raise CommandError("E_IDENTIFY_FAILED", f"IDENTIFY failed {reason}") from None
        self.tls = session
        self.add_codec(session)

    def _shake_hands(self, session: "TLSSession", received: bytes) -> bool:
        try:
            return session.handshake(received)
        finally:  # if it fails, there is an alert that says why
            self.send_buffer.put_encoded(session.outgoing())
            self.send_buffer.flush()

    async def _receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                return self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                pass  # it only seemed readable

    def say_goodbye(self) -> None:
        """Send what there is, and end the TLS session if there is one, as far as the socket takes it."""
        if self.tls is not None and not self.send_buffer.broken:
            self.send_buffer.encode()
            self.send_buffer.put_encoded(self.tls.end())
        self.send_buffer.flush()

    async def linger(self) -> None:
        """Say goodbye, and see to it that it arrives.

        Closing a socket with unread input resets the connection, and the client may then never see the last frame.
        So what it still sends is read, for a short while, and thrown away.
        """
        self.say_goodbye()
        with trio.move_on_after(_LINGER_S):
            await self.send_buffer.emptied()
            try:
                self.sock.shutdown(socket.SHUT_WR)
                for _ in range(_LINGER_BYTES // RECEIVE_BYTES):
                    if not await self._receive():
                        return
            except OSError:
                return  # the client has gone
