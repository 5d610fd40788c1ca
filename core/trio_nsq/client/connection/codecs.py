"""What IDENTIFY lays over a client's connection: TLS, and compression inside that."""

import ssl
from collections.abc import Iterator
from itertools import chain

from ...protocol import NSQError
from ...protocol.compression import Codec
from .options import ConnectionSettings

_READ_BYTES = 256 * 1024


class TLSError(NSQError):
    """There is no TLS session with the broker, or none any more; the text says why."""


def client_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """The TLS settings of a connection.

    Raises:
        ValueError: A file cannot be used.
    """
    if settings.tls_context is not None:
        return settings.tls_context
    try:
        context = ssl.create_default_context(cafile=settings.tls_root_ca_file)
    except OSError as exc:  # ssl.SSLError is one
        raise ValueError(f"tls_root_ca_file {settings.tls_root_ca_file}: {_why(exc)}") from exc
    if settings.tls_insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.tls_cert is not None:
        try:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as exc:
            files = f"tls_cert {settings.tls_cert}, tls_key {settings.tls_key}"
            raise ValueError(f"{files}: {_why(exc)}") from exc
    return context


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM file").lower().replace("_", " ")
    return error.strerror or str(error)


class TLSLayer:
    """Our end of one session, without IO: a `Codec` once the handshake is over.

    Args:
        context: See `client_context`.
        host: Whom the broker's certificate is to name.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.ended = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def handshake(self, data: bytes) -> bool:
        """Go on with the handshake; then send what `outgoing` gives. Returns whether it is over. Raises TLSError."""
        self._incoming.write(data)
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as exc:
            raise TLSError(f"its certificate is not trusted: {exc.verify_message}") from exc
        except ssl.SSLError as exc:
            raise TLSError(f"TLS: {_why(exc)}") from exc
        return True

    def outgoing(self) -> bytes:
        """What TLS has to say by itself; may be nothing."""
        return self._outgoing.read()

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        try:
            self._session.write(data)
        except ssl.SSLError as exc:
            raise TLSError(f"TLS: {_why(exc)}") from exc
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
            raise TLSError(f"TLS: {_why(exc)}") from exc

    def end(self) -> bytes:
        """Say that nothing more will come; returns what is to be sent for it."""
        try:
            self._session.unwrap()
        except ssl.SSLError:
            pass  # it waits for the peer to say so, too, or the session is lost: we have said what we can
        return self._outgoing.read()


class Layers:
    """The layers of one connection, outermost first; none at first."""

    def __init__(self) -> None:
        self._codecs: list[Codec] = []
        self._tls: TLSLayer | None = None

    def add(self, codec: Codec) -> None:
        """Lay another one inside those that there are."""
        self._codecs.append(codec)
        if isinstance(codec, TLSLayer):
            self._tls = codec

    def encode(self, data: bytes) -> bytes:
        """What to send for this data. Raises NSQError."""
        for codec in reversed(self._codecs):
            data = codec.encode(data)
        return data

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The data in what was received, in pieces. Raises NSQError; the pieces before it are good."""
        pieces: Iterator[bytes] = iter((data,))
        for codec in self._codecs:
            pieces = chain.from_iterable(map(codec.decode, pieces))
        return pieces

    @property
    def ended(self) -> bool:
        """The broker has said, in the way of one of the layers, that nothing more will come."""
        return any(codec.ended for codec in self._codecs)

    def end(self) -> bytes:
        """What to send to say that nothing more will come."""
        return self._tls.end() if self._tls is not None else b""
