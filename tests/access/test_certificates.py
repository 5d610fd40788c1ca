"""Clients with certificates: which of them have an identity, and what a token does to it."""

import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from access.support import (
    ALL_ROLES,
    AuthFile,
    HTTPConnection,
    attempt,
    auth,
    authenticated,
    bearer,
    everything,
)
from broker.certificates import Certificates
from broker.support import RawClient, connected, pub, running_broker
from broker.upgrading import negotiate, start_tls_and_read, upgrade
from trio_nsq.broker import BoundAddresses


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of the broker and its clients."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def subject_of(certificate: Path) -> str:
    """The subject of the first certificate of a PEM file."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).subject.rfc4514_string()


class Client:
    """A client's certificate."""

    def __init__(self, certificates: Certificates, name: str, *, known: bool = True) -> None:
        paths = certificates.client_files(name, known=known)
        self.subject = subject_of(paths[0])
        self.context = ssl.create_default_context(cafile=certificates.ca_path)
        self.context.load_cert_chain(*paths)


@asynccontextmanager
async def running(
    folder: Path, certificates: Certificates, policy: str, file: AuthFile, **options: Any
) -> AsyncIterator[BoundAddresses]:
    """A broker with this policy for clients' certificates."""
    given = {
        **certificates.options,
        "tls_client_auth_policy": policy,
        "tls_root_ca_file": certificates.ca_path,
        "tls_required": "tcp-https" if policy == "require" else "false",
        "auth_file": file.write(),
    }
    async with running_broker(folder / "d", **(given | options)) as bound:
        yield bound


@asynccontextmanager
async def over_tls(bound: BoundAddresses, context: ssl.SSLContext) -> AsyncIterator[RawClient]:
    """A TCP client after IDENTIFY and TLS."""
    async with connected(bound.tcp_address) as client:
        await upgrade(client, context, None)
        yield client


@asynccontextmanager
async def over_https(bound: BoundAddresses, context: ssl.SSLContext) -> AsyncIterator[HTTPConnection]:
    """A kept HTTPS connection."""
    assert bound.https_address is not None
    host, _, port = bound.https_address.rpartition(":")
    tcp = await trio.open_tcp_stream(host, int(port))
    async with trio.SSLStream(tcp, context, server_hostname="127.0.0.1", https_compatible=True) as stream:
        yield HTTPConnection(stream)


async def test_a_verified_certificate_is_an_identity(tmp_path: Path, certificates: Certificates) -> None:
    known, stranger = Client(certificates, "known"), Client(certificates, "stranger")
    for policy in ("require-verify", "verify-if-given"):
        folder = tmp_path / policy
        folder.mkdir()
        file = AuthFile(folder / "auth.toml")
        file.add_certificate("backup", known.subject, everything("publish"))
        async with running(folder, certificates, policy, file) as bound:
            async with over_tls(bound, known.context) as client:
                assert await attempt(client, pub("t", b"x")) == "OK"
                assert (await attempt(client, b"SUB t c\n")).startswith("E_UNAUTHORIZED")
            async with over_https(bound, known.context) as http:
                assert (await http.request("POST", "/pub?topic=t", {}, b"x")).status == 200
                assert (await http.request("GET", "/topic/bounds?topic=t")).status == 403
            async with over_tls(bound, stranger.context) as client:  # verified, and not in the file
                assert (await attempt(client, pub("t", b"x"))).startswith("E_AUTH_FIRST")
            async with over_https(bound, stranger.context) as http:
                assert (await http.request("POST", "/pub?topic=t", {}, b"x")).message == "AUTH_REQUIRED"


