"""Tests for HTTPS, and for plain HTTP to a broker that requires TLS."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from broker.certificates import Certificates
from broker.support import PATIENCE_S, running_broker
from trio_nsq.broker import BoundAddresses


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def https_client(bound: BoundAddresses, context: ssl.SSLContext) -> AsyncIterator[httpx.AsyncClient]:
    url = f"https://{bound.https_address}"
    async with httpx.AsyncClient(base_url=url, verify=context, timeout=PATIENCE_S) as client:
        yield client


async def get(address: str | None, path: str) -> httpx.Response:
    """Send a GET over plain HTTP."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.get(f"http://{address}{path}")


async def raw(address: str | None, request: bytes) -> tuple[bytes, bytes]:
    """Send a request over plain HTTP; return the head and body of the answer, after the broker has closed."""
    assert address is not None
    host, _, port = address.rpartition(":")
    with trio.fail_after(PATIENCE_S):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(request)
            answer = b"".join([bytes(data) async for data in stream])
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def test_https_serves_the_same_api(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with (
        running_broker(tmp_path / "d", **certificates.options) as bound,
        https_client(bound, certificates.client_context()) as client,
    ):
        assert (await client.get("/ping")).text == "OK"
        body = bytes(range(256)) * 4096
        assert (await client.post("/pub", params={"topic": "t"}, content=body)).text == "OK"
        stats = (await client.get("/stats", params={"format": "json"})).json()
        assert stats["topics"][0]["message_bytes"] == len(body)
        too_big = await client.post("/pub", params={"topic": "t"}, content=body + b"x")
        assert (too_big.status_code, too_big.json()) == (413, {"message": "MSG_TOO_BIG"})
        assert "200 GET /ping (127.0.0.1:" in caplog.text
        assert (await get(bound.http_address, "/ping")).text == "OK"  # if TLS is not required


async def test_many_connections_at_once(tmp_path: Path, certificates: Certificates) -> None:
    async with (
        running_broker(tmp_path / "d", **certificates.options) as bound,
        https_client(bound, certificates.client_context()) as client,
    ):
        texts: list[str] = []

        async def ping() -> None:
            texts.append((await client.get("/ping")).text)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ping)
        assert texts == ["OK"] * 20


async def test_without_a_certificate_there_is_no_https(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", https_address="127.0.0.1:0") as bound:
        assert bound.https_address is None


async def test_https_can_be_disabled(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path / "d", **certificates.options, https_address="") as bound:
        assert bound.https_address is None


REQUESTS = {
    "ping": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "unknown path": b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "pub": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
    "long body": b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n",
    "OPTIONS": b"OPTIONS /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "wrong slashes": b"GET //PING/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "debug": b"GET /debug/tasks HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("case", REQUESTS)
async def test_every_plain_request_is_redirected_to_https(
    tmp_path: Path, certificates: Certificates, case: str
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options, tls_required="true") as bound:
        assert bound.https_address is not None
        head, body = await raw(bound.http_address, REQUESTS[case])
        assert head.startswith(b"HTTP/1.1 403 Forbidden\r\nX-NSQ-Content-Type: nsq; version=1.0\r\n")
        assert b"Content-Type: application/json; charset=utf-8" in head
        port = bound.https_address.rpartition(":")[2]
        assert body == b'{"message": "TLS_REQUIRED", "https_port": %s}' % port.encode()
        async with https_client(bound, certificates.client_context()) as client:
            assert (await client.get("/config/tls_required")).text == "2"


async def test_head_is_refused_without_a_body(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path / "d", **certificates.options, tls_required="true") as bound:
        request = b"HEAD /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        head, body = await raw(bound.http_address, request)
        assert head.startswith(b"HTTP/1.1 403 ")
        assert body == b""


async def test_https_port_is_zero_without_https(tmp_path: Path, certificates: Certificates) -> None:
    options: dict[str, Any] = {**certificates.options, "tls_required": "true", "https_address": ""}
    async with running_broker(tmp_path / "d", **options) as bound:
        _, body = await raw(bound.http_address, REQUESTS["ping"])
        assert json.loads(body) == {"message": "TLS_REQUIRED", "https_port": 0}


async def test_tls_required_for_tcp_only_does_not_affect_http(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options, tls_required="tcp-https") as bound:
        assert (await get(bound.http_address, "/ping")).text == "OK"
        assert (await get(bound.http_address, "/config/tls_required")).text == "1"


@pytest.mark.parametrize(
    ("policy", "name", "known", "welcome"),
    [
        ("require", None, True, False),
        ("require", "stranger", False, True),
        ("require-verify", None, True, False),
        ("require-verify", "stranger", False, False),
        ("require-verify", "friend", True, True),
    ],
)
async def test_policy_for_client_certificates(
    tmp_path: Path,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    name: str | None,
    known: bool,
    welcome: bool,
) -> None:
    options: dict[str, Any] = {"tls_client_auth_policy": policy, "tls_root_ca_file": certificates.ca_path}
    async with running_broker(tmp_path / "d", **certificates.options, **options) as bound:
        assert (
            await get(bound.http_address, "/ping")
        ).status_code == 403  # a policy implies that TLS is required
        async with https_client(bound, certificates.client_context(name, known=known)) as client:
            if welcome:
                assert (await client.get("/ping")).text == "OK"
            else:
                with pytest.raises(httpx.TransportError):
                    await client.get("/ping")
                assert "http: TLS handshake error from 127.0.0.1:" in caplog.text


async def test_plain_http_to_the_https_port(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        with pytest.raises(httpx.TransportError):
            await get(bound.https_address, "/ping")
        assert "http: TLS handshake error from 127.0.0.1:" in caplog.text
        async with https_client(bound, certificates.client_context()) as client:
            assert (await client.get("/ping")).text == "OK"


async def test_missing_handshake_times_out(
    tmp_path: Path,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        began = trio.current_time()
        assert await raw(bound.https_address, b"") == (b"", b"")
        assert trio.current_time() - began < 10
        assert "not complete within 5 s" in caplog.text


async def test_session_closed_within_a_request(tmp_path: Path, certificates: Certificates) -> None:
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        assert bound.https_address is not None
        host, _, port = bound.https_address.rpartition(":")
        context = certificates.client_context()
        plain = await trio.open_tcp_stream(host, int(port))
        stream = trio.SSLStream(plain, context, server_hostname=host)
        await stream.send_all(
            b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf"
        )
        await trio.aclose_forcefully(stream)
        async with https_client(bound, context) as client:
            assert (await client.get("/stats", params={"format": "json"})).json()["topics"] == []


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_request_that_arrives_with_the_end_of_the_handshake(
    tmp_path: Path, certificates: Certificates, version: ssl.TLSVersion
) -> None:
    """Clients send their first request at once, so the broker often gets both in one read."""
    context = certificates.client_context()
    context.minimum_version = context.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    async with running_broker(tmp_path / "d", **certificates.options) as bound:
        assert bound.https_address is not None
        host, _, port = bound.https_address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            with trio.fail_after(PATIENCE_S):
                while True:
                    try:
                        session.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        await stream.send_all(outgoing.read())
                        incoming.write(await stream.receive_some())
                session.write(REQUESTS["ping"])
                await stream.send_all(outgoing.read())
                answer = b""
                while not answer.endswith(b"OK"):
                    try:
                        answer += session.read()
                    except ssl.SSLWantReadError:
                        incoming.write(await stream.receive_some())
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
