"""TLS for the broker's TCP clients (NSQ protocol: IDENTIFY's tls_v1) and its HTTPS listener.

It uses pyOpenSSL, because nsqd's policy `require` demands a certificate without verifying it, which the standard
library's `ssl` cannot do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from cryptography.x509.oid import NameOID
from OpenSSL import SSL

from ...protocol import NSQError
from ..errors import StartupError
from ..options import BrokerOptions, TLSVersion

_VERSIONS: dict[TLSVersion, int] = {
    "tls1.0": SSL.TLS1_VERSION,
    "tls1.1": SSL.TLS1_1_VERSION,
    "tls1.2": SSL.TLS1_2_VERSION,
    "tls1.3": SSL.TLS1_3_VERSION,
}
_OLD = ("tls1.0", "tls1.1")
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


class TLSError(NSQError):
    """The TLS handshake failed, or the session is lost. The text is OpenSSL's reason."""


# ---------------------------------------------------------------------- settings


class ServerContext(SSL.Context):
    """The TLS settings of the listeners.

    Attributes:
        verifies: Certificates of clients are verified, so that their subjects can be trusted.
    """

    verifies = False


def server_context(options: BrokerOptions) -> ServerContext | None:
    """Build the TLS settings of the listeners; None without a certificate.

    Raises:
        StartupError: A file cannot be used, or TLS is required and no certificate is configured.
    """
    if options.tls_cert is None and options.tls_key is None:
        if options.required_tls != "false":
            raise StartupError(
                "TLS is required, but no certificate is configured: give --tls-cert and --tls-key"
            )
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise StartupError("--tls-cert and --tls-key go together: give both")
    context = ServerContext(SSL.TLS_SERVER_METHOD)
    context.set_options(SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION)
    context.set_min_proto_version(_VERSIONS[options.tls_min_version])
    if options.tls_min_version in _OLD:
        context.set_cipher_list(
            b"DEFAULT:@SECLEVEL=0"
        )  # OpenSSL 3 supports the old versions only at this level
    _use_certificate(context, options.tls_cert, options.tls_key)
    _ask_for_certificates(context, options)
    return context


def _use_certificate(context: SSL.Context, certificate: Path, key: Path) -> None:
    _readable("--tls-cert", certificate)
    _readable("--tls-key", key)
    if b"ENCRYPTED" in key.read_bytes():  # OpenSSL would ask for the password on the terminal
        raise StartupError(f"--tls-key: {key} is encrypted. Give a key without a password")
    try:
        context.use_privatekey_file(str(key))
    except SSL.Error as exc:
        raise StartupError(f"--tls-key: {key} is not a PEM private key for TLS") from exc
    try:
        context.use_certificate_chain_file(str(certificate))
    except SSL.Error as exc:
        raise StartupError(f"--tls-cert: {certificate} is not a PEM certificate ({_reason(exc)})") from exc
    try:
        context.check_privatekey()
    except SSL.Error as exc:
        raise StartupError(f"--tls-key: {key} is not the key of {certificate} ({_reason(exc)})") from exc


def _ask_for_certificates(context: ServerContext, options: BrokerOptions) -> None:
    if not options.tls_client_auth_policy:
        return
    policy = options.tls_client_auth_policy
    any_will_do = policy == "require"
    context.verifies = not any_will_do

    def verify(_session: SSL.Connection, _certificate: Any, _error: int, _depth: int, good: int) -> bool:
        return any_will_do or bool(good)

    needed = 0 if policy == "verify-if-given" else SSL.VERIFY_FAIL_IF_NO_PEER_CERT
    context.set_verify(SSL.VERIFY_PEER | needed, verify)
    context.set_session_id(b"trio-nsq")  # without it, OpenSSL does not resume sessions of verified clients
    if options.tls_root_ca_file is None:
        context.set_default_verify_paths()
        return
    _readable("--tls-root-ca-file", options.tls_root_ca_file)
    try:
        context.load_verify_locations(str(options.tls_root_ca_file))
    except SSL.Error as exc:
        text = f"--tls-root-ca-file: {options.tls_root_ca_file} has no PEM certificate ({_reason(exc)})"
        raise StartupError(text) from exc


def _readable(flag: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as exc:
        raise StartupError(f"{flag}: cannot read {path}: {exc.strerror}") from exc


def _reason(error: SSL.Error) -> str:
    """Return OpenSSL's text for the first error."""
    queue = error.args[0] if error.args else []
    return str(queue[0][2]) if queue and isinstance(queue, list) else "unexpected end"


# ---------------------------------------------------------------------- sessions


class TLSSession:
    """The server side of one TLS session, without IO. After the handshake it is a `Codec`."""

    def __init__(self, context: ServerContext) -> None:
        self._verifies = context.verifies
        self._session = SSL.Connection(context, None)
        self._session.set_accept_state()
        self.ended = False
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
            raise TLSError(_reason(exc)) from exc
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
            raise TLSError(_reason(exc)) from exc
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
            raise TLSError(_reason(exc)) from exc

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
        return certificate.subject.rfc4514_string() if certificate is not None else ""


class TLSStream(trio.abc.HalfCloseableStream):
    """A TLS session over a trio stream, which it closes. For one task at a time."""

    def __init__(self, transport: trio.abc.HalfCloseableStream, context: ServerContext) -> None:
        self.transport = transport
        self._session = TLSSession(context)
        self._received: list[bytes] = []  # last first

    @property
    def session(self) -> TLSSession:
        """The session, for facts about it."""
        return self._session

    async def do_handshake(self) -> None:
        """Do the handshake. Raises TLSError, trio.BrokenResourceError."""
        data, done = b"", False
        while not done:
            try:
                done = self._session.handshake(data)
            finally:  # after an error, this sends the alert
                await self._send_outgoing()
            if not done and not (data := bytes(await self.transport.receive_some(_READ_BYTES))):
                raise TLSError("the client disconnected during the handshake")
        self._received = list(self._session.decode(b""))[::-1]  # data received with the end of the handshake
        await self._send_outgoing()

    async def _send_outgoing(self) -> None:
        if data := self._session.outgoing():
            await self.transport.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As trio's; b"" at the end. Raises trio.BrokenResourceError, also for data that is not TLS."""
        while not self._received and not self._session.ended:
            data = await self.transport.receive_some(_READ_BYTES)
            if not data:
                return b""
            try:
                self._received = list(self._session.decode(bytes(data)))[::-1]
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
        """As trio's."""
        try:
            encoded = self._session.encode(bytes(data)) if data else b""
        except TLSError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc
        await self.transport.send_all(encoded)

    async def wait_send_all_might_not_block(self) -> None:
        """As trio's."""
        await self.transport.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As trio's: send close_notify, then the transport's end."""
        await self.transport.send_all(self._session.end())
        await self.transport.send_eof()

    async def aclose(self) -> None:
        """Close the transport; send close_notify first if that does not block."""
        try:
            with trio.move_on_after(0):
                await self.transport.send_all(self._session.end())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer has disconnected
        finally:
            await self.transport.aclose()
