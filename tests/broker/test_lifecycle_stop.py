"""Tests that a clean stop answers or disconnects every client in any state, in a time that clients cannot
extend.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import trio

from broker.auth_server import running_auth_server
from broker.certificates import Certificates
from broker.support import HeldFiles, connected, identify, mpub, pub, running_broker, settle
from trio_nsq.broker import BoundAddresses

LONGEST_S = 5.0
"""A stop takes some milliseconds; the rest is for a busy machine. Clients' timeouts are longer than this."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def tcp(address: str | None, sent: bytes = b"") -> AsyncIterator[trio.SocketStream]:
    """Return a connection that has sent these bytes and then does nothing."""
    assert address is not None
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        await stream.send_all(sent)
        yield stream


async def silent(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address)


async def silent_after_its_magic(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address, b"  V2")


async def in_a_line(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address, b"  V2PUB top")


async def in_a_body(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address, b"  V2PUB t\n" + pack(">i", 1000) + b"not all of it")


async def in_an_mpub(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address, b"  V2" + mpub("t", b"1", b"2", b"3" * 1000)[:-500])


async def before_the_handshake(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address, b"  V2" + identify(feature_negotiation=True, tls_v1=True))


async def in_the_handshake(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    return tcp(bound.tcp_address, b"  V2" + identify(feature_negotiation=True, tls_v1=True) + hello)


async def asked_for(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.tcp_address, b"  V2AUTH\n" + pack(">i", 6) + b"secret")


async def lingering(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    """A refused client that keeps sending."""
    return tcp(bound.tcp_address, b"  V2NOPE\n" + bytes(1000))


async def http_silent(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.http_address)


async def http_in_a_head(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.http_address, b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Le")


async def http_in_a_body(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    return tcp(bound.http_address, head + b"not all of it")


async def http_at_rest(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.http_address, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def https_before_the_handshake(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.https_address)


async def https_in_the_handshake(bound: BoundAddresses) -> AbstractAsyncContextManager[trio.SocketStream]:
    return tcp(bound.https_address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


SITUATIONS: list[Callable[..., Any]] = [
    silent,
    silent_after_its_magic,
    in_a_line,
    in_a_body,
    in_an_mpub,
    before_the_handshake,
    in_the_handshake,
    asked_for,
    lingering,
    http_silent,
    http_in_a_head,
    http_in_a_body,
    http_at_rest,
    https_before_the_handshake,
    https_in_the_handshake,
]


async def ended(stream: trio.SocketStream) -> None:
    """Wait until the broker has closed the connection."""
    try:
        with trio.fail_after(LONGEST_S):
            while await stream.receive_some(65536):
                pass
    except trio.BrokenResourceError:
        pass  # it had unread data


@asynccontextmanager
async def stopped_quickly(data_path: Path, **options: Any) -> AsyncIterator[BoundAddresses]:
    """Run a broker, and measure its stop at the end."""
    async with running_broker(data_path, **options) as bound:
        yield bound
        began_s = time.monotonic()
    assert time.monotonic() - began_s < LONGEST_S


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_no_client_delays_the_stop(
    tmp_path: Path, certificates: Certificates, situation: Callable[..., Any]
) -> None:
    async with AsyncExitStack() as stack:
        auth = await stack.enter_async_context(running_auth_server())
        auth.gate = trio.Event()
        options: dict[str, Any] = {"https_address": "127.0.0.1:0", **certificates.options}
        if situation is asked_for:
            options["auth_http_addresses"] = (auth.address,)
        async with stopped_quickly(tmp_path / "d", **options) as bound:
            stream = await stack.enter_async_context(await situation(bound))
            await settle()
            if situation is asked_for:
                assert auth.queries, "it has not been asked"
        await ended(stream)


async def test_client_that_does_not_read_does_not_delay_the_stop(tmp_path: Path) -> None:
    """Whether it gets messages, answers, or a large page over HTTP."""
    body = bytes(500_000)
    async with AsyncExitStack() as stack:
        async with stopped_quickly(tmp_path / "d", sync="interval") as bound:
            consumer = await stack.enter_async_context(connected(bound.tcp_address))
            await consumer.subscribe("t", "c", ready_count=2500)
            publisher = await stack.enter_async_context(connected(bound.tcp_address))
            for _ in range(20):
                await publisher.publish("t", *[body] * 2)
            chatty = await stack.enter_async_context(tcp(bound.tcp_address, b"  V2SUB t other\n"))
            with trio.move_on_after(0.5) as writing:
                while True:
                    await chatty.send_all(b"FIN 0123456789abcdef\n" * 3000)
            pages = b"GET /stats?format=json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000
            reader = await stack.enter_async_context(tcp(bound.http_address))
            with trio.move_on_after(0.5) as asking:
                await reader.send_all(pages)
            assert writing.cancelled_caught
            assert asking.cancelled_caught
        await ended(chatty)
        await ended(reader)
        while await consumer.stream.receive_some(65536):
            pass


def post(path: str, body: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
        path.encode(),
        len(body),
        body,
    )


async def answer(stream: trio.SocketStream) -> bytes:
    """Return everything until the connection ends."""
    received = b""
    while more := await stream.receive_some(65536):
        received += more
    return received


async def test_running_publishes_are_answered(tmp_path: Path) -> None:
    files = HeldFiles()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        async with running_broker(tmp_path / "d", files=files) as bound:
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.publish("t", b"makes the segment")
            files.hold("sync")
            http = await stack.enter_async_context(tcp(bound.http_address, post("/pub?topic=t", b"http")))
            await files.reached()
            await client.send(pub("t", b"tcp"))
            await settle()
            nursery.start_soon(let_go_when_all_wait, files)
        await client.ok()
        assert await client.frame() is None
        assert (await answer(http)).startswith(b"HTTP/1.1 200 OK\r\n")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        assert {(await client.message()).body for _ in range(3)} == {b"makes the segment", b"tcp", b"http"}


async def let_go_when_all_wait(files: HeldFiles) -> None:
    await settle()
    files.release()


async def test_commands_during_the_stop_are_refused(tmp_path: Path) -> None:
    """While the stop waits for the disk, nothing is accepted that would not be stored."""
    files = HeldFiles()
    refused: list[bytes] = []
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        async with running_broker(tmp_path / "d", files=files) as bound:
            client = await stack.enter_async_context(connected(bound.tcp_address))
            await client.publish("t", b"makes the segment")
            late = await stack.enter_async_context(connected(bound.tcp_address))
            http = await stack.enter_async_context(
                tcp(bound.http_address, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            )
            files.hold("sync")
            await client.send(pub("t", b"under way"))
            await files.reached()

            async def come_late() -> None:
                await settle()
                await http.send_all(post("/pub?topic=t", b"late"))
                await late.send(pub("t", b"late"))
                refused.append((await late.error()).encode())
                await settle()
                files.release()

            nursery.start_soon(come_late)
        assert (await answer(http)).endswith(b'{"message":"EXITING"}')
        assert refused == [b"E_PUB_FAILED PUB failed exiting"]
        await client.ok()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=10)
        assert [(await client.message()).body for _ in range(2)] == [b"makes the segment", b"under way"]
        await client.nothing_more()
