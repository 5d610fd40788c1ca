"""Certificates for tests: a CA, the broker's certificate, and clients' certificates, as PEM files and
contexts.
"""

import ssl
from pathlib import Path
from typing import Any

import trustme


class Certificates:
    """Certificate files in a folder, and contexts of clients that trust them.

    Attributes:
        options: The TLS options for `BrokerOptions`.
        ca_path: The CA of the broker's certificate, and of that of `client_context("known")`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_path = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_path)
        cert, key = self.renew()
        self.options: dict[str, Any] = {"tls_cert": cert, "tls_key": key}

    def renew(self) -> tuple[Path, Path]:
        """Write a new certificate of the broker into its files."""
        return self._write(self._ca.issue_cert("127.0.0.1", "localhost", common_name="broker"), "broker")

    def _write(self, leaf: trustme.LeafCert, name: str) -> tuple[Path, Path]:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(key)
        return cert, key

    def client_files(self, common_name: str, *, known: bool = True) -> tuple[Path, Path]:
        """Return a client's certificate and key; `known` is signed by the broker's CA, others by an unknown
        CA.
        """
        ca = self._ca if known else trustme.CA()
        leaf = ca.issue_cert(f"{common_name}@example.org", common_name=common_name)
        return self._write(leaf, common_name)

    def client_context(self, common_name: str | None = None, *, known: bool = True) -> ssl.SSLContext:
        """Return the context of a client that verifies the broker's certificate; None: without a client
        certificate.
        """
        context = ssl.create_default_context(cafile=self.ca_path)
        if common_name is not None:
            context.load_cert_chain(*self.client_files(common_name, known=known))
        return context
