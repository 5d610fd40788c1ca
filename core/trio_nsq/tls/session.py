"""The server side of a TLS session, without IO."""

from collections.abc import Iterator

from cryptography.x509.oid import NameOID
from OpenSSL import SSL

from .errors import TLSError

_READ_BYTES = 64 * 1024
_IANA_NAMES = {
    # The suites up to TLS 1.2 that OpenSSL 3 offers by default. OpenSSL uses IANA's names for those of TLS 1.3.
    "ECDHE-ECDSA-AES128-GCM-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-ECDSA-AES256-GCM-SHA384": "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305": "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "ECDHE-ECDSA-AES128-SHA": "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "ECDHE-ECDSA-AES256-SHA": "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "ECDHE-ECDSA-AES128-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "ECDHE-RSA-AES256-GCM-SHA384": "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "ECDHE-RSA-CHACHA20-POLY1305": "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "ECDHE-RSA-AES128-SHA": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "ECDHE-RSA-AES256-SHA": "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "ECDHE-RSA-AES128-SHA256": "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "AES128-GCM-SHA256": "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "AES256-GCM-SHA384": "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "AES128-SHA": "TLS_RSA_WITH_AES_128_CBC_SHA",
    "AES256-SHA": "TLS_RSA_WITH_AES_256_CBC_SHA",
    "AES128-SHA256": "TLS_RSA_WITH_AES_128_CBC_SHA256",
}

_SUBJECT_NAMES = {
    # RFC 4514 has names for nine attributes only; these are OpenSSL's for others that are usual in subjects.
    NameOID.EMAIL_ADDRESS: "emailAddress",
    NameOID.SERIAL_NUMBER: "serialNumber",
    NameOID.GIVEN_NAME: "GN",
    NameOID.SURNAME: "SN",
    NameOID.TITLE: "title",
}


class ServerContext(SSL.Context):
    """The TLS context of the listeners; `context.server_context` makes it.

    Attributes:
        verifies: Certificates of clients are verified, so that their subjects can be trusted.
    """

    verifies = False


class TLSSession:
    """The server side of one TLS session, without IO. After the handshake it is a `Codec`."""

    def __init__(self, context: ServerContext) -> None:
        self._verifies = context.verifies
        self._session = SSL.Connection(context, None)
        self._session.set_accept_state()
        self.ended: bool = False
        """The peer has sent close_notify."""

    def handshake(self, data: bytes) -> bool:
        """Continue the handshake with received data. The caller then sends `outgoing`, also after an error (an alert).

        Returns whether the handshake is complete. Raises TLSError: it failed.
        """
        if data:
            self._session.bio_write(data)
        try:
            self._session.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as exc:
            raise TLSError(reason_of(exc)) from exc
        return True

    def outgoing(self) -> bytes:
        """Return the TLS records to send, such as handshake messages; may be empty."""
        pieces: list[bytes] = []
        try:
            while True:
                pieces.append(self._session.bio_read(_READ_BYTES))
        except SSL.WantReadError:
            return b"".join(pieces)

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        try:
            self._session.sendall(data)
        except SSL.Error as exc:
            raise TLSError(reason_of(exc)) from exc
        return self.outgoing()

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See `Codec`. Afterwards the caller sends `outgoing`. Raises TLSError."""
        if data:
            self._session.bio_write(data)
        try:
            while True:
                yield self._session.recv(_READ_BYTES)
        except SSL.WantReadError:
            return
        except SSL.ZeroReturnError:
            self.ended = True
        except SSL.Error as exc:
            raise TLSError(reason_of(exc)) from exc

    def end(self) -> bytes:
        """End the session; returns the close_notify to send."""
        try:
            self._session.shutdown()
        except SSL.Error:
            pass  # the session is lost already
        return self.outgoing()

    # ------------------------------------------------------------------ session facts

    @property
    def version(self) -> str:
        """The TLS version by nsqd's name: `TLS1.2`, `TLS1.3`."""
        return self._session.get_protocol_version_name().replace("TLSv1", "TLS1").replace("SSLv", "SSL")

    @property
    def cipher_suite(self) -> str:
        """IANA's name of the cipher suite; OpenSSL's name if IANA's is unknown."""
        name = self._session.get_cipher_name() or ""
        return _IANA_NAMES.get(name, name)

    @property
    def common_name(self) -> str:
        """The common name of the client's certificate; empty without one."""
        certificate = self._session.get_peer_certificate(as_cryptography=True)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME) if certificate else []
        return str(names[0].value) if names else ""

    @property
    def subject(self) -> str:
        """The subject of the client's certificate, by RFC 4514; empty without a certificate that was verified."""
        certificate = self._session.get_peer_certificate(as_cryptography=True) if self._verifies else None
        return certificate.subject.rfc4514_string(_SUBJECT_NAMES) if certificate is not None else ""


def reason_of(error: SSL.Error) -> str:
    """Return OpenSSL's text for the first error."""
    queue = error.args[0] if error.args else []
    return str(queue[0][2]) if queue and isinstance(queue, list) else "unexpected end"
