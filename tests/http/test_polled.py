"""Tests for connections with a poller: answers without the task, at once or later, and requests that need the
task.
"""

import gc
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from broker.support import left_open, open_files_before, serve_clients, settle
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.http.connection import IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S
from trio_nsq.http.messages import HTTPError, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import PolledConnection, serve_connection

PATIENCE_S = 60
LONG = 1_000_000  # more than the socket buffers hold


def post(path: str, body: bytes = b"", headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"POST %b HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"
    return head % (path.encode(), version, len(body), headers) + body


class Desk:
    """Receives requests, and answers them when the test says so.

    Attributes:
        begun, handled: The bodies of requests begun without the task, and of those that the handler got.
        reported: Bodies and statuses that the connection reported.
        connection: The client's end.
        ended: When the connection was closed, in seconds on trio's clock since it was made.
        error: An exception that left the connection.
        waiting: Callbacks for the answers to requests that were begun.
    """

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.handled: list[bytes] = []
        self.reported: list[tuple[bytes, int]] = []
        self.ended = trio.Event()
        self.ended_s = 0.0
        self.error: Exception | None = None
        self.scope = trio.CancelScope()
        self.waiting: deque[Callable[[Response], None]] = deque()
        self.client: trio.SocketStream
        self.poller = Poller()
        routes = [
            Route("POST", "/at-once", self.handle, LONG, begin=self.begin_at_once),
            Route("POST", "/later", self.handle, begin=self.begin_later),
            Route("POST", "/long", self.handle, begin=self.begin_long),
            Route("POST", "/never", self.handle, begin=self.begin_never),
            Route("POST", "/mistake", self.handle, begin=self.begin_mistaken),
            Route("POST", "/refused", self.handle, begin=self.begin_refused),
            Route("POST", "/plain", self.handle),
        ]
        self.router = Router(routes)

    async def handle(self, request: Request) -> Response:
        self.handled.append(request.body)
        if request.body == b"refused":
            raise HTTPError(400, "REFUSED")
        return Response.text("handled")

    def begin_at_once(self, request: Request, then: Callable[[Response], None]) -> bool:
        self.begun.append(request.body)
        self.poller.call_soon(then, Response(body=request.body))
        return True

    def begin_later(self, request: Request, then: Callable[[Response], None]) -> bool:
        self.begun.append(request.body)
        self.waiting.append(then)
        return True

    def begin_long(self, request: Request, then: Callable[[Response], None]) -> bool:
        self.begun.append(request.body)
        self.poller.call_soon(then, Response(body=request.body * LONG))
        return True

    def begin_never(self, request: Request, then: Callable[[Response], None]) -> bool:
        return False

    def begin_refused(self, request: Request, then: Callable[[Response], None]) -> bool:
        raise HTTPError(503, "FULL")

    def begin_mistaken(self, request: Request, then: Callable[[Response], None]) -> bool:
        raise ZeroDivisionError

    def answer(self, status: int = 200) -> None:
        """Answer the first waiting request."""
        self.waiting.popleft()(Response(status, b"later"))

    def note(self, request: Request, status: int, seconds: float) -> None:
        self.reported.append((request.body, status))

    async def serve(self, stream: trio.SocketStream) -> None:
        start_s = trio.current_time()
        with self.scope:
            try:
                await serve_connection(
                    stream,
                    self.router,
                    on_request=self.note,
                    poller=self.poller,
                )
            except Exception as exc:
                self.error = exc
        self.ended_s = trio.current_time() - start_s
        self.ended.set()

    async def send(self, data: bytes) -> None:
        """Send, and let it be answered as far as possible."""
        await self.client.send_all(data)
        await settle()

    def send_at_once(self, data: bytes, *, end: bool = False) -> None:
        """Send before the poller looks; `end`: then close the sending side."""
        with socket.socket(fileno=os.dup(self.client.socket.fileno())) as sock:
            assert sock.send(data) == len(data)
            if end:
                sock.shutdown(socket.SHUT_WR)

    async def answers(self, *bodies: bytes) -> None:
        """Check that answers with these bodies arrive in order, and nothing after them."""
        received = b""
        with trio.fail_after(PATIENCE_S):
            for body in bodies:
                while (end := received.find(b"\r\n\r\n") + 4) < 4 or len(received) < end + len(body):
                    more = await self.client.receive_some(LONG)
                    assert more, f"closed after {received[:1000]!r}"
                    received += more
                assert received[end : end + len(body)] == body
                assert b"Content-Length: %d\r\n" % len(body) in received[:end]
                received = received[end + len(body) :]
        assert received == b""

    async def closed(self) -> None:
        """Check that the connection is closed without more data."""
        with trio.fail_after(PATIENCE_S):
            assert await self.client.receive_some() == b""
            await self.ended.wait()

    async def end_s(self) -> object:
        """Return when the connection is closed; the client does nothing meanwhile."""
        with trio.fail_after(100 * IDLE_TIMEOUT_S):
            await self.ended.wait()
        return pytest.approx(self.ended_s, abs=0.1)


@asynccontextmanager
async def sitting() -> AsyncIterator[Desk]:
    """Run a desk with one client."""
    desk = Desk()
    desk.client, theirs = (
        trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in socket.socketpair()
    )
    async with trio.open_nursery() as nursery, desk.client:
        nursery.start_soon(serve_clients, desk.poller)
        nursery.start_soon(desk.serve, theirs)
        await settle()  # the task first reads what has arrived, then gives the connection to the poller
        yield desk
        nursery.cancel_scope.cancel()


async def test_immediate_answer_needs_no_task() -> None:
    async with sitting() as desk:
        for body in (b"1", b"2", b"3"):
            await desk.send(post("/at-once", body))
            await desk.answers(body)
        await desk.send(post("/at-once", b"4") + post("/at-once", b"5"))
        await desk.answers(b"4", b"5")
        assert desk.begun == [b"1", b"2", b"3", b"4", b"5"]
        assert desk.handled == []
        assert desk.reported == [(body, 200) for body in desk.begun]


async def test_immediate_refusal_needs_no_task() -> None:
    async with sitting() as desk:
        await desk.send(post("/refused", b"1") + post("/at-once", b"2") + post("/refused", b"3"))
        await desk.answers(b'{"message":"FULL"}', b"2", b'{"message":"FULL"}')
        assert desk.handled == []
        assert desk.reported == [(b"1", 503), (b"2", 200), (b"3", 503)]


async def test_other_requests_go_to_the_handler() -> None:
    """Also the requests behind them, until the poller has the connection again."""
    async with sitting() as desk:
        await desk.send(post("/never", b"1") + post("/at-once", b"2") + post("/plain", b"refused"))
        await desk.answers(b"handled", b"handled", b'{"message":"REFUSED"}')
        assert desk.handled == [b"1", b"2", b"refused"]
        await desk.send(post("/at-once", b"3"))
        await desk.answers(b"3")
        assert desk.begun == [b"3"]
        assert desk.reported == [(b"1", 200), (b"2", 200), (b"refused", 400), (b"3", 200)]


async def test_pipelined_requests_wait_for_the_answers_before_them() -> None:
    async with sitting() as desk:
        waiting = [post("/later", b"1"), post("/at-once", b"2"), post("/later", b"3"), post("/plain", b"4")]
        await desk.send(b"".join(waiting))
        assert desk.begun == [b"1"]
        desk.answer()
        await settle()
        await desk.answers(b"later", b"2")
        assert desk.begun == [b"1", b"2", b"3"]
        assert desk.handled == []
        desk.answer(503)
        await desk.answers(b"later", b"handled")
        await settle()
        assert desk.reported == [(b"1", 200), (b"2", 200), (b"3", 503), (b"4", 200)]


async def test_data_during_an_answer_is_read_afterwards() -> None:
    """The poller was notified of it before, and sleeps."""
    async with sitting() as desk:
        await desk.send(post("/later", b"1"))
        await desk.send(post("/at-once", b"2")[:-1])
        await desk.send(b"2" + post("/at-once", b"3"))
        assert desk.begun == [b"1"]
        desk.answer()
        await desk.answers(b"later", b"2", b"3")
        assert desk.handled == []
        await settle()
        await desk.send(post("/at-once", b"4"))
        await desk.answers(b"4")


async def test_request_in_parts_needs_no_task() -> None:
    async with sitting() as desk:
        body = b"~" * 60_000  # these arrive in different reads
        for part in (
            post("/at-once", body)[:30_000],
            post("/at-once", body)[30_000:] + post("/at-once", b"2"),
        ):
            await desk.send(part)
        await desk.answers(body, b"2")
        assert desk.handled == []


async def test_request_longer_than_a_read_needs_no_task() -> None:
    async with sitting() as desk:
        body = b"~" * 100_000
        desk.send_at_once(post("/at-once", body))
        await desk.answers(body)
        assert desk.handled == []


async def test_many_requests_in_one_read() -> None:
    """Calls are not nested."""
    async with sitting() as desk:
        desk.send_at_once(post("/at-once", b"1") * 600)
        received = b""
        with trio.fail_after(PATIENCE_S):
            while received.count(b"HTTP/1.1 200 OK\r\n") < 600:
                received += await desk.client.receive_some(LONG)
        assert len(desk.begun) + len(desk.handled) == 600  # there may be no room for all answers at once
        assert desk.error is None


async def test_requests_that_arrive_with_the_end_are_answered() -> None:
    async with sitting() as desk:
        desk.send_at_once(post("/at-once", b"1") + post("/plain", b"2"), end=True)
        await desk.answers(b"1", b"handled")
        await desk.closed()
    async with sitting() as desk:
        desk.send_at_once(post("/later", b"1"), end=True)
        await settle()
        desk.answer()
        await desk.answers(b"later")
        await desk.closed()


async def test_client_that_closes_its_sending_side_gets_its_answers() -> None:
    async with sitting() as desk:
        await desk.client.send_all(post("/later", b"1") + post("/at-once", b"2") + post("/plain", b"3"))
        await desk.client.send_eof()
        await settle()
        assert desk.begun == [b"1"]
        desk.answer()
        await desk.answers(b"later", b"2", b"handled")
        await desk.closed()


async def test_client_that_leaves_before_its_answer() -> None:
    before = open_files_before()
    async with sitting() as desk:
        await desk.client.send_all(post("/later", b"1") + post("/later", b"2"))
        await settle()
        await desk.client.aclose()
        await settle()
        assert not desk.ended.is_set()
        desk.answer()
        with trio.fail_after(PATIENCE_S):
            await desk.ended.wait()
        assert desk.begun == [b"1"]
        assert desk.error is None
    assert not left_open(before)


async def test_answer_to_a_closed_connection_is_dropped() -> None:
    before = open_files_before()
    async with sitting() as desk:
        await desk.send(post("/later", b"1") + post("/later", b"2"))
        desk.scope.cancel()
        await desk.closed()
        desk.answer()
        assert desk.begun == [b"1"]
        assert desk.reported == []
    assert not left_open(before)


async def test_last_request_goes_to_the_task() -> None:
    async with sitting() as desk:
        await desk.send(post("/at-once", b"1", version=b"1.0", headers=b"Connection: keep-alive\r\n"))
        await desk.send(post("/at-once", b"2", headers=b"Connection: close\r\n") + b"what comes behind it")
        await desk.answers(b"1", b"handled")
        await desk.client.send_all(b"more")
        await desk.client.send_eof()
        await desk.closed()


async def test_body_is_generated_if_the_client_waits_for_it() -> None:
    async with sitting() as desk:
        request = post("/at-once", b"body", headers=b"Expect: 100-continue\r\n")
        await desk.send(request[:-4])
        received = await desk.client.receive_some()
        assert received == b"HTTP/1.1 100 Continue\r\n\r\n"
        await desk.send(request[-4:])
        await desk.answers(b"body")
        assert desk.handled == []


async def test_slow_reader_gets_every_answer_complete_and_in_order() -> None:
    async with sitting() as desk:
        await desk.send(post("/long", b"1") + post("/at-once", b"2") + post("/long", b"3"))
        assert desk.begun == [b"1"]  # answers are not made before they can be sent
        await desk.answers(b"1" * LONG, b"handled", b"handled")
        await settle()
        await desk.send(post("/at-once", b"4"))
        await desk.answers(b"4")


async def test_bug_ends_the_connection_and_nothing_else() -> None:
    async with sitting() as desk:
        await desk.send(post("/at-once", b"1") + post("/mistake"))
        await desk.answers(b"1")
        await desk.closed()
        assert isinstance(desk.error, ZeroDivisionError)


# ---------------------------------------------------------------------- deadlines


async def test_deadline_is_suspended_while_an_answer_is_made(autojump_clock: MockClock) -> None:
    async with sitting() as desk:
        await desk.client.send_all(post("/later", b"1") + post("/later", b"2")[:-1])
        await trio.sleep(50 * IDLE_TIMEOUT_S)
        assert not desk.ended.is_set()
        desk.answer()
        await desk.answers(b"later")
        assert await desk.end_s() == 50 * IDLE_TIMEOUT_S + REQUEST_TIMEOUT_S


async def test_client_that_reads_no_answer_is_disconnected(autojump_clock: MockClock) -> None:
    async with sitting() as desk:
        await trio.sleep(IDLE_TIMEOUT_S / 2)
        await desk.client.send_all(post("/later", b"1") + post("/long", b"2"))
        await trio.sleep(IDLE_TIMEOUT_S)
        desk.answer()
        assert await desk.end_s() == 2.5 * IDLE_TIMEOUT_S


@pytest.mark.parametrize("path", ["/at-once", "/plain"])
async def test_client_that_is_idle_for_too_long_is_disconnected(autojump_clock: MockClock, path: str) -> None:
    async with sitting() as desk:
        for n in range(20):
            await desk.client.send_all(post(path, b"%d" % n))
            await trio.sleep(0.37 * IDLE_TIMEOUT_S)
        assert await desk.end_s() == 19 * 0.37 * IDLE_TIMEOUT_S + IDLE_TIMEOUT_S


async def dribble(client: trio.SocketStream, data: bytes) -> None:
    """Send one byte per second."""
    for n in range(len(data)):
        await client.send_all(data[n : n + 1])
        await trio.sleep(1)


async def test_request_that_starts_late_has_its_full_time_and_no_more(autojump_clock: MockClock) -> None:
    request = post("/at-once", b"~" * 1000)
    async with sitting() as desk:
        await trio.sleep(0.9 * IDLE_TIMEOUT_S)
        await desk.client.send_all(request[:10])
        await trio.sleep(0.9 * REQUEST_TIMEOUT_S)
        await desk.client.send_all(request[10:])
        await desk.answers(b"~" * 1000)
        await trio.sleep(0.5 * IDLE_TIMEOUT_S)
        with pytest.raises(trio.BrokenResourceError):
            await dribble(desk.client, request)
        assert await desk.end_s() == 1.4 * IDLE_TIMEOUT_S + 1.9 * REQUEST_TIMEOUT_S


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("path", ["/at-once", "/later", "/plain"])
async def test_closed_connection_is_freed_at_once(path: str) -> None:
    async with sitting() as desk:
        await desk.send(post(path, b"1"))
        if desk.waiting:
            desk.answer()
        gc.collect()
        gc.disable()
        try:
            await desk.client.aclose()
            await settle()
            assert desk.ended.is_set()
            assert not any(isinstance(thing, PolledConnection) for thing in gc.get_objects())
        finally:
            gc.enable()
