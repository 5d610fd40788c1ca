"""A client's socket, and the layers that IDENTIFY adds: TLS, and compression inside TLS."""

import socket
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

import trio

from ...event_loop.reactor import SendBuffer
from ...protocol import CommandError
from ...protocol.compression import Codec

if TYPE_CHECKING:
    from ...tls.session import ServerContext, TLSSession

HANDSHAKE_TIMEOUT_S: Final = 5.0
RECEIVE_BYTES: Final = 64 * 1024
LARGE_RECEIVE_BYTES: Final = 512 * 1024
"""Maximum size of a read for the rest of a large body: more than most records of the log, which are not copied if a
read has exactly one. A buffer of this size for every read would make small reads slower."""
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 16 * 1024 * 1024


class Transport:
    """Both directions of one connection.

    Attributes:
        sock: The non-blocking socket, for `recv`. Received data goes through `decode`.
        tls: The TLS session, if there is one.
        bare: The connection has neither TLS nor compression.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.send_buffer: SendBuffer = SendBuffer(sock)
        self.tls: TLSSession | None = None
        self.bare: bool = True
        self._codecs: list[Codec] = []  # in the order of decoding

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decode received data into pieces; with b"", decode the data that the layers hold back.

        Raises NSQError: the data does not match the negotiated layers; the pieces before it are valid.
        """
        pieces: Iterator[bytes] = iter((data,))
        for codec in self._codecs:
            pieces = chain.from_iterable(map(codec.decode, pieces))
        yield from pieces
        if self.tls is not None and (records := self.tls.outgoing()):
            self.send_buffer.put_encoded(records)
            self.send_buffer.flush()

    @property
    def ended(self) -> bool:
        """Whether the client has ended a layer, and with it the connection."""
        return any(codec.ended for codec in self._codecs)

    @property
    def has_unread(self) -> bool:
        """Whether the client has sent something that was not received yet."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:  # BlockingIOError, or the connection is lost
            return False

    def add_codec(self, codec: Codec) -> None:
        """Add a layer inside the existing ones, from now on and in both directions."""
        self._codecs.append(codec)
        self.bare = False
        self.send_buffer.add_codec(codec)

    async def start_tls(self, context: "ServerContext", received: bytes) -> None:
        """Do the TLS handshake. `decode` returns the data received with its end.

        Args:
            received: The part of the client's handshake that has arrived already.

        Raises:
            CommandError: `E_IDENTIFY_FAILED`. It can be sent in plain text, because there is no TLS session.
        """
        from ...tls.errors import TLSError
        from ...tls.session import TLSSession  # here, because most brokers have no certificate

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
        finally:  # after an error, this sends the alert
            self.send_buffer.put_encoded(session.outgoing())
            self.send_buffer.flush()

    async def _receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                return self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                pass  # spurious wakeup

    def finish_sending(self) -> None:
        """Send the buffer and the end of the TLS session, as much as the socket accepts without waiting."""
        if self.tls is not None and not self.send_buffer.broken:
            self.send_buffer.encode()
            self.send_buffer.put_encoded(self.tls.end())
        self.send_buffer.flush()

    async def linger(self) -> None:
        """Send the last frames, and make sure that they arrive.

        Closing a socket with unread input resets the connection, and the client may then never see the last frame. So
        this reads and drops the client's data for a short time.
        """
        self.finish_sending()
        with trio.move_on_after(_LINGER_S):
            await self.send_buffer.emptied()
            try:
                self.sock.shutdown(socket.SHUT_WR)
                for _ in range(_LINGER_BYTES // RECEIVE_BYTES):
                    if not await self._receive():
                        return
            except OSError:
                return  # the client has disconnected
