"""Reads a server's certificate, key and CAs into an OpenSSL context."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from OpenSSL import SSL

from ..protocol.errors import StartupError
from .session import ServerContext, reason_of
from .settings import TLSSettings, TLSVersion

_logger = logging.getLogger("trio_nsq.tls")
_VERSIONS: dict[TLSVersion, int] = {
    "tls1.0": SSL.TLS1_VERSION,
    "tls1.1": SSL.TLS1_1_VERSION,
    "tls1.2": SSL.TLS1_2_VERSION,
    "tls1.3": SSL.TLS1_3_VERSION,
}
_OLD = ("tls1.0", "tls1.1")
_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"
"""The suites of TLS 1.2 with forward secrecy and authenticated encryption, as Mozilla's intermediate configuration."""


def server_context(settings: TLSSettings, names: str = "tls") -> ServerContext | None:
    """Build the TLS context of the listeners; None without a certificate.

    Args:
        names: How the names of the options of certificate and key begin.

    Raises:
        StartupError: A file cannot be used, or TLS is required and no certificate is configured.
    """
    if settings.cert is None and settings.key is None:
        if settings.required:
            raise StartupError(
                "TLS is required, but no certificate is configured: give --tls-cert and --tls-key"
            )
        return None
    if settings.cert is None or settings.key is None:
        raise StartupError("--tls-cert and --tls-key go together: give both")
    context = ServerContext(SSL.TLS_SERVER_METHOD)
    context.set_options(SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION)
    context.set_min_proto_version(_VERSIONS[settings.min_version])
    # OpenSSL 3 supports the old versions only at this level.
    context.set_cipher_list(b"DEFAULT:@SECLEVEL=0" if settings.min_version in _OLD else _CIPHERS)
    _use_certificate(context, settings.cert, settings.key, names)
    _ask_for_certificates(context, settings)
    return context


def _use_certificate(context: SSL.Context, certificate: Path, key: Path, names: str) -> None:
    _readable(f"--{names}-cert", certificate)
    _readable(f"--{names}-key", key)
    if b"ENCRYPTED" in key.read_bytes():  # OpenSSL would ask for the password on the terminal
        raise StartupError(f"--{names}-key: {key} is encrypted. Give a key without a password")
    try:
        context.use_privatekey_file(str(key))
    except SSL.Error as exc:
        raise StartupError(f"--{names}-key: {key} is not a PEM private key for TLS") from exc
    try:
        context.use_certificate_chain_file(str(certificate))
    except SSL.Error as exc:
        raise StartupError(
            f"--{names}-cert: {certificate} is not a PEM certificate ({reason_of(exc)})"
        ) from exc
    try:
        context.check_privatekey()
    except SSL.Error as exc:
        raise StartupError(f"--{names}-key: {key} is not the key of {certificate}") from exc
    _warn_if_expired(f"--{names}-cert", certificate)


def _warn_if_expired(flag: str, certificate: Path) -> None:
    (first, *_) = x509.load_pem_x509_certificates(certificate.read_bytes())
    if (end := first.not_valid_after_utc) < datetime.now(UTC):
        _logger.warning(
            "%s: %s has expired at %s: clients refuse it until you renew it", flag, certificate, end
        )


def _ask_for_certificates(context: ServerContext, settings: TLSSettings) -> None:
    policy = settings.client_auth_policy
    if not policy:
        return
    context.verifies = verifies = settings.verifies_clients

    def verify(_session: SSL.Connection, _certificate: Any, _error: int, _depth: int, good: int) -> bool:
        return not verifies or bool(good)

    needed = 0 if policy == "verify-if-given" else SSL.VERIFY_FAIL_IF_NO_PEER_CERT
    context.set_verify(SSL.VERIFY_PEER | needed, verify)
    context.set_session_id(b"trio-nsq")  # without it, OpenSSL does not resume sessions of verified clients
    if settings.root_ca_file is None:
        context.set_default_verify_paths()
        return
    _readable("--tls-root-ca-file", settings.root_ca_file)
    try:
        context.load_verify_locations(str(settings.root_ca_file))
    except SSL.Error as exc:
        text = f"--tls-root-ca-file: {settings.root_ca_file} has no PEM certificate ({reason_of(exc)})"
        raise StartupError(text) from exc


def _readable(flag: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as exc:
        raise StartupError(f"{flag}: cannot read {path}: {exc.strerror}") from exc
