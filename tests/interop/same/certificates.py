"""Create a certificate authority for the tests, and the certificates that it issues."""

import ssl
import warnings
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """PEM files in one folder: ``ca.pem``, and ``NAME.pem`` and ``NAME.key`` for each of these names.

    ``server`` is valid for 127.0.0.1 and localhost, and ``client`` for clients. ``stranger`` is a client certificate
    of another authority.
    """

    folder: Path

    @staticmethod
    def make(folder: Path) -> "Certificates":
        folder.mkdir(parents=True, exist_ok=True)
        ca, other_ca = trustme.CA(), trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        issued = {
            "server": ca.issue_cert("127.0.0.1", "localhost"),
            "client": ca.issue_cert("client.example", common_name="client-name"),
            "stranger": other_ca.issue_cert("client.example", common_name="stranger-name"),
        }
        for name, certificate in issued.items():
            (folder / f"{name}.pem").write_bytes(
                b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
            )
            certificate.private_key_pem.write_to_path(folder / f"{name}.key")
        return Certificates(folder)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def pem(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    @property
    def flags(self) -> list[str]:
        """Return the flags of a broker that uses the server's certificate."""
        return [f"--tls-cert={self.pem('server')}", f"--tls-key={self.key('server')}"]

    def context(self, name: str = "", version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        """Return a client's context, with the certificate of this name if given, restricted to the version if given."""
        context = ssl.create_default_context(cafile=self.ca)
        if version is not None:
            # These suites make both brokers choose the same one. OpenSSL 3 needs SECLEVEL=0 for old TLS versions.
            suites = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0"
            context.set_ciphers(suites)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = version
        if name:
            context.load_cert_chain(self.pem(name), self.key(name))
        return context
