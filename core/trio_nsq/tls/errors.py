"""Errors of TLS sessions. Standard library only."""

import ssl

from ..protocol.errors import NSQError


class TLSError(NSQError):
    """The TLS handshake failed, or the session is lost. The text is OpenSSL's reason."""


def reason_of(error: OSError) -> str:
    """Return the text of an error of a TLS session of the standard library, or of an error of a TLS file."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").lower().replace("_", " ")
    return error.strerror or str(error)