async def test_foreign_pages_may_not_use_a_browser_s_certificate(
    tmp_path: Path, certificates: Certificates
) -> None:
    known = Client(certificates, "known")
    file = AuthFile(tmp_path / "auth.toml")
    file.add_certificate("known", known.subject, everything(*ALL_ROLES))
    async with running(tmp_path, certificates, "verify-if-given", file) as bound:
        async with over_https(bound, known.context) as http:
            assert (await http.request("POST", "/pub?topic=t", {}, b"x")).status == 200
            page = {"Origin": "https://evil.example"}
            assert (await http.request("POST", "/pub?topic=t", page, b"x")).message.startswith(
                "NOT_FOR_WEB_PAGES"
            )
        async with over_https(bound, known.context) as http:
            host = {"Host": "evil.example", "Sec-Fetch-Mode": "navigate"}
            assert (await http.request("GET", "/stats", host)).message.startswith("HOST_NOT_ALLOWED")


@pytest.mark.parametrize("policy", ["require", "verify-if-given", "require-verify"])
async def test_an_unverified_certificate_is_never_an_identity(
    tmp_path: Path, certificates: Certificates, policy: str
) -> None:
    """Anyone can make a certificate with any subject."""
    forged = Client(certificates, "known", known=False)
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("web", everything("publish"))
    if policy != "require":  # with that policy, an auth file must have no certificates
        file.add_certificate("known", forged.subject, everything(*ALL_ROLES))
    async with running(tmp_path, certificates, policy, file) as bound:
        if policy == "require":
            async with over_tls(bound, forged.context) as client:
                assert (await attempt(client, pub("t", b"x"))).startswith("E_AUTH_FIRST")
            async with over_https(bound, forged.context) as http:
                assert (await http.request("POST", "/pub?topic=t", {}, b"x")).status == 401
            async with over_tls(bound, forged.context) as client:
                await authenticated(client, "web-secret")
                assert await attempt(client, pub("t", b"x")) == "OK"
            return
        async with connected(bound.tcp_address) as client:
            await negotiate(client, tls_v1=True)
            with pytest.raises(trio.BrokenResourceError):
                await start_tls_and_read(client, forged.context)
        with pytest.raises(trio.BrokenResourceError):
            async with over_https(bound, forged.context) as http:
                await http.request("GET", "/ping")


async def test_verify_if_given_lets_clients_without_a_certificate_use_tokens(
    tmp_path: Path, certificates: Certificates
) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("web", everything("publish"))
    context = certificates.client_context()
    async with running(tmp_path, certificates, "verify-if-given", file) as bound:
        async with over_https(bound, context) as http:
            headers = {"Authorization": bearer("web")}
            assert (await http.request("POST", "/pub?topic=t", headers, b"x")).status == 200
            assert (await http.request("POST", "/pub?topic=t", {}, b"x")).status == 401
        async with over_tls(bound, context) as client:
            assert (await attempt(client, pub("t", b"x"))).startswith("E_AUTH_FIRST")


async def test_a_token_overrides_a_certificate(tmp_path: Path, certificates: Certificates) -> None:
    known = Client(certificates, "known")
    file = AuthFile(tmp_path / "auth.toml")
    file.add_certificate("known", known.subject, everything("publish"))
    file.add_token("reader", everything("read", "consume"))
    async with running(tmp_path, certificates, "verify-if-given", file) as bound:
        async with over_tls(bound, known.context) as client:
            assert await attempt(client, pub("t", b"x")) == "OK"
            assert json.loads(await authenticated(client, "reader-secret"))["identity"] == "reader"
            await client.subscribe("t", "c")
            assert (await attempt(client, pub("t", b"x"))).startswith("E_UNAUTHORIZED")
        async with over_tls(bound, known.context) as client:
            await authenticated(client, "reader-secret")
            assert (await attempt(client, auth("reader-secret"))) == "E_INVALID AUTH already set"
        async with over_tls(bound, known.context) as client:
            # Stock clients send the secret that they are configured with. It is no obstacle.
            assert json.loads(await authenticated(client, "no token"))["identity"] == "known"
            assert await attempt(client, pub("t", b"x")) == "OK"
        async with over_https(bound, known.context) as http:
            headers = {"Authorization": bearer("reader")}
            assert (await http.request("GET", "/topic/bounds?topic=t", headers)).status == 200
            assert (await http.request("POST", "/pub?topic=t", headers, b"x")).status == 403


