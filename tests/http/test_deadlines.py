"""Tests for deadlines, in virtual time: with streams in memory, and with socket pairs served by a poller.

Data that is sent to one end of such a pair is readable at the other at once, so the clock does not jump in
between.
"""

import math
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair

from broker.support import serve_clients
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.http.connection import IDLE_TIMEOUT_S, LINGER_S, REQUEST_TIMEOUT_S, OnRequest
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection
from trio_nsq.server.body_memory import BodyMemoryLimit

SLOW_S = 10_000.0

LONG = b"~" * 1_000_000  # more than the socket buffers hold
POLLED = False

PING = b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
POST = b"POST /pub HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"


@pytest.fixture(autouse=True, params=[False, True], ids=["task", "poller"])
def polled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller for the clients of `connected`, or None."""
    monkeypatch.setattr(sys.modules[__name__], "POLLED", request.param)


async def ping(request: Request) -> Response:
    return Response.text("OK")


def begin_ping(request: Request, then: Callable[[Response], None]) -> bool:
    trio.lowlevel.current_trio_token().run_sync_soon(then, Response.text("OK"))
    return True


async def slow(request: Request) -> Response:
    await trio.sleep(SLOW_S)
    return Response.text("OK")


def begin_slow(request: Request, then: Callable[[Response], None]) -> bool:
    def answer() -> None:
        then(Response.text("OK"))

    trio.lowlevel.spawn_system_task(call_later, answer)
    return True


async def call_later(function: Callable[[], None]) -> None:
    await trio.sleep(SLOW_S)
    function()


async def long(request: Request) -> Response:
    return Response(body=LONG)


def begin_long(request: Request, then: Callable[[Response], None]) -> bool:
    trio.lowlevel.current_trio_token().run_sync_soon(then, Response(body=LONG))
    return True


def slow_log(closed: trio.Event) -> Route:
    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            for _ in range(3):
                await trio.sleep(SLOW_S)
                yield LONG
        finally:
            closed.set()

    async def handler(request: Request) -> Response:
        return Response(body=pieces())

    return Route("GET", "/log", handler)


ROUTES = [
    Route("GET", "/ping", ping, begin=begin_ping),
    Route("POST", "/pub", ping, max_body_bytes=10, begin=begin_ping),
    Route("GET", "/slow", slow, begin=begin_slow),
    Route("GET", "/long", long, begin=begin_long),
]


class NoRoom(BodyMemoryLimit):
    """Has no room for large bodies until `room` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.room = trio.Event()

    def admit(self, client: object, missing: int, body: int = 0) -> bool:
        return self.room.is_set()

    async def wait(self, client: object, missing: int | None, body: int = 0, *, kind: str = "") -> None:
        self.waiting += 1
        try:
            await self.room.wait()
        finally:
            self.waiting -= 1

    def leave(self, client: object) -> None:
        pass


