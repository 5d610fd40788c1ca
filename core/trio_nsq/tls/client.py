"""The TLS settings of a server's own requests: to auth servers and discovery services. Standard library only."""

import ssl

from ..protocol.errors import StartupError
from .settings import TLSSettings


def client_context(settings: TLSSettings, *, with_certificate: bool = False) -> ssl.SSLContext:
    """Return a context that verifies servers by the CAs of the settings, or the system's.

    The oldest version is TLS 1.2, or 1.3 if the settings say so.

    Args:
        with_certificate: Show the server's own certificate to servers that ask for one.

    Raises:
        StartupError: A file cannot be used.
    """
    path = settings.root_ca_file
    try:
        context = ssl.create_default_context(cafile=path)
    except OSError as exc:  # ssl.SSLError is one
        reason = "not a PEM file of certificates" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise StartupError(f"--tls-root-ca-file: {path}: {reason}") from exc
    if settings.min_version == "tls1.3":
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if with_certificate and settings.cert is not None:
        try:
            context.load_cert_chain(settings.cert, settings.key)
        except OSError as exc:
            raise StartupError(f"--tls-cert: {settings.cert}, --tls-key: {settings.key}: {exc}") from exc
    return context
