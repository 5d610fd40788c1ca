"""Tests for TLS and plain text on the ports of a discovery service, and for clients that cost it much."""

import json
import logging
import random
import socket
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from cryptography import x509
from trio.testing import MockClock

from broker.certificates import Certificates
from lookup.support import (
    Lookupd,
    RawProducer,
    auth,
    grant,
    identify,
    ours,
    producer,
    raw_connection,
    token_of,
    watched_log,
    write_auth_file,
)
from trio_nsq.lookup.query import lookup_topic
from trio_nsq.lookup.service.options import LookupdOptions
from trio_nsq.lookup.service.server import serve
from trio_nsq.protocol.errors import StartupError
from trio_nsq.tls.accepting import FIRST_BYTE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, HANDSHAKES_PER_HOST


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def clock() -> MockClock:
    """A clock that moves only when the test says so."""
    return MockClock()


def subject_of(certificate: Path) -> str:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).subject.rfc4514_string()


async def ping(address: str, tls: ssl.SSLContext | None = None) -> bytes | None:
    async with raw_connection(address, tls) as client:
        await client.stream.send_all(b"  V1PING\n")
        return await client.response()


async def get(lookupd: Lookupd, path: str, tls: ssl.SSLContext | None = None) -> httpx.Response:
    async with httpx.AsyncClient(verify=tls or False) as client:
        return await client.get(f"{'https' if tls else 'http'}://{lookupd.http_address}{path}")


# ------------------------------------------------------------------------------------------------ plain text


async def test_tls_required(certificates: Certificates) -> None:
    tls = certificates.client_context()
    async with ours(tls_required=True, **certificates.options) as lookupd:
        assert await ping(lookupd.tcp_address) == b"E_INVALID TLS required"
        assert await ping(lookupd.tcp_address, tls) == b"OK"
        answer = await get(lookupd, "/topics")
        port = int(lookupd.http_address.rpartition(":")[2])
        assert (answer.status_code, answer.json()) == (403, {"message": "TLS_REQUIRED", "https_port": port})
        assert (await get(lookupd, "/topics", tls)).json() == {"topics": []}


@pytest.mark.parametrize("policy", ["require", "require-verify"])
async def test_a_policy_that_requires_certificates_requires_tls(
    certificates: Certificates, policy: str
) -> None:
    options: dict[str, Any] = {"tls_client_auth_policy": policy, "tls_root_ca_file": certificates.ca_path}
    async with ours(**options, **certificates.options) as lookupd:
        assert await ping(lookupd.tcp_address) == b"E_INVALID TLS required"
        assert await ping(lookupd.tcp_address, certificates.client_context("known")) == b"OK"
        with pytest.raises(trio.BrokenResourceError):
            await ping(lookupd.tcp_address, certificates.client_context())


async def test_a_query_follows_to_https(certificates: Certificates) -> None:
    tls = certificates.client_context()
    async with ours(tls_required=True, **certificates.options) as lookupd, producer(lookupd, tls=tls) as one:
        await one.register("REGISTER t")
        (found,) = await lookup_topic(lookupd.http_address, "t", timeout_s=5, tls=tls)
        assert found.broadcast_address == "b"


