"""Tests for HTTP connections over real sockets, served by a task each or by a poller; some with other HTTP
clients.
"""

import logging
import re
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from functools import partial

import httpx
import pytest
import trio
from trio.testing import memory_stream_pair

from broker.support import serve_clients
from trio_nsq.event_loop.reactor import Poller
from trio_nsq.http.connection import OnRequest
from trio_nsq.http.messages import CutOff, HTTPError, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection

LIMIT_BYTES = 1000
HOST = b"Host: localhost\r\n"
POLLED = False


@pytest.fixture(autouse=True, params=[False, True], ids=["task", "poller"])
def polled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller for the clients of `serving`, or None."""
    monkeypatch.setattr(sys.modules[__name__], "POLLED", request.param)


async def ping(request: Request) -> Response:
    return Response.text("OK")


async def echo(request: Request) -> Response:
    return Response.json([request.path, request.query, request.body.decode(), request.peer])


def begin_ping(request: Request, then: Callable[[Response], None]) -> bool:
    trio.lowlevel.current_trio_token().run_sync_soon(then, Response.text("OK"))
    return True


async def refuse(request: Request) -> Response:
    raise HTTPError(400, "INVALID_TOPIC")


async def crash(request: Request) -> Response:
    raise ZeroDivisionError


async def break_inside(request: Request) -> Response:
    raise trio.BrokenResourceError  # from something else than the client's connection


async def split_header(request: Request) -> Response:
    return Response(headers={"Location": "/\r\nEvil: 1"})


async def nothing(request: Request) -> Response:
    return None  # type: ignore[return-value]  # the mistake to be tested


async def counted() -> AsyncGenerator[bytes, None]:
    for piece in (b"one", b"", b"two", b"three"):
        yield piece


async def cut_off() -> AsyncGenerator[bytes, None]:
    yield b"one"
    raise ZeroDivisionError


async def broken_inside() -> AsyncGenerator[bytes, None]:
    yield b"one"
    raise trio.BrokenResourceError


async def broken_at_its_end() -> AsyncGenerator[bytes, None]:
    try:
        yield b"one"
    finally:
        raise ZeroDivisionError


def log_route(body: Callable[[], AsyncGenerator[bytes, None]]) -> Route:
    async def handler(request: Request) -> Response:
        return Response(body=body(), content_type=None)

    return Route("GET", "/log", handler)


ROUTES = [
    Route("GET", "/ping", ping, plain=True, begin=begin_ping),
    Route("POST", "/pub", echo, max_body_bytes=LIMIT_BYTES, too_big="MSG_TOO_BIG"),
    Route("GET", "/config/{opt}", echo),
    Route("GET", "/refuse", refuse),
    Route("GET", "/crash", crash),
    Route("GET", "/break", break_inside),
    Route("GET", "/split", split_header),
    Route("GET", "/nothing", nothing),
]


@asynccontextmanager
async def serving(
    routes: Iterable[Route] = ROUTES, on_request: OnRequest | None = None
) -> AsyncIterator[int]:
    """Run a server on a free port. An exception that leaves a connection fails the test."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    poller = Poller() if POLLED else None
    handle = partial(serve_connection, router=Router(routes), on_request=on_request, poller=poller)
    async with trio.open_nursery() as nursery:
        if poller is not None:
            nursery.start_soon(serve_clients, poller)
        nursery.start_soon(trio.serve_listeners, handle, [listener])
        port: int = listener.socket.getsockname()[1]
        yield port
        nursery.cancel_scope.cancel()


async def receive_all(stream: trio.abc.ReceiveStream) -> bytes:
    """Return everything that is received, without the dates."""
    with trio.fail_after(60):
        return undated(b"".join([bytes(data) async for data in stream]))


def undated(data: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]+\r\n", b"", data)


async def receive_exactly(stream: trio.abc.ReceiveStream, expected: bytes) -> None:
    received = b""
    with trio.fail_after(60):
        while len(undated(received)) < len(expected) or b"Date" in undated(received):
            data = await stream.receive_some(1)
            assert data, f"closed after {received!r}"
            received += data
    assert undated(received) == expected


