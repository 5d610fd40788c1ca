"""What a guard decides, and which connections make room for others: over streams in memory."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import MemoryReceiveStream, MemorySendStream, memory_stream_pair, wait_all_tasks_blocked

from trio_nsq.http.connection import WaitingClients
from trio_nsq.http.decisions import ALLOW, NEEDS_LOOKUP, Allow, Decision, Deny, RequestGuard
from trio_nsq.http.messages import EndOfAnswer, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection

HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"
LIMIT_BYTES = 10


class Pages:
    """Routes whose answers are generated. `closed` is set when `/forever` is."""

    def __init__(self) -> None:
        self.closed = trio.Event()
        self.router = Router(
            [
                Route("GET", "/ping", self._ping),
                Route("POST", "/echo", self._echo),
                Route("GET", "/three", self._three, notices_end=True),
                Route("GET", "/forever", self._forever, notices_end=True),
            ]
        )

    async def _ping(self, request: Request) -> Response:
        return Response.text("pong")

    async def _echo(self, request: Request) -> Response:
        return Response.text(request.body.decode())

    async def _three(self, request: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            for piece in (b"one", b"two", b"six"):
                await wait_all_tasks_blocked()
                yield piece

        return Response(200, pieces())

    async def _forever(self, request: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"begun"
                await trio.sleep_forever()
            finally:
                self.closed.set()

        return Response(200, pieces())


class Decides:
    """A guard with one decision. `pieces`: after so many, answers end."""

    def __init__(self, decision: Decision, pieces: int = 9) -> None:
        self._decision = decision
        self._pieces = pieces

    def check(self, request: Request, route: Route | None) -> Decision:
        return self._decision

    async def look_up(self, request: Request, route: Route | None) -> Allow | Deny:
        await trio.lowlevel.checkpoint()
        return Allow(LIMIT_BYTES) if request.path != "/ping" else Deny(Response.text("no", 403))

    def is_current(self, request: Request, route: Route) -> bool:
        return True

    def refuse_late(self, request: Request, route: Route) -> Response:
        raise AssertionError

    def check_again(self, request: Request, route: Route) -> None:
        self._pieces -= 1
        if self._pieces < 0:
            raise EndOfAnswer


@asynccontextmanager
async def connected(
    router: Router, guard: RequestGuard | None = None, waiting: WaitingClients | None = None
) -> AsyncIterator[trio.StapledStream[MemorySendStream, MemoryReceiveStream]]:
    """Serve one client, and return its stream."""
    client, server = memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            await serve_connection(server, router, peer="c:1", guard=guard, waiting=waiting)

        nursery.start_soon(serve)
        yield client
        nursery.cancel_scope.cancel()


async def answer_to(request: bytes, router: Router, guard: RequestGuard | None = None) -> bytes:
    """Send a request that is the last one of its connection, and return the answer."""
    async with connected(router, guard) as client:
        await client.send_all(request)
        await client.send_stream.aclose()
        return b"".join([bytes(piece) async for piece in client])


async def test_an_answer_is_closed_when_its_client_disconnects() -> None:
    pages = Pages()
    async with connected(pages.router) as client:
        await client.send_all(b"GET /forever" + HEAD + b"\r\n")
        while not bytes(await client.receive_some()).endswith(b"begun\r\n"):
            pass
        await client.send_stream.aclose()
        with trio.fail_after(30):
            await pages.closed.wait()


async def test_a_request_that_arrives_while_an_answer_is_sent_is_answered_next() -> None:
    async with connected(Pages().router) as client:
        await client.send_all(b"GET /three" + HEAD + b"\r\n")
        received = bytes(await client.receive_some())
        await client.send_all(b"GET /ping" + HEAD + b"\r\n")
        while not received.endswith(b"pong"):
            received += await client.receive_some()
        body = received.partition(b"\r\n\r\n")[2]
        assert body.startswith(b"3\r\none\r\n3\r\ntwo\r\n3\r\nsix\r\n0\r\n\r\nHTTP/1.1 200 ")


async def test_a_guard_ends_an_answer_properly() -> None:
    async with connected(Pages().router, Decides(ALLOW, pieces=1)) as client:
        await client.send_all(b"GET /three" + HEAD + b"\r\n")
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await client.receive_some()
        assert b"one" in received
        assert b"two" not in received


async def test_a_guard_limits_the_body() -> None:
    router = Pages().router
    for decision in (Allow(LIMIT_BYTES), NEEDS_LOOKUP):
        guard = Decides(decision)
        short = b"POST /echo" + HEAD + b"Connection: close\r\nContent-Length: 10\r\n\r\n0123456789"
        assert (await answer_to(short, router, guard)).endswith(b"0123456789")
        announced = b"POST /echo" + HEAD + b"Content-Length: 11\r\n\r\n"
        assert b" 413 " in await answer_to(announced, router, guard)
        chunks = b"POST /echo" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n8\r\n01234567\r\n"
        assert b" 413 " in await answer_to(chunks + b"8\r\n01234567\r\n", router, guard)


async def test_a_lookup_may_deny() -> None:
    request = b"GET /ping" + HEAD + b"Connection: close\r\n\r\n"
    assert b" 403 " in await answer_to(request, Pages().router, Decides(NEEDS_LOOKUP))
    assert b" 418 " in await answer_to(request, Pages().router, Decides(Deny(Response.text("no", 418))))


async def test_the_connection_that_waits_longest_makes_room() -> None:
    router, waiting = Pages().router, WaitingClients()
    async with (
        connected(router, waiting=waiting) as busy,
        connected(router, waiting=waiting) as first,
        connected(router, waiting=waiting) as second,
    ):
        for client in (busy, second, first):
            await client.send_all(b"GET /ping" + HEAD + b"\r\n")
            await client.receive_some()
            await wait_all_tasks_blocked()
        await busy.send_all(b"POST /echo" + HEAD + b"Content-Length: 10\r\n\r\n")  # its head is complete
        await second.send_all(b"GET /ping" + HEAD)  # a part of a head does not count
        await wait_all_tasks_blocked()
        for client in (second, first):
            assert waiting.end_longest()
            assert await client.receive_some() == b""
        assert not waiting.end_longest()
        await busy.send_all(b"0123456789")
        assert bytes(await busy.receive_some()).endswith(b"0123456789")
        await wait_all_tasks_blocked()
        assert waiting.end_longest()


async def test_the_router_answers_other_versions() -> None:
    class Strict(Router):
        other_version = Response.text("no", 505)

    for head in (b"PRI * HTTP/2.0\r\n\r\n", b"GET /ping HTTP/2.0\r\nHost: localhost\r\n\r\n"):
        assert (await answer_to(head, Strict(()))).startswith(b"HTTP/1.1 505 ")
        assert (await answer_to(head, Router(()))).startswith(b"HTTP/1.1 400 ")


async def test_chunks_of_http_10_are_refused() -> None:
    """RFC 9112 6.1: a proxy may take the end of the connection for the end of the body."""
    head = b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert (await answer_to(head, Pages().router)).startswith(b"HTTP/1.1 400 ")