async def test_a_client_hello_without_tls() -> None:
    async with ours() as lookupd:
        for address in (lookupd.tcp_address, lookupd.http_address):
            with pytest.raises(trio.BrokenResourceError):
                await ping(address, ssl.create_default_context())
        assert await ping(lookupd.tcp_address) == b"OK"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tls_required": True}, "no certificate is configured"),
        ({"tls_cert": Path("missing.pem")}, "give both"),
        ({"tls_cert": Path("missing.pem"), "tls_key": Path("missing.key")}, "cannot read missing.pem"),
        ({"auth_file": Path("missing.toml")}, "cannot read the auth file missing.toml"),
    ],
)
async def test_files_that_cannot_be_used(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        await serve(LookupdOptions("127.0.0.1:0", "127.0.0.1:0", **options))


# ------------------------------------------------------------------------------------------------ certificates


async def test_a_certificate_is_an_identity(tmp_path: Path, certificates: Certificates) -> None:
    known = certificates.client_files("known-broker")[0]
    auth_file = write_auth_file(
        tmp_path / "auth.toml",
        {"token": grant("register", topics="other")},
        certificates={subject_of(known): grant("register", topics="clicks")},
    )
    options: dict[str, Any] = {
        "tls_client_auth_policy": "verify-if-given",
        "tls_root_ca_file": certificates.ca_path,
    }
    async with ours(auth_file=auth_file, **options, **certificates.options) as lookupd:
        tls = ssl.create_default_context(cafile=certificates.ca_path)
        tls.load_cert_chain(known, known.with_suffix(".key"))
        async with producer(lookupd, tls=tls) as one:
            await one.register("REGISTER clicks")
            assert (await one.ask(b"REGISTER other\n"))[0] != b"OK"
        async with producer(lookupd, tls=tls, token=token_of("token")) as one:  # the token counts
            await one.register("REGISTER other")
            assert (await one.ask(b"REGISTER clicks\n"))[0] != b"OK"
        unlisted = certificates.client_context("unlisted")
        async with raw_connection(lookupd.tcp_address, unlisted) as client:
            await client.stream.send_all(b"  V1" + identify())
            assert await client.response() == b"E_AUTH_FIRST AUTH required before IDENTIFY"
        with pytest.raises(trio.BrokenResourceError):
            await ping(lookupd.tcp_address, certificates.client_context("stranger", known=False))


async def test_certificates_in_an_auth_file_must_be_verified(
    tmp_path: Path, certificates: Certificates
) -> None:
    file = write_auth_file(tmp_path / "auth.toml", {}, certificates={"CN=x": grant("register")})
    options = LookupdOptions("127.0.0.1:0", "127.0.0.1:0", auth_file=file, **certificates.options)
    with pytest.raises(StartupError, match="does not verify those of clients"):
        await serve(options)


async def test_a_new_certificate_is_used_without_dropping_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Certificates(tmp_path / "files"), Certificates(tmp_path / "new")
    old_tls, new_tls = old.client_context(), new.client_context()
    with watched_log() as log:
        async with ours(**old.options) as lookupd, producer(lookupd, tls=old_tls) as one:
            assert lookupd.reload is not None
            for option in ("tls_cert", "tls_key"):
                old.options[option].write_bytes(new.options[option].read_bytes())
            await lookupd.reload()
            await log.until("reload: read the certificate")
            assert await ping(lookupd.tcp_address, new_tls) == b"OK"
            with pytest.raises(trio.BrokenResourceError):
                await ping(lookupd.tcp_address, old_tls)
            old.options["tls_key"].write_text("no key")
            await lookupd.reload()
            await log.until("the previous files stay in use")
            assert await ping(lookupd.tcp_address, new_tls) == b"OK"
            await one.register("REGISTER t")


@pytest.mark.parametrize("minimum", ["tls1.2", "tls1.3"])
async def test_oldest_version(certificates: Certificates, minimum: str) -> None:
    tls = certificates.client_context()
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    async with ours(tls_min_version=minimum, **certificates.options) as lookupd:
        if minimum == "tls1.3":
            with pytest.raises(trio.BrokenResourceError):
                await ping(lookupd.tcp_address, tls)
        else:
            assert await ping(lookupd.tcp_address, tls) == b"OK"


# ------------------------------------------------------------------------------------------------ costly clients


@pytest.mark.parametrize("port", ["tcp", "http"])
async def test_a_client_that_does_not_finish_its_handshake(
    certificates: Certificates, clock: MockClock, port: str
) -> None:
    async with ours(**certificates.options) as lookupd:
        address = lookupd.tcp_address if port == "tcp" else lookupd.http_address
        with watched_log() as log:
            async with raw_connection(address) as silent, raw_connection(address) as slow:
                await slow.stream.send_all(b"\x16\x03\x01")
                await trio.testing.wait_all_tasks_blocked(0.05)
                clock.jump(HANDSHAKE_TIMEOUT_S + 0.1)
                assert await slow.stream.receive_some(1) == b""
                await log.until("no TLS handshake within 5 s")
                clock.jump(FIRST_BYTE_TIMEOUT_S)
                assert await silent.stream.receive_some(1) == b""
                await log.until("nothing received within 60 s")


async def test_handshakes_of_one_host_wait_in_line_and_do_not_delay_others(
    certificates: Certificates, clock: MockClock
) -> None:
    tls = certificates.client_context()
    answers: list[bytes | None] = []

    async def ping_over_tls(address: str) -> None:
        answers.append(await ping(address, tls))

    async with ours(**certificates.options) as lookupd, trio.open_nursery() as nursery:
        async with AsyncExitStack() as stack:
            host, _, port = lookupd.tcp_address.rpartition(":")
            for _ in range(HANDSHAKES_PER_HOST):
                stranger = await stack.enter_async_context(raw_connection(lookupd.tcp_address))
                await stranger.stream.send_all(b"\x16")
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.start_soon(ping_over_tls, lookupd.tcp_address)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert answers == []
            assert await ping(lookupd.tcp_address) == b"OK"  # plain text does not wait in line
            sock = trio.socket.socket()
            await sock.bind(("127.0.0.2", 0))
            await sock.connect((host, int(port)))
            stream = trio.SSLStream(trio.SocketStream(sock), tls, server_hostname=host, https_compatible=True)
            async with stream:
                await stream.send_all(b"  V1PING\n")
                assert await RawProducer(stream).response() == b"OK"
            assert answers == []
    assert answers == [b"OK"]  # when the strangers had left


async def test_connection_limit(certificates: Certificates) -> None:
    limited = "too many connections: the discovery service accepts 1 (--max-connections)"
    async with ours(max_connections=1, **certificates.options) as lookupd:
        async with producer(lookupd), raw_connection(lookupd.tcp_address) as second:
            assert await second.response() == f"E_INVALID {limited}".encode()
        async with raw_connection(lookupd.http_address), httpx.AsyncClient() as client:
            answer = await client.get(f"http://{lookupd.http_address}/ping")
            assert answer.status_code == 503
            assert "the discovery service accepts 1" in answer.text


async def test_any_first_bytes(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a client sends, its connection ends, the log has no internal error, and others are served."""
    caplog.set_level(logging.ERROR)
    numbers = random.Random(7)
    beginnings = [bytes([first]) for first in range(256)]
    beginnings += [b"\x16\x03\x01" + numbers.randbytes(numbers.randrange(300)) for _ in range(100)]
    beginnings += [b"  V1" + numbers.randbytes(numbers.randrange(50)) + b"\n" for _ in range(50)]
    beginnings += [b"  V1AUTH\n" + numbers.randbytes(numbers.randrange(20)) for _ in range(50)]
    auth_file = write_auth_file(tmp_path / "auth.toml", {"one": grant("register")})
    async with ours(auth_file=auth_file, **certificates.options) as lookupd:

        async def send(address: str, data: bytes) -> None:
            host, _, port = address.rpartition(":")
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                try:
                    await stream.send_all(data)
                    stream.socket.shutdown(socket.SHUT_WR)
                    async for _ in stream:
                        pass
                except (OSError, trio.BrokenResourceError):
                    pass  # reset

        for address in (lookupd.tcp_address, lookupd.http_address):
            async with trio.open_nursery() as nursery:
                for data in beginnings:
                    nursery.start_soon(send, address, data)
        async with producer(lookupd, token=token_of("one"), tls=certificates.client_context()) as one:
            await one.register("REGISTER t")
    assert "internal error" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_no_secret_is_logged(certificates: Certificates, tmp_path: Path) -> None:
    auth_file = write_auth_file(tmp_path / "auth.toml", {"one": grant("register")})
    with watched_log() as log:
        async with ours(auth_file=auth_file, **certificates.options) as lookupd:
            async with producer(lookupd, token=token_of("one")) as one:
                await one.register("REGISTER t")
            async with raw_connection(lookupd.tcp_address) as client:
                await client.stream.send_all(b"  V1" + auth(b"a-wrong-token"))
                await client.response()
            await get(lookupd, "/topics")
            async with httpx.AsyncClient() as web:
                url = f"http://{lookupd.http_address}/topics"
                await web.get(url, headers={"Authorization": f"Bearer {token_of('one').decode()}"})
    text = json.dumps(log.lines)
    assert token_of("one").decode() not in text
    assert "a-wrong-token" not in text
