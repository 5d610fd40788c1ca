"""The certificate of the console's listener, which can be replaced while it runs."""

import ssl
from pathlib import Path

from ..client.connection.tls import reason_of
from ..listening import StartupError

_ALPN = ["http/1.1"]
"""Without HTTP/2: see `http1_only`."""


class Certificate:
    """A TLS context with a certificate.

    Attributes:
        context: For the listener.

    Raises:
        StartupError: A file cannot be used.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert = cert
        self._key = key
        self.context = self._load()

    async def reload(self) -> None:
        """Read the files again, for new connections. Raises StartupError: the previous certificate stays in use."""
        self._load()  # a certificate without its key must not get into the context that is in use
        self.context.load_cert_chain(self._cert, self._key)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        try:
            context.load_cert_chain(self._cert, self._key)
        except OSError as exc:  # includes ssl.SSLError
            raise StartupError(
                f"--https-cert {self._cert}, --https-key {self._key}: {reason_of(exc)}"
            ) from exc
        return context
