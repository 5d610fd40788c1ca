"""The client side of a TLS session, without IO. Standard library only."""

import ssl
from collections.abc import Iterator

from ..text.wording import untrusted_certificate
from .errors import TLSError, alert_meaning, reason_of

_READ_BYTES = 256 * 1024


class TLSClientSession:
    """The client side of one TLS session, without IO; a `Codec` once the handshake is complete.

    Args:
        host: The name that the server's certificate must have.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.ended: bool = False
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
            raise _failure(exc) from exc
        return True

    def outgoing(self) -> bytes:
        """Return the bytes that the handshake has to send; may be empty."""
        return self._outgoing.read()

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        try:
            self._session.write(data)
        except ssl.SSLError as exc:
            raise _failure(exc) from exc
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
            raise _failure(exc) from exc

    def end(self) -> bytes:
        """Announce the end of the data; return the bytes to send for it."""
        try:
            self._session.unwrap()
        except ssl.SSLError:
            pass  # waits for the peer's close_notify, or the session is lost; our close_notify is written
        return self._outgoing.read()


def _failure(error: ssl.SSLError) -> TLSError:
    reason = reason_of(error)
    meaning = alert_meaning(reason)
    return TLSError(f"TLS: {reason}" + (f": {meaning}" if meaning else ""))
