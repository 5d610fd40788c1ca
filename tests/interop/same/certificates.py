"""A certificate authority of the tests' own, and what it vouches for."""

import ssl
import warnings
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """PEM files in one folder: ``ca.pem``, and ``NAME.pem`` and ``NAME.key`` for each of these.

    ``server`` is for 127.0.0.1 and localhost, ``client`` for clients, ``stranger`` for clients, too, but by
    another authority.
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
        """Of a broker with the server's certificate."""
        return [f"--tls-cert={self.pem('server')}", f"--tls-key={self.key('server')}"]

    def context(self, name: str = "", version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        """A client's context: with the certificate of that name if any, and only for that version if any."""
        context = ssl.create_default_context(cafile=self.ca)
        if version is not None:
            # One suite, so that both brokers choose the same; old versions, which OpenSSL 3 speaks at no other level.
            suites = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0"
            context.set_ciphers(suites)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = version
        if name:
            context.load_cert_chain(self.pem(name), self.key(name))
        return context
