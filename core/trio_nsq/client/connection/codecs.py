"""The codecs of a client's connection that IDENTIFY negotiates: TLS, and compression inside TLS."""

import ssl
from collections.abc import Iterator
from itertools import chain

from ...protocol import NSQError
from ...protocol.compression import Codec
from ...text.wording import untrusted_certificate
from .tls import reason_of

_READ_BYTES = 256 * 1024


class TLSError(NSQError):
    """The TLS session with the broker failed; the text says why."""


class TLSCodec:
    """The client side of one TLS session, without IO; a `Codec` once the handshake is complete.

    Args:
        host: The name that the broker's certificate must have.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.ended = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def handshake(self, data: bytes) -> bool:
        """Continue the handshake; then send `outgoing`. Return whether it is complete. Raises TLSError."""
        self._incoming.write(data)
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as exc:
            raise TLSError(untrusted_certificate(exc.verify_message)) from exc
        except ssl.SSLError as exc:
            raise TLSError(f"TLS: {reason_of(exc)}") from exc
        return True

    def outgoing(self) -> bytes:
        """Return the bytes that the handshake has to send; may be empty."""
        return self._outgoing.read()

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        try:
            self._session.write(data)
        except ssl.SSLError as exc:
            raise TLSError(f"TLS: {reason_of(exc)}") from exc
        return self._outgoing.read()

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See `Codec`."""
        self._incoming.write(data)
        try:
            while piece := self._session.read(_READ_BYTES):
                yield piece
            self.ended = True
        except ssl.SSLWantReadError:
            return
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as exc:
            raise TLSError(f"TLS: {reason_of(exc)}") from exc

    def end(self) -> bytes:
        """Announce the end of the data; return the bytes to send for it."""
        try:
            self._session.unwrap()
        except ssl.SSLError:
            pass  # waits for the peer's close_notify, or the session is lost; our close_notify is written
        return self._outgoing.read()


class CodecStack:
    """The codecs of one connection, outermost first; initially empty."""

    def __init__(self) -> None:
        self._codecs: list[Codec] = []

    def add(self, codec: Codec) -> None:
        """Add a codec inside the others."""
        self._codecs.append(codec)

    def encode(self, data: bytes) -> bytes:
        """Return the bytes to send for this data. Raises NSQError."""
        for codec in reversed(self._codecs):
            data = codec.encode(data)
        return data

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decode received bytes and yield the data. Raises NSQError; earlier pieces are valid."""
        pieces: Iterator[bytes] = iter((data,))
        for codec in self._codecs:
            pieces = chain.from_iterable(map(codec.decode, pieces))
        return pieces

    @property
    def ended(self) -> bool:
        """Whether one of the codecs received the end of the data."""
        return any(codec.ended for codec in self._codecs)

    def end(self) -> bytes:
        """Return the bytes that announce the end of the data."""
        return b"".join(codec.end() for codec in self._codecs if isinstance(codec, TLSCodec))
