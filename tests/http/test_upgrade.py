"""Tests for the switch of a connection to another protocol, by a task or a poller, over TCP and TLS."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from broker.certificates import Certificates
from broker.support import PATIENCE_S, serve_clients
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.http.connection import IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S
from trio_nsq.http.messages import Request, Response, switching
from trio_nsq.http.prefixed_stream import PrefixedStream
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection
from trio_nsq.tls.client_session import TLSClientSession
from trio_nsq.tls.context import server_context
from trio_nsq.tls.session import TLSSession
from trio_nsq.tls.settings import TLSSettings
from trio_nsq.tls.stream import TLSStream

SWITCH = b"GET /switch HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n"


class Echo:
    """Switches to a protocol that repeats what arrives, in brackets.

    Attributes:
        streams: What took the connections over got.
        reported: The statuses of the answers.
    """

    def __init__(self) -> None:
        self.streams: list[trio.abc.Stream] = []
        self.reported: list[int] = []
        self.router = Router(
            [
                Route("GET", "/switch", self.switch, upgrade="other"),
                Route("GET", "/refuse", self.refuse, upgrade="other"),
                Route("GET", "/ping", self.refuse),
                Route("GET", "/mistake", self.switch),
            ]
        )

    async def switch(self, request: Request) -> Response:
        return switching(self.repeat)

    async def refuse(self, request: Request) -> Response:
        return Response.text("not now")

    async def repeat(self, stream: trio.abc.Stream) -> None:
        self.streams.append(stream)
        async for data in stream:
            await stream.send_all(b"[" + data + b"]")

    def note(self, request: Request, status: int, elapsed_s: float) -> None:
        self.reported.append(status)


@pytest.fixture(params=["task", "poller", "TLS"])
async def echo(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator["Serving"]:
    serving = Serving(request.param, Certificates(tmp_path) if request.param == "TLS" else None)
    async with serving.run():
        yield serving


class Serving:
    """A server on a free port."""

    def __init__(self, kind: str, certificates: Certificates | None = None) -> None:
        self.echo = Echo()
        self.kind = kind
        self._poller = Poller() if kind == "poller" else None
        self._port = 0
        self.client_context: ssl.SSLContext | None = None
        if certificates is not None:
            self.client_context = certificates.client_context()
            settings = TLSSettings(cert=certificates.options["tls_cert"], key=certificates.options["tls_key"])
            context = server_context(settings)
            assert context is not None
            self._context = context

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            if self._poller is not None:
                nursery.start_soon(serve_clients, self._poller)
            serve = partial(trio.serve_tcp, self._serve, 0, host="127.0.0.1")
            listeners = await nursery.start(serve)
            self._port = listeners[0].socket.getsockname()[1]
            yield
            nursery.cancel_scope.cancel()

    async def _serve(self, stream: trio.SocketStream) -> None:
        secure: trio.abc.Stream = stream
        if self.client_context is not None:
            secure = TLSStream(stream, TLSSession(self._context))
            await secure.do_handshake()
        await serve_connection(secure, self.echo.router, on_request=self.echo.note, poller=self._poller)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        stream: Any = await trio.open_tcp_stream("127.0.0.1", self._port)
        if self.client_context is not None:
            stream = TLSStream(stream, TLSClientSession(self.client_context, "127.0.0.1"))
            await stream.do_handshake()
        with trio.fail_after(PATIENCE_S):
            async with stream:
                yield stream


async def received(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        assert more, f"closed after {data!r}"
        data += more
    return data


async def rest(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def test_the_stream_is_taken_over_after_the_answer(echo: Serving) -> None:
    async with echo.connected() as stream:
        await stream.send_all(SWITCH)
        assert await received(stream, len(SWITCHED)) == SWITCHED
        for _ in range(3):
            await stream.send_all(b"hello")
            assert await received(stream, 7) == b"[hello]"
    assert echo.echo.reported == [101]
    (taken,) = echo.echo.streams
    assert isinstance(taken, TLSStream if echo.kind == "TLS" else trio.SocketStream)


async def test_what_came_with_the_request_is_not_lost(echo: Serving) -> None:
    async with echo.connected() as stream:
        await stream.send_all(SWITCH + b"GET / HTTP/1.1\r\n\r\n")
        expected = SWITCHED + b"[GET / HTTP/1.1\r\n\r\n]"
        assert await received(stream, len(expected)) == expected
        await stream.send_all(b"more")
        assert await received(stream, 6) == b"[more]"
    assert isinstance(echo.echo.streams[0], PrefixedStream)


async def test_earlier_requests_are_answered_first(echo: Serving) -> None:
    async with echo.connected() as stream:
        await stream.send_all(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n" + SWITCH + b"x")
        data = b""
        while not data.endswith(SWITCHED + b"[x]"):
            more = await stream.receive_some(1000)
            assert more, data
            data += more
        assert data.startswith(b"HTTP/1.1 200 OK")


async def test_the_connection_ends_with_the_other_protocol(echo: Serving) -> None:
    async with echo.connected() as stream:
        await stream.send_all(SWITCH + b"x")
        await stream.send_eof()
        assert await rest(stream) == SWITCHED + b"[x]"


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /switch HTTP/1.1\r\nHost: x\r\n\r\n", id="no Upgrade"),
        pytest.param(
            b"GET /switch HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
            id="another protocol",
        ),
        pytest.param(b"GET /switch HTTP/1.1\r\nHost: x\r\nUpgrade: other\r\n\r\n", id="no Connection"),
        pytest.param(b"GET /switch HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n", id="HTTP/1.0"),
        pytest.param(
            b"GET /switch HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: other\r\nContent-Length: 2\r\n\r\nab",
            id="a body",
        ),
        pytest.param(
            b"GET /switch HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: other\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="a chunked body",
        ),
    ],
)
async def test_other_requests_are_told_what_to_ask_for(echo: Serving, head: bytes) -> None:
    async with echo.connected() as stream:
        await stream.send_all(head + b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = await rest(stream)
        assert data.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
        assert b"\r\nUpgrade: other\r\n" in data
        assert b"UPGRADE_REQUIRED" in data
        if b"HTTP/1.0" not in head:
            assert data.endswith(b"not now")  # HTTP goes on
    assert not echo.echo.streams


@pytest.mark.parametrize("offered", [b"other", b"OTHER", b"h2c, Other", b"x,other"])
async def test_one_of_the_protocols_offered_is_enough(echo: Serving, offered: bytes) -> None:
    async with echo.connected() as stream:
        await stream.send_all(SWITCH.replace(b"other", offered))
        assert await received(stream, len(SWITCHED)) == SWITCHED


async def test_a_handler_that_does_not_switch_ends_the_connection(echo: Serving) -> None:
    """What follows may be the other protocol."""
    async with echo.connected() as stream:
        await stream.send_all(
            SWITCH.replace(b"/switch", b"/refuse") + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        data = await rest(stream)
        assert data.startswith(b"HTTP/1.1 200 OK")
        assert b"Connection: close" in data
        assert data.count(b"HTTP/1.1") == 1


async def test_a_route_without_a_protocol_cannot_switch(
    echo: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async with echo.connected() as stream:
        await stream.send_all(b"GET /mistake HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await rest(stream)).startswith(b"HTTP/1.1 500")
    assert "no other protocol was asked for" in caplog.text
    assert not echo.echo.streams


async def test_no_deadline_of_http_ends_it(autojump_clock: MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    echo = Echo()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_connection, theirs, echo.router, peer="x"))
        await ours.send_all(SWITCH)
        assert await received(ours, len(SWITCHED)) == SWITCHED
        await trio.sleep(10 * max(IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S))
        await ours.send_all(b"late")
        assert await received(ours, 6) == b"[late]"
        await ours.aclose()


async def test_a_prefix_is_read_in_pieces() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    stream = PrefixedStream(b"abc", ours)
    await theirs.send_all(b"def")
    await theirs.send_eof()
    assert [await stream.receive_some(2) for _ in range(2)] == [b"ab", b"c"]
    assert await stream.receive_some(2) == b"de"
    assert await stream.receive_some() == b"f"
    await stream.send_all(b"x")
    await stream.wait_send_all_might_not_block()
    await stream.send_eof()
    assert await rest(theirs) == b"x"
    assert await stream.receive_some() == b""
    await stream.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await ours.send_all(b"x")