async def exchange(port: int, *parts: bytes, eof: bool = True) -> bytes:
    """Send parts, one in each segment, and return everything that is received."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for part in parts:
            await stream.send_all(part)
        if eof:
            await stream.send_eof()
        return await receive_all(stream)


def get(path: str, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"GET %b HTTP/%b\r\n%b%b\r\n" % (path.encode(), version, HOST, headers)


def error(status: bytes, code: bytes, headers: bytes = b"", close: bool = False) -> bytes:
    body = b'{"message":"%b"}' % code
    return (
        b"HTTP/1.1 %b\r\nX-NSQ-Content-Type: nsq; version=1.0\r\n"
        b"Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n%b%b\r\n%b"
        % (status, len(body), b"Connection: close\r\n" if close else b"", headers, body)
    )


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n\r\nOK"
NOT_ALLOWED = error(b"405 Method Not Allowed", b"METHOD_NOT_ALLOWED", headers=b"Allow: GET, OPTIONS\r\n")
INVALID = error(b"400 Bad Request", b"INVALID_REQUEST", close=True)
CRASHED = error(b"500 Internal Server Error", b"INTERNAL_ERROR")


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        pytest.param(get("/ping"), OK, id="plain"),
        pytest.param(get("/nope"), error(b"404 Not Found", b"NOT_FOUND"), id="404"),
        pytest.param(get("/refuse"), error(b"400 Bad Request", b"INVALID_TOPIC"), id="HTTPError"),
        pytest.param(get("/ping?%zz"), error(b"400 Bad Request", b"INVALID_REQUEST"), id="bad query"),
        pytest.param(
            b"HEAD /ping HTTP/1.1\r\n" + HOST + b"\r\n",
            NOT_ALLOWED.partition(b"{")[0],
            id="HEAD is 405, without the body",
        ),
        pytest.param(b"POST /ping HTTP/1.1\r\n" + HOST + b"\r\n", NOT_ALLOWED, id="405"),
        pytest.param(
            b"OPTIONS /ping HTTP/1.1\r\n" + HOST + b"\r\n",
            b"HTTP/1.1 200 OK\r\nX-NSQ-Content-Type: nsq; version=1.0\r\nContent-Length: 0\r\n"
            b"Allow: GET, OPTIONS\r\n\r\n",
            id="OPTIONS",
        ),
        pytest.param(
            get("//PING/?a=%20"),
            b"HTTP/1.1 301 Moved Permanently\r\nX-NSQ-Content-Type: nsq; version=1.0\r\nContent-Length: 0\r\n"
            b"Location: /ping?a=%20\r\n\r\n",
            id="redirect",
        ),
    ],
)
async def test_reply_to_whole_bytewise_and_pipelined_requests(request_: bytes, reply: bytes) -> None:
    async with serving() as port:
        assert await exchange(port, request_) == reply
        assert await exchange(port, *(request_[i : i + 1] for i in range(len(request_)))) == reply
        assert await exchange(port, get("/ping") + request_ + get("/ping")) == OK + reply + OK


async def test_every_answer_has_a_date() -> None:
    async with serving() as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        before = int(time.time())
        await stream.send_all(get("/ping") + get("/nope") + get("/crash") + b"nonsense\r\n\r\n")
        with trio.fail_after(60):
            answers = b"".join([bytes(data) async for data in stream])
        dates = re.findall(r"^Date: (.*)\r$", answers.decode(), re.MULTILINE)
        assert len(dates) == 4
        for date in dates:
            assert date.endswith(" GMT")
            assert before <= parsedate_to_datetime(date).timestamp() <= time.time()


async def test_other_client_gets_the_same_answers() -> None:
    async with serving() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        response = await client.get("/ping")
        assert (response.status_code, response.text) == (200, "OK")
        assert "x-nsq-content-type" not in response.headers
        response = await client.post("/pub", params={"topic": "a b#ephemeral"}, content=b"body")
        assert response.headers["x-nsq-content-type"] == "nsq; version=1.0"
        assert response.json()[:3] == ["/pub", {"topic": "a b#ephemeral"}, "body"]
        response = await client.post("/Pub/?topic=t", content=b"body", follow_redirects=True)
        assert (response.history[0].status_code, response.json()[:3]) == (
            307,
            ["/pub", {"topic": "t"}, "body"],
        )
        response = await client.get("/config/log_level/", follow_redirects=True)
        assert (response.history[0].status_code, response.json()[0]) == (301, "/config/log_level")
        assert (await client.head("/ping")).status_code == 405
        response = await client.request("OPTIONS", "/pub")
        assert (response.status_code, response.headers["allow"]) == (200, "OPTIONS, POST")


async def test_other_client_sends_chunks() -> None:
    async def body() -> AsyncGenerator[bytes, None]:
        for _ in range(10):
            yield b"x" * (LIMIT_BYTES // 10)

    async with serving() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        response = await client.post("/pub", content=body())
        assert response.json()[2] == "x" * LIMIT_BYTES


async def test_keep_alive_uses_one_connection() -> None:
    async with serving() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        peers = [(await client.post("/pub", content=b"x")).json()[3] for _ in range(3)]
        assert len(set(peers)) == 1
        host, _, client_port = peers[0].rpartition(":")
        assert host == "127.0.0.1"
        assert client_port.isdigit()


@pytest.mark.parametrize(("given", "peer"), [(None, b"@"), ("10.0.0.1:5", b"10.0.0.1:5")])
async def test_peer_of_a_unix_socket_is_as_in_nsqd_unless_given(given: str | None, peer: bytes) -> None:
    client, server = (trio.SocketStream(end) for end in trio.socket.socketpair())
    async with client:
        await client.send_all(b"POST /pub HTTP/1.0\r\n\r\n")
        await client.send_eof()
        await serve_connection(server, Router(ROUTES), peer=given)
        assert (await receive_all(client)).endswith(b'["/pub",{},"","%b"]' % peer)


@pytest.mark.parametrize(
    ("version", "headers", "reply_headers"),
    [(b"1.1", b"Connection: close\r\n", b"Connection: close\r\n"), (b"1.0", b"", b"Connection: close\r\n")],
)
async def test_connection_closes_if_the_client_requests_it(
    version: bytes, headers: bytes, reply_headers: bytes
) -> None:
    async with serving() as port:
        reply = await exchange(port, get("/ping", headers, version), eof=False)
        assert reply == OK.replace(b"\r\n\r\n", b"\r\n" + reply_headers + b"\r\n")


async def test_http_10_keep_alive_if_both_agree() -> None:
    request = get("/ping", b"Connection: keep-alive\r\n", b"1.0")
    async with serving() as port:
        reply = await exchange(port, request, request)
        assert reply == OK.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n") * 2


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\r\n", b"GET /ping HTTP/1.1\r\nHost : x\r\n\r\n"])
async def test_malformed_http_is_answered_and_ends_the_connection(garbage: bytes) -> None:
    async with serving() as port:
        assert await exchange(port, get("/ping") + garbage + get("/ping"), eof=False) == OK + INVALID


async def test_long_head_is_answered_and_ends_the_connection() -> None:
    reply = error(b"431 Request Header Fields Too Large", b"HEADERS_TOO_BIG", close=True)
    async with serving() as port:
        assert await exchange(port, b"GET /ping HTTP/1.1\r\nX: " + b"x" * 500_000, eof=False) == reply


TOO_BIG = error(b"413 Request Entity Too Large", b"MSG_TOO_BIG", close=True)


async def test_announced_length_over_the_limit_is_refused_before_the_body() -> None:
    head = b"POST /pub HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % (LIMIT_BYTES + 1)
    async with serving() as port:
        assert await exchange(port, head, eof=False) == TOO_BIG


async def test_refusal_reaches_a_client_that_sends_its_long_body_first() -> None:
    body = b"x" * 1_000_000
    head = b"POST /pub HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body)
    async with serving() as port:
        assert await exchange(port, head + body, eof=False) == TOO_BIG


async def test_chunks_over_the_limit_are_refused() -> None:
    head = b"POST /pub HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"64\r\n" + b"x" * 100 + b"\r\n"
    async with serving() as port:
        assert await exchange(port, head + chunk * 11, eof=False) == TOO_BIG


async def test_continue_is_sent_when_the_body_is_accepted() -> None:
    head = b"POST /pub HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n"
    async with serving() as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(get("/ping") + head % 4)
            await receive_exactly(stream, OK + b"HTTP/1.1 100 Continue\r\n\r\n")
            await stream.send_all(b"bo")
            await stream.send_all(b"dy")
            await stream.send_eof()
            reply = await receive_all(stream)
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"body"' in reply
        assert await exchange(port, head % (LIMIT_BYTES + 1), eof=False) == TOO_BIG


@pytest.mark.parametrize("path", ["/crash", "/break", "/split", "/nothing"])
async def test_exception_of_a_handler_is_logged_and_the_connection_continues(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as port:
        assert await exchange(port, get(path) + get("/ping")) == CRASHED + OK
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("trio_nsq.http", logging.ERROR)
    assert record.exc_info is not None
    assert record.getMessage() == f"GET {path} failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_interrupt_in_a_handler_is_raised_even_while_the_server_stops(
    error: type[BaseException],
) -> None:
    client, server = memory_stream_pair()

    async def interrupt(request: Request) -> Response:
        stopping.cancel()
        raise error

    await client.send_all(get("/interrupt"))
    with pytest.raises(error), trio.CancelScope() as stopping:
        await serve_connection(server, Router([Route("GET", "/interrupt", interrupt)]))
    assert await receive_all(client) == b""


async def test_handlers_are_cancelled_with_the_server() -> None:
    entered, cancelled = trio.Event(), trio.Event()

    async def wait(request: Request) -> Response:
        entered.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.set()
            raise

    async with serving([Route("GET", "/wait", wait)]) as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(get("/wait"))
        await entered.wait()
    assert cancelled.is_set()
    async with stream:
        assert await receive_all(stream) == b""


@pytest.mark.parametrize(
    "part",
    [b"", b"GET /ping HT", get("/ping"), b"POST /pub HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"],
)
async def test_client_that_disconnects_is_not_an_error(part: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(part)
        # With this option, closing resets the connection.
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await stream.aclose()
        assert await exchange(port, get("/ping")) == OK
    assert caplog.records == []


async def test_generated_body_is_sent_in_chunks_and_the_connection_continues() -> None:
    async with serving([*ROUTES, log_route(counted)]) as port:
        reply = await exchange(port, get("/log") + get("/ping"))
        assert reply == (
            b"HTTP/1.1 200 OK\r\nX-NSQ-Content-Type: nsq; version=1.0\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n" + OK
        )
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/log")).text == "onetwothree"


async def test_generated_body_ends_with_the_connection_for_http_10() -> None:
    async with serving([log_route(counted)]) as port:
        reply = await exchange(port, get("/log", b"Connection: keep-alive\r\n", b"1.0"), eof=False)
        assert reply == (
            b"HTTP/1.1 200 OK\r\nX-NSQ-Content-Type: nsq; version=1.0\r\nConnection: close\r\n\r\nonetwothree"
        )


@pytest.mark.parametrize("body", [cut_off, broken_inside, broken_at_its_end])
async def test_exception_of_a_generated_body_truncates_it_and_is_logged(
    body: Callable[[], AsyncGenerator[bytes, None]], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving([*ROUTES, log_route(body)]) as port:
        reply = await exchange(port, get("/log") + get("/ping"), eof=False)
        assert reply.endswith(b"\r\n\r\n3\r\none\r\n")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/log")
    assert [record.getMessage() for record in caplog.records] == ["the response to GET /log was cut off"] * 2
    assert all(record.exc_info for record in caplog.records)


async def test_generated_body_that_cannot_continue_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def gives_up() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise CutOff("its disk is gone")

    async with serving([*ROUTES, log_route(gives_up)]) as port:
        reply = await exchange(port, get("/log") + get("/ping"), eof=False)
        assert reply.endswith(b"\r\n\r\n3\r\none\r\n")
    (record,) = caplog.records
    assert record.getMessage() == "the response to GET /log was cut off: its disk is gone"
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)


async def test_generated_body_is_closed_when_its_client_disconnects(caplog: pytest.LogCaptureFixture) -> None:
    closed = trio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x" * 1_000_000
        finally:
            closed.set()

    async with serving([*ROUTES, log_route(endless)]) as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(get("/log"))
        await stream.receive_some(1)
        await stream.aclose()
        with trio.fail_after(60):
            await closed.wait()
        assert await exchange(port, get("/ping")) == OK
    assert caplog.records == []


async def test_every_answer_is_reported() -> None:
    seen: list[tuple[str, str, int]] = []

    def on_request(request: Request, status: int, seconds: float) -> None:
        assert request.peer.startswith("127.0.0.1:")
        assert 0 <= seconds < 5
        seen.append((request.method, request.path, status))

    async with serving([*ROUTES, log_route(counted)], on_request) as port:
        for request in (b"PUT /crash HTTP/1.1\r\n" + HOST + b"\r\n", get("/crash"), get("/log"), b"\0"):
            await exchange(port, request)
    assert seen == [("PUT", "/crash", 405), ("GET", "/crash", 500), ("GET", "/log", 200), ("", "", 400)]