class Client:
    """The client's end of a connection."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self.ended = trio.Event()
        self._start_s = trio.current_time()
        self._end_s = math.nan

    def now_s(self) -> float:
        """Seconds since the connection was made."""
        return trio.current_time() - self._start_s

    def end(self) -> None:
        """Wait until the server has closed the connection."""
        self._end_s = self.now_s()
        self.ended.set()

    async def end_s(self) -> object:
        """Return when the server closed the connection, in seconds since it was made; the client does nothing
        meanwhile.
        """
        with trio.fail_after(10 * SLOW_S):
            await self.ended.wait()
        return pytest.approx(self._end_s, abs=1e-3)


@asynccontextmanager
async def connected(
    *more: Route, lockstep: bool = False, on_request: OnRequest | None = None, bodies: NoRoom | None = None
) -> AsyncGenerator[Client, None]:
    """Open a connection. With `lockstep`, the server can send only while the client receives."""
    ours: trio.abc.HalfCloseableStream
    theirs: trio.abc.HalfCloseableStream
    poller = None
    if POLLED:
        poller = Poller()
        ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in socket.socketpair())
    else:
        ours, theirs = lockstep_stream_pair() if lockstep else memory_stream_pair()
    client = Client(ours)
    serve = partial(
        serve_connection,
        theirs,
        Router([*ROUTES, *more]),
        on_request=on_request,
        bodies=bodies,
        poller=poller,
    )

    async def serve_to_the_end() -> None:
        await serve()
        client.end()

    async with trio.open_nursery() as nursery:
        if poller is not None:
            nursery.start_soon(serve_clients, poller)
        nursery.start_soon(serve_to_the_end)
        async with ours:
            yield client
        nursery.cancel_scope.cancel()


async def test_silent_client_is_disconnected(autojump_clock: MockClock) -> None:
    async with connected() as client:
        assert await client.end_s() == IDLE_TIMEOUT_S
        assert await client.stream.receive_some() == b""


async def test_idle_connection_is_closed_some_time_after_its_last_answer(
    autojump_clock: MockClock,
) -> None:
    async with connected() as client:
        for _ in range(3):
            await trio.sleep(0.9 * IDLE_TIMEOUT_S)
            await client.stream.send_all(PING)
            assert await client.stream.receive_some()
        assert await client.end_s() == 3 * 0.9 * IDLE_TIMEOUT_S + IDLE_TIMEOUT_S


async def dribble(client: Client, data: bytes) -> None:
    """Send one byte per second, until that fails or none are left."""
    for i in range(len(data)):
        try:
            await client.stream.send_all(data[i : i + 1])
        except trio.BrokenResourceError:
            return
        await trio.sleep(1)


@pytest.mark.parametrize(
    "start", [b"", POST, PING + PING], ids=["in the head", "in the body", "after other requests"]
)
async def test_slow_request_is_closed(start: bytes, autojump_clock: MockClock) -> None:
    rest = b"GET /" + b"x" * 1000 if start != POST else b"12"
    async with connected() as client:
        await trio.sleep(50)
        if start:
            await client.stream.send_all(start + b"G" if start != POST else start)
            rest = rest[1:]
        await dribble(client, rest)
        assert await client.end_s() == 50 + REQUEST_TIMEOUT_S


async def test_deadline_does_not_run_while_the_request_waits_for_room(autojump_clock: MockClock) -> None:
    bodies = NoRoom()
    async with connected(Route("POST", "/mpub", ping, len(LONG)), bodies=bodies) as client:
        await client.stream.send_all(POST.replace(b"pub", b"mpub").replace(b": 5", b": 1000000"))
        await trio.sleep(10)
        await client.stream.send_all(LONG[:100_000])
        await trio.sleep(1)
        assert bodies.waiting == 1
        await trio.sleep(SLOW_S)
        bodies.room.set()
        assert await client.end_s() == SLOW_S + 1 + REQUEST_TIMEOUT_S


async def test_pipelined_request_has_its_own_time(
    autojump_clock: MockClock,
) -> None:
    async with connected() as client:
        await client.stream.send_all(PING[:5])
        await trio.sleep(20)
        await client.stream.send_all(PING[5:] + PING[:5])
        assert await client.end_s() == 20 + REQUEST_TIMEOUT_S


async def test_request_may_start_late(autojump_clock: MockClock) -> None:
    async with connected() as client:
        await trio.sleep(IDLE_TIMEOUT_S - 1)
        await client.stream.send_all(PING[:5])
        await trio.sleep(REQUEST_TIMEOUT_S - 1)
        await client.stream.send_all(PING[5:])
        assert await client.stream.receive_some()
        assert not client.ended.is_set()


async def test_line_breaks_between_requests_do_not_count(autojump_clock: MockClock) -> None:
    async with connected() as client:
        await dribble(client, b"\r\n" * 1000)
        assert await client.end_s() == IDLE_TIMEOUT_S


async def test_slow_handler_is_allowed_and_reported(autojump_clock: MockClock) -> None:
    took_s: list[float] = []
    async with connected(on_request=lambda request, status, seconds: took_s.append(seconds)) as client:
        await client.stream.send_all(PING.replace(b"ping", b"slow"))
        assert await client.stream.receive_some()
        assert client.now_s() == pytest.approx(SLOW_S)
        assert await client.end_s() == SLOW_S + IDLE_TIMEOUT_S
    assert took_s == [pytest.approx(SLOW_S)]


async def test_client_that_does_not_read_its_answer_is_disconnected(autojump_clock: MockClock) -> None:
    async with connected(lockstep=True) as client:
        await client.stream.send_all(PING.replace(b"ping", b"long"))
        assert await client.end_s() == IDLE_TIMEOUT_S


async def test_generated_body_may_wait_for_its_next_piece(autojump_clock: MockClock) -> None:
    closed = trio.Event()
    async with connected(slow_log(closed)) as client:
        await client.stream.send_all(b"GET /log HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            data = await client.stream.receive_some()
            assert data
            received += bytes(data)
        assert received.count(b"~") == 3 * len(LONG)
        assert closed.is_set()
        assert await client.end_s() == 3 * SLOW_S + IDLE_TIMEOUT_S


async def test_generated_body_is_closed_if_its_client_does_not_read(autojump_clock: MockClock) -> None:
    closed = trio.Event()
    async with connected(slow_log(closed), lockstep=True) as client:
        await client.stream.send_all(b"GET /log HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await client.stream.receive_some(1000)
        assert await client.end_s() == SLOW_S + IDLE_TIMEOUT_S
        assert closed.is_set()


@pytest.mark.parametrize(
    "refused", [b"\0", POST.replace(b": 5", b": 11"), PING.replace(b"keep-alive", b"close")]
)
async def test_client_that_keeps_sending_after_the_last_answer_is_disconnected(
    refused: bytes, autojump_clock: MockClock
) -> None:
    async with connected() as client:
        await client.stream.send_all(refused)
        await dribble(client, b"x" * 1000)
        assert await client.end_s() == LINGER_S


@pytest.mark.parametrize("last", [b"\0", PING.replace(b"keep-alive", b"close")])
async def test_client_sees_the_end_at_once(last: bytes, autojump_clock: MockClock) -> None:
    async with connected() as client:
        await client.stream.send_all(last)
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 ")
        assert await client.stream.receive_some() == b""
        assert client.now_s() == pytest.approx(0, abs=1e-3)


async def test_continue_is_sent_once(autojump_clock: MockClock) -> None:
    async with connected() as client:
        await client.stream.send_all(POST.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked"))
        assert await client.stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await dribble(client, b"5\r\nhello\r\n0\r\n\r\n")
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 200 OK\r\n")