async def test_a_certificate_does_not_replace_the_identity_of_auth(
    tmp_path: Path, certificates: Certificates
) -> None:
    """A client may send AUTH before IDENTIFY, which starts TLS."""
    known, stranger = Client(certificates, "known"), Client(certificates, "stranger")
    file = AuthFile(tmp_path / "auth.toml")
    file.add_certificate("known", known.subject, everything("read"))
    file.add_token("web", everything("publish"))
    async with running(tmp_path, certificates, "verify-if-given", file) as bound:
        for context in (known.context, stranger.context):
            async with connected(bound.tcp_address) as client:
                await authenticated(client, "web-secret")
                await upgrade(client, context, None)
                assert await attempt(client, pub("t", b"x")) == "OK"


async def test_a_certificate_that_is_removed_or_has_expired(
    tmp_path: Path, certificates: Certificates
) -> None:
    known = Client(certificates, "known")
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("admin", everything("admin"))
    file.add_certificate("known", known.subject, everything("publish"))
    async with running(tmp_path, certificates, "verify-if-given", file) as bound:
        async with over_tls(bound, known.context) as client, over_https(bound, known.context) as http:
            assert await attempt(client, pub("t", b"x")) == "OK"
            assert (await http.request("POST", "/pub?topic=t", {}, b"x")).status == 200
            file.add_certificate(
                "known", known.subject, everything("publish"), expires="2020-01-01T00:00:00Z"
            )
            async with over_https(bound, certificates.client_context()) as admin:
                headers = {"Authorization": bearer("admin")}
                path = str(file.write()).encode()
                assert (await admin.request("PUT", "/config/auth_file", headers, path)).status == 200
            assert await client.frame() is None
            assert (await http.request("POST", "/pub?topic=t", {}, b"x")).message == "AUTH_REQUIRED"


def issue(folder: Path, name: str, ca: Path, ca_key: Path, subject: x509.Name) -> tuple[Path, Path]:
    """A certificate and its key, signed by a CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer: Any = serialization.load_pem_private_key(ca_key.read_bytes(), None)
    issuer = x509.load_pem_x509_certificate(ca.read_bytes()).subject
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_subjects_are_those_that_openssl_prints(tmp_path: Path, certificates: Certificates) -> None:
    """The documentation tells people to copy them from there."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "clients")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    ca, ca_key = tmp_path / "ca.pem", tmp_path / "ca.key"
    ca.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    ca_key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    attributes = [
        (NameOID.COUNTRY_NAME, "DE"),
        (NameOID.ORGANIZATION_NAME, 'Example, "Inc"'),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, "a+b=c;d<e>"),
        (NameOID.GIVEN_NAME, "Ada"),
        (NameOID.SURNAME, "L"),
        (NameOID.SERIAL_NUMBER, "7"),
        (NameOID.COMMON_NAME, "#büro "),
        (NameOID.EMAIL_ADDRESS, "a@example.com"),
    ]
    subject = x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])
    paths = issue(tmp_path, "client", ca, ca_key, subject)
    command = [
        "openssl",
        "x509",
        "-in",
        str(paths[0]),
        "-noout",
        "-subject",
        "-nameopt",
        "RFC2253,-esc_msb,utf8",
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    file = AuthFile(tmp_path / "auth.toml")
    file.add_certificate("office", printed.removeprefix("subject=").rstrip("\n"), everything("publish"))
    context = ssl.create_default_context(cafile=certificates.ca_path)
    context.load_cert_chain(*paths)
    async with running(tmp_path, certificates, "require-verify", file, tls_root_ca_file=ca) as bound:
        async with over_https(bound, context) as http:
            assert (await http.request("POST", "/pub?topic=t", {}, b"x")).status == 200
