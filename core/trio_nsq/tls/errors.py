"""Errors of TLS sessions. Standard library only."""

import ssl

from ..protocol.errors import NSQError


class TLSError(NSQError):
    """The TLS handshake failed, or the session is lost. The text is OpenSSL's reason."""


_ALERTS = {
    "certificate required": "it requires a certificate of its clients",
    "unknown ca": "it does not trust the CA of your certificate",
    "certificate expired": "your certificate has expired",
    "certificate revoked": "your certificate is revoked",
    "bad certificate": "it refuses your certificate, or requires one",
    "certificate unknown": "it refuses your certificate",
    "unsupported certificate": "it refuses your certificate",
    "protocol version": "it supports none of the versions of TLS that this client does",
    "handshake failure": "it requires a certificate of its clients, or supports none of this client's ciphers",
}
"""Alerts of a server, as OpenSSL names them, and what they tell a client."""


def alert_meaning(reason: str) -> str:
    """Return what a server's alert tells a client, a clause about `it`, the server; empty for another reason.

    Args:
        reason: As of `reason_of`, such as `tlsv13 alert certificate required`.
    """
    _, is_alert, alert = reason.partition(" alert ")
    return _ALERTS.get(alert, "") if is_alert else ""


def reason_of(error: OSError) -> str:
    """Return the text of an error of a TLS session of the standard library, or of an error of a TLS file."""
    if isinstance(error, ssl.SSLError):
        return error.reason.lower().replace("_", " ") if error.reason else "no certificate or key in PEM"
    return error.strerror or str(error)
