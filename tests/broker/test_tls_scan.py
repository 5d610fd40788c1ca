"""Tests of a TLS scanner: protocol versions, cipher suites, compression, renegotiation."""

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from broker.certificates import Certificates
from broker.support import PATIENCE_S, running_broker
from interop.peers import system_program

VERSIONS = [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
NAMES = ["tls1.0", "tls1.1", "tls1.2", "tls1.3"]

pytestmark = pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def client_context(certificates: Certificates, version: ssl.TLSVersion, suite: str) -> ssl.SSLContext:
    """Return the context of a client that offers one version and some suites, however weak."""
    context = certificates.client_context()
    context.minimum_version = context.maximum_version = version
    context.set_ciphers(f"{suite}:@SECLEVEL=0")
    return context


async def accepts(address: str, context: ssl.SSLContext) -> bool:
    """Return whether a handshake succeeds."""
    host, _, port = address.rpartition(":")
    stream = trio.SSLStream(
        await trio.open_tcp_stream(host, int(port)),
        context,
        server_hostname="127.0.0.1",
        https_compatible=True,
    )
    with trio.fail_after(PATIENCE_S):
        async with stream:
            try:
                await stream.do_handshake()
            except trio.BrokenResourceError:
                return False
            return True


@pytest.mark.parametrize("least", NAMES)
async def test_only_configured_versions_are_accepted(
    tmp_path: Path, certificates: Certificates, least: str
) -> None:
    async with running_broker(tmp_path / "d", tls_min_version=least, **certificates.options) as bound:
        assert bound.https_address is not None
        for name, version in zip(NAMES, VERSIONS, strict=True):
            accepted = await accepts(bound.https_address, client_context(certificates, version, "ALL"))
            assert (name, accepted) == (name, name >= least)


def suites() -> Iterator[str]:
    """Return the names of all suites up to TLS 1.2 that OpenSSL can offer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:COMPLEMENTOFALL:@SECLEVEL=0")
    return (suite["name"] for suite in context.get_ciphers() if suite["protocol"] != "TLSv1.3")


async def test_only_suites_with_forward_secrecy_and_authenticated_encryption(
    tmp_path: Path, certificates: Certificates
) -> None:
    accepted, count = set(), 0
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        assert bound.https_address is not None
        for suite in suites():
            count += 1
            if await accepts(
                bound.https_address, client_context(certificates, ssl.TLSVersion.TLSv1_2, suite)
            ):
                accepted.add(suite)
    assert count > 50
    assert accepted == {
        "ECDHE-ECDSA-AES128-GCM-SHA256",
        "ECDHE-ECDSA-AES256-GCM-SHA384",
        "ECDHE-ECDSA-CHACHA20-POLY1305",
    }


async def test_neither_renegotiation_nor_compression(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        command = [system_program("openssl"), "s_client", "-tls1_2", "-connect", bound.https_address]
        done = await trio.run_process(
            [*map(str, command), "-CAfile", str(certificates.ca_path)],
            stdin=b"R\n",  # asks for a renegotiation
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = done.stdout.decode()
    assert "Verify return code: 0 (ok)" in text
    assert "Secure Renegotiation IS supported" in text  # RFC 5746, against prefix injection
    assert "Compression: NONE" in text
    assert "no renegotiation" in text
