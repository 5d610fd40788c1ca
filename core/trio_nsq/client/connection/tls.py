"""The TLS settings of a client: trusted CAs and its own certificate."""

import ssl
from dataclasses import dataclass

from ...access.secret import StrPath
from ...protocol.errors import NSQError
from ...tls.errors import reason_of


class TLSFilesError(NSQError, ValueError):
    """A TLS file cannot be used. The text names the client's option, the file and the reason."""


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The PEM files of a TLS context. Unlike a context, they can be pickled and sent to a Spark task.

    Attributes:
        root_ca_file: The trusted CAs; None: the system's.
        cert, key: The client's certificate, and its key if it is in another file.
        skip_verify: Skip certificate verification.
    """

    root_ca_file: StrPath | None = None
    cert: StrPath | None = None
    key: StrPath | None = None
    skip_verify: bool = False

    def context(self) -> ssl.SSLContext:
        """Make a TLS context. Raises TLSFilesError."""
        try:
            context = ssl.create_default_context(cafile=self.root_ca_file)
        except OSError as exc:  # includes ssl.SSLError
            raise TLSFilesError(f"tls_root_ca_file {self.root_ca_file}: {reason_of(exc)}") from exc
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert:
            try:
                context.load_cert_chain(self.cert, self.key)
            except OSError as exc:
                files = f"tls_cert {self.cert}, tls_key {self.key}"
                raise TLSFilesError(f"{files}: {reason_of(exc)}") from exc
        return context
