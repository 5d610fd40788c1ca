"""The TLS settings of a client: which certificates to trust, and which one to show."""

import ssl
from dataclasses import dataclass
from os import PathLike
from typing import TypeAlias

from ...protocol.errors import NSQError

StrPath: TypeAlias = str | PathLike[str]


class TLSFilesError(NSQError, ValueError):
    """A file for TLS cannot be used. The text names the option of the client, the file and the reason."""


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """PEM files to make a TLS context of. Unlike a context, they can be sent to a task of Spark.

    Attributes:
        root_ca_file: The CAs to trust; None: the system's.
        cert, key: The certificate of the client, and its key if that is not in the same file.
        skip_verify: Skip certificate verification.
    """

    root_ca_file: StrPath | None = None
    cert: StrPath | None = None
    key: StrPath | None = None
    skip_verify: bool = False

    def context(self) -> ssl.SSLContext:
        """Make a context. Raises TLSFilesError."""
        try:
            context = ssl.create_default_context(cafile=self.root_ca_file)
        except OSError as exc:  # ssl.SSLError is one
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


def reason_of(error: OSError) -> str:
    """The text of an error of TLS, or of a file for it."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM file").lower().replace("_", " ")
    return error.strerror or str(error)
