"""Connections of viewers: their number, HTTP/1.1 only, requests whose end is ambiguous, and floods of logins."""

from pathlib import Path

import httpx
import pytest
import trio

from broker.support import PATIENCE_S
from console.access_support import Site, guarded, open_site

HEAD = b"GET /login HTTP/1.1\r\nHost: localhost\r\n"
MOST = 20


async def connect(site: Site) -> trio.SocketStream:
    """Open a connection."""
    host, _, port = site.root.removeprefix("http://").rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def received(stream: trio.SocketStream) -> bytes:
    """Return everything up to the end of the connection."""
    data = b""
    with trio.fail_after(PATIENCE_S):
        while piece := await stream.receive_some():
            data += piece
    return data


async def test_half_heads_keep_out_no_viewer(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_connections=MOST) as site:
        idle = []
        for _ in range(3 * MOST):
            idle.append(await connect(site))
            await idle[-1].send_all(HEAD)
        async with site.browser() as browser:
            assert (await browser.get("/")).status_code == 200
        for stream in idle[: 2 * MOST]:  # those that waited longest were ended
            assert await received(stream) == b""
        for stream in idle:
            await stream.aclose()


async def test_a_connection_above_the_limit_is_refused_if_all_are_in_use(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_connections=MOST) as site:
        busy = [await connect(site) for _ in range(MOST)]
        for stream in busy:
            await stream.send_all(
                b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
            )
            with trio.fail_after(PATIENCE_S):  # the request has begun
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
        async with await connect(site) as further:
            assert (await received(further)).startswith(b"HTTP/1.1 503 ")
        for stream in busy:
            await stream.aclose()


@pytest.mark.parametrize(
    "begin",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_http2_is_refused_and_the_connection_closed(tmp_path: Path, begin: bytes) -> None:
    async with open_site(tmp_path) as site, await connect(site) as stream:
        await stream.send_all(begin)
        answer = await received(stream)
        assert answer.startswith(b"HTTP/1.1 505 ")
        assert answer.count(b"HTTP/1.1") == 1


async def test_an_upgrade_to_http2_is_ignored(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, await connect(site) as stream:
        await stream.send_all(
            HEAD
            + b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
        )
        assert (await received(stream)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\ncontent-length: 0\r\n\r\n",
        b"POST /login HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_a_request_whose_end_is_ambiguous_is_refused(tmp_path: Path, head: bytes) -> None:
    async with open_site(tmp_path) as site, await connect(site) as stream:
        await stream.send_all(head + b"0\r\n\r\nGET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await received(stream)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1  # what follows is no request


@pytest.mark.parametrize("address", ["198.51.100.1", "198.51.100.2"], ids=["same address", "another address"])
async def test_a_flood_of_wrong_tokens_locks_nobody_out(tmp_path: Path, address: str) -> None:
    flood_from = {"X-Forwarded-For": "198.51.100.1"}
    async with guarded(tmp_path) as site, trio.open_nursery() as nursery:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=site.root, timeout=PATIENCE_S, limits=limits) as client:

            async def guess(number: int) -> None:
                headers = {"Authorization": f"Bearer wrong-{number}", **flood_from}
                await client.get("/api/topics", headers=headers)

            for number in range(60):
                nursery.start_soon(guess, number)
            for token in ("admin", "reader", "web"):  # none was seen before
                await trio.sleep(0)
                headers = {"Authorization": f"Bearer {token}-secret", "X-Forwarded-For": address}
                answer = await client.get("/api/topics", headers=headers)
                assert answer.status_code == 200, (token, answer.text)
            nursery.cancel_scope.cancel()
