"""A TLS session over a trio stream."""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import trio

from .errors import TLSError

_READ_BYTES = 64 * 1024


class Session(Protocol):
    """One side of a TLS session, without IO."""

    ended: bool

    def handshake(self, data: bytes) -> bool: ...
    def outgoing(self) -> bytes: ...
    def encode(self, data: bytes) -> bytes: ...
    def decode(self, data: bytes) -> Iterator[bytes]: ...
    def end(self) -> bytes: ...


S = TypeVar("S", bound=Session)


class TLSStream(trio.abc.HalfCloseableStream, Generic[S]):
    """A TLS session over a trio stream, which it closes. For one task at a time that receives, and one that sends.

    Unlike trio's, it can end one side alone.

    Attributes:
        session: The session, for facts about it.
    """

    def __init__(self, transport: trio.abc.HalfCloseableStream, session: S) -> None:
        self.transport = transport
        self.session = session
        self._received: list[bytes] = []  # last first
        self._is_sending = False

    async def do_handshake(self) -> None:
        """Do the handshake. Raises TLSError, trio.BrokenResourceError."""
        data, done = b"", False
        while not done:
            try:
                done = self.session.handshake(data)
            finally:  # after an error, this sends the alert
                await self._send_outgoing()
            if not done and not (data := bytes(await self.transport.receive_some(_READ_BYTES))):
                raise TLSError("the peer disconnected during the handshake")
        self._received = list(self.session.decode(b""))[::-1]  # data received with the end of the handshake
        await self._send_outgoing()

    async def _send_outgoing(self) -> None:
        if self._is_sending:
            return  # the other task takes it along with its next data
        if data := self.session.outgoing():
            await self.transport.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As trio's; b"" at the end. Raises trio.BrokenResourceError, also for data that is not TLS."""
        while not self._received and not self.session.ended:
            data = await self.transport.receive_some(_READ_BYTES)
            if not data:
                return b""
            try:
                self._received = list(self.session.decode(bytes(data)))[::-1]
            except TLSError as exc:
                raise trio.BrokenResourceError(str(exc)) from exc
            await self._send_outgoing()
        if not self._received:
            return b""
        piece = self._received.pop()
        if max_bytes is not None and len(piece) > max_bytes:
            self._received.append(piece[max_bytes:])
            piece = piece[:max_bytes]
        return piece

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._is_sending = True
        try:
            await self.transport.send_all(self.session.encode(bytes(data)) if data else b"")
        except TLSError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        await self.transport.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As trio's: send close_notify, then the transport's end."""
        await self.transport.send_all(self.session.end())
        await self.transport.send_eof()

    async def aclose(self) -> None:
        """Close the transport; send close_notify first if that does not block."""
        try:
            with trio.move_on_after(0):
                await self.transport.send_all(self.session.end())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer has disconnected
        finally:
            await self.transport.aclose()
