"""Tests for routes that share an `AnswerLimiter`, with streams in memory that take data only while the client reads."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from trio_nsq.http.limiting import AnswerLimiter
from trio_nsq.http.messages import Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection
from trio_nsq.server.body_memory import LEAST_BYTES_PER_S, PATIENCE_S, STALL_S

HELD_BYTES = 1000
CLIENTS = 5
PING = b"GET /ping HTTP/1.0\r\n\r\n"
LARGE = b"GET /large HTTP/1.0\r\n\r\n"
PIECES = b"GET /pieces HTTP/1.0\r\n\r\n"


async def ping(request: Request) -> Response:
    return Response.text("OK")


class Service:
    """Routes with a limiter.

    Attributes:
        begun: How many answers were begun.
        at_once: How many were computed at the same time.
        may_go_on: Handlers wait for it.
        fails: `/large` has a bug.
    """

    def __init__(self, most: int = HELD_BYTES, size: int = HELD_BYTES) -> None:
        self.begun = self.at_once = self._running = 0
        self.may_go_on = trio.Event()
        self.may_go_on.set()
        self.fails = False
        self._size = size
        limiter = AnswerLimiter(most)
        self.router = Router(
            [
                Route("GET", "/ping", ping),
                Route("GET", "/large", self.large, limiter=limiter),
                Route("GET", "/pieces", self.pieces, limiter=limiter),
            ]
        )

    async def large(self, request: Request) -> Response:
        self.begun += 1
        await self._compute()
        if self.fails:
            raise ValueError("a bug")
        return Response(200, b"x" * self._size)

    async def pieces(self, request: Request) -> Response:
        self.begun += 1
        return Response(200, self._pieces(), held_bytes=HELD_BYTES)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            await self._compute()
            yield b"y"

    async def _compute(self) -> None:
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        await self.may_go_on.wait()
        self._running -= 1


@asynccontextmanager
async def clients(
    service: Service, requests: Iterable[bytes], host: str = "10.0.0.1"
) -> AsyncIterator[list[trio.abc.Stream]]:
    """Send a request on a connection each, in this order, and read no answers. All have one address."""
    async with trio.open_nursery() as nursery:
        streams: list[trio.abc.Stream] = []
        for request in requests:
            ours, theirs = lockstep_stream_pair()
            nursery.start_soon(partial(serve_connection, theirs, service.router, peer=f"{host}:1"))
            await ours.send_all(request)
            await wait_all_tasks_blocked()
            streams.append(ours)
        yield streams
        nursery.cancel_scope.cancel()


async def answer(stream: trio.abc.Stream) -> bytes:
    """Read an answer to its end, and return its body."""
    found = b""
    try:
        async for data in stream:
            found += data
    except trio.BrokenResourceError:
        pass
    return found.partition(b"\r\n\r\n")[2]


async def test_other_requests_do_not_wait_for_a_limited_one() -> None:
    service = Service()
    service.may_go_on = trio.Event()
    async with clients(service, [LARGE] * CLIENTS + [PING]) as streams:
        assert await answer(streams[-1]) == b"OK"
        assert service.begun == 1
        service.may_go_on.set()
        for stream in streams[:-1]:
            assert await answer(stream) == b"x" * HELD_BYTES
    assert service.begun == CLIENTS
    assert service.at_once == 1


async def test_pieces_are_computed_one_at_a_time() -> None:
    service = Service()
    async with clients(service, [PIECES, PIECES]) as streams:
        assert [await answer(stream) for stream in streams] == [b"yyy"] * 2
    assert service.at_once == 1


async def test_unread_answers_are_few() -> None:
    service = Service()
    async with clients(service, [LARGE, PIECES] * CLIENTS) as streams:
        for done, stream in enumerate(streams):
            assert service.begun <= done + 2  # one is sent, and one waits for its memory
            assert await answer(stream) in (b"x" * HELD_BYTES, b"yyy")
            await wait_all_tasks_blocked()


async def test_client_that_reads_nothing_is_disconnected_for_others(autojump_clock: MockClock) -> None:
    service = Service()
    async with clients(service, [LARGE]) as silent:
        await trio.sleep(2 * PATIENCE_S)
        assert len(await answer(silent[0])) == HELD_BYTES  # no other client has waited
    async with clients(service, [LARGE, LARGE]) as (_, other):
        started = trio.current_time()
        assert len(await answer(other)) == HELD_BYTES
        assert trio.current_time() - started <= PATIENCE_S


async def test_unread_answers_do_not_delay_other_addresses_and_paths(autojump_clock: MockClock) -> None:
    service = Service(10 * HELD_BYTES)
    async with clients(service, [LARGE] * 30) as unread:
        assert service.begun < 10
        async with clients(service, [LARGE], "10.0.0.2") as (other,), clients(service, [PIECES]) as (pieces,):
            assert len(await answer(other)) == HELD_BYTES
            assert await answer(pieces) == b"yyy"
        assert trio.current_time() == 0
        for stream in unread:
            await stream.aclose()


async def test_many_unread_answers_delay_their_own_address_by_seconds(autojump_clock: MockClock) -> None:
    service = Service(10 * HELD_BYTES)
    async with clients(service, [LARGE] * 60 + [LARGE]) as streams:
        assert len(await answer(streams[-1])) == HELD_BYTES
        assert trio.current_time() < 10


async def test_client_that_reads_steadily_is_not_disconnected_for_others(autojump_clock: MockClock) -> None:
    size = 8 * LEAST_BYTES_PER_S
    service = Service(1, size)
    async with clients(service, [LARGE]) as (slow,), clients(service, [LARGE], "10.0.0.2") as (other,):
        found = b""
        async for data in slow:
            found += data
            await trio.sleep(STALL_S * len(data) / (3 * LEAST_BYTES_PER_S))
        assert len(found.partition(b"\r\n\r\n")[2]) == size
        assert trio.current_time() > 2 * STALL_S
        assert len(await answer(other)) == size


async def test_failed_answer_leaves_its_memory() -> None:
    service = Service()
    service.fails = True
    async with clients(service, [LARGE] * 2) as streams:
        for stream in streams:
            assert b"INTERNAL_ERROR" in await answer(stream)


async def test_disconnected_clients_leave_their_memory() -> None:
    service = Service()
    async with clients(service, [LARGE, PIECES, LARGE]) as streams:
        for stream in streams[:2]:
            await stream.aclose()
        assert await answer(streams[2]) == b"x" * HELD_BYTES
