"""The TLS options of a server. This module does not import OpenSSL, which is slow: most servers have no certificate."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TLSVersion = Literal["tls1.0", "tls1.1", "tls1.2", "tls1.3"]
ClientAuthPolicy = Literal["", "require", "require-verify", "verify-if-given"]


def requires_certificate(policy: ClientAuthPolicy) -> bool:
    """Whether a policy refuses clients without a certificate, and with it those without TLS."""
    return policy.startswith("require")


@dataclass(frozen=True, slots=True)
class TLSSettings:
    """The TLS settings of a server, by the names of its options.

    Attributes:
        cert, key: PEM files; both or neither. They enable TLS.
        client_auth_policy: Whether clients need a certificate: `""` no; `require` any; `require-verify` one that
            `root_ca_file`, or the system's store, verifies; `verify-if-given`: clients may have one, and it must be
            valid.
        root_ca_file: PEM file with the CAs of client certificates; None is the system's.
        min_version: The oldest TLS version accepted.
        required: Clients must use TLS, at least on some listener.
    """

    cert: Path | None = None
    key: Path | None = None
    client_auth_policy: ClientAuthPolicy = ""
    root_ca_file: Path | None = None
    min_version: TLSVersion = "tls1.2"
    required: bool = False

    @property
    def is_used(self) -> bool:
        """Whether any option asks for TLS."""
        return self.cert is not None or self.key is not None or self.required

    @property
    def verifies_clients(self) -> bool:
        """Whether certificates of clients are verified, so that their subjects can be trusted."""
        return self.client_auth_policy in ("require-verify", "verify-if-given")
