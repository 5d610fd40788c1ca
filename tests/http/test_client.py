"""Tests for the HTTP client, with correct and faulty servers."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count

import pytest
import trio
import trio.testing

from trio_nsq.http.client import Answer, HTTPClient, NoConnection, NotHTTP, RequestFailed
from trio_nsq.http.urls import URL

HEAD = b"HTTP/1.1 200 OK\r\nX-Some: thing\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def answering(*pieces: bytes, closes: bool = True) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Run a server that sends these pieces; yield its address and its requests."""
    asked: list[bytes] = []
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            asked.append(bytes(await stream.receive_some(65536)))
            for piece in pieces:
                await stream.send_all(piece)
                await trio.sleep(0)
            if not closes:
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}", asked
        nursery.cancel_scope.cancel()


def client(keep_alive_s: float = 0) -> HTTPClient:
    return HTTPClient(
        connect_timeout_s=5, request_timeout_s=20, max_answer_bytes=1000, keep_alive_s=keep_alive_s
    )


async def get(address: str) -> Answer:
    return await client().start("GET", URL.parse(f"http://{address}/a?b=c"), {"Accept": "*/*"})


async def read(answer: Answer) -> bytes:
    body = b""
    while piece := await answer.receive():
        body += piece
    assert await answer.receive() == b""
    return body


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([HEAD + b"Content-Length: 5\r\n\r\nhello"], b"hello"),
        ([HEAD + b"Content-Length: 0\r\n\r\n"], b""),
        ([CHUNKED, b"5\r\nhello\r\n", b"1\r\n!\r\n", b"0\r\n\r\n"], b"hello!"),
        ([CHUNKED + b"5\r\nhe", b"llo\r", b"\n0", b"\r\n\r\n"], b"hello"),
        ([bytes([byte]) for byte in CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"], b"hello"),
    ],
)
async def test_answers(pieces: list[bytes], body: bytes) -> None:
    async with answering(*pieces) as (address, asked):
        answer = await get(address)
        assert (answer.status, answer.headers["x-some"]) == (200, "thing")
        assert await read(answer) == body
        await answer.aclose()
        assert asked[0] == f"GET /a?b=c HTTP/1.1\r\nHost: {address}\r\nAccept: */*\r\n\r\n".encode()


async def test_other_status_is_an_answer() -> None:
    async with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno") as (address, _):
        answer = await get(address)
        assert answer.status == 404
        assert await read(answer) == b"no"
        await answer.aclose()


async def test_body_is_read_before_its_end() -> None:
    async with answering(CHUNKED + b"5\r\nhello\r\n", closes=False) as (address, _):
        answer = await get(address)
        assert await answer.receive() == b"hello"
        await answer.aclose()


@pytest.mark.parametrize(
    ("pieces", "is_http"),
    [
        ([], True),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], False),
        ([HEAD], True),
        ([b"HTTP/1.1 2OO OK\r\n\r\n"], False),
    ],
)
async def test_invalid_answers(pieces: list[bytes], is_http: bool) -> None:
    async with answering(*pieces) as (address, _):
        with pytest.raises(RequestFailed) as caught:
            await get(address)
        assert isinstance(caught.value, NotHTTP) is not is_http


@pytest.mark.parametrize(
    ("pieces", "is_http"),
    [
        ([CHUNKED, b"5\r\nhe"], True),
        ([CHUNKED, b"5\r\nhello\r\n"], True),
        ([HEAD + b"Content-Length: 5\r\n\r\nhe"], True),
        ([CHUNKED, b"x\r\n"], False),
    ],
)
async def test_truncated_answers(pieces: list[bytes], is_http: bool) -> None:
    async with answering(*pieces) as (address, _):
        answer = await get(address)
        with pytest.raises(RequestFailed) as caught:
            await read(answer)
        assert isinstance(caught.value, NotHTTP) is not is_http
        await answer.aclose()


async def test_nobody_listens() -> None:
    with pytest.raises(NoConnection, match="Connection refused"):
        await get("127.0.0.1:1")


@asynccontextmanager
async def repeating(begin: bytes, again: Callable[[int], bytes], interval_s: float) -> AsyncIterator[str]:
    """Run a server that sends `begin`, and then, without an end, what `again` returns for 0, 1 and so on."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(begin)
            for number in count():
                await stream.send_all(again(number))
                await trio.sleep(interval_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(lambda number: b"A" * 1000, id="one"),
        pytest.param(lambda number: b"A: b\r\n" * 100, id="the same"),
        pytest.param(lambda number: b"A%d: b\r\n" % number * 100, id="others"),
    ],
)
async def test_head_without_an_end(again: Callable[[int], bytes]) -> None:
    async with repeating(HEAD, again, 0) as address:
        with trio.fail_after(15), pytest.raises(NotHTTP):
            await get(address)


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        pytest.param(HEAD, b"A", id="headers"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", id="continue"),
    ],
)
async def test_head_that_does_not_end_in_time(begin: bytes, again: bytes) -> None:
    http = HTTPClient(connect_timeout_s=5, request_timeout_s=0.2, max_answer_bytes=1000)
    async with repeating(begin, lambda number: again, 0.01) as address:
        with trio.fail_after(15), pytest.raises(RequestFailed, match=r"no answer within 0\.2 s"):
            await http.start("GET", URL.parse(f"http://{address}/"), {})


async def test_answer_that_is_too_long() -> None:
    async with answering(HEAD + b"Content-Length: 1001\r\n\r\n" + bytes(1001)) as (address, _):
        with pytest.raises(RequestFailed, match="longer than 1000 bytes"):
            await client().request("GET", f"http://{address}/")


@pytest.mark.parametrize("part", [HEAD, CHUNKED + b"5\r\nhello\r\n"])
async def test_cancelled_answer_closes_its_connection(part: bytes) -> None:
    """Also while the rest of the body is read: the caller closes an answer within the cancelled scope."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    has_asked, is_closed = trio.Event(), trio.Event()

    async def cancel(scope: trio.CancelScope) -> None:
        await has_asked.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        scope.cancel()

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(part)
            while await stream.receive_some():
                has_asked.set()
        is_closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        with trio.CancelScope() as reading:
            nursery.start_soon(cancel, reading)
            url = URL.parse(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/")
            async with aclosing(await client(keep_alive_s=5).start("GET", url, {})) as answer:
                await read(answer)
        assert reading.cancelled_caught
        with trio.fail_after(20):
            await is_closed.wait()
        nursery.cancel_scope.cancel()


async def test_connection_is_kept_after_an_answer_that_was_read_to_its_end() -> None:
    """nsqd's own requests use a new one each time."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    connections = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        while await stream.receive_some():
            await stream.send_all(HEAD + b"Content-Length: 5\r\n\r\nhello")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        url = URL.parse(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/")
        for keep_alive_s, expected in ((5, 1), (0, 3)):
            http, connections = client(keep_alive_s), 0
            for _ in range(3):
                async with aclosing(await http.start("GET", url, {})) as answer:
                    assert await read(answer) == b"hello"
            assert connections == expected
            await http.aclose()
        nursery.cancel_scope.cancel()


WHOLE = [
    HEAD + b"Content-Length: 5\r\n\r\nhello",
    HEAD + b"content-length:0\r\n\r\n",
    HEAD.replace(b"200 OK", b"204 No Content") + b"\r\n",
    HEAD.replace(b"200 OK", b"304 Not Modified") + b"\r\n",
    CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"0\r\n\r\n",
    HEAD + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    CHUNKED + b"2\r\nno\r\n0\r\nX-Trailer: 1\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\nx",
    HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 0\n\n",
    HEAD + b"Content-Length: 900\r\n\r\n" + b"x" * 900,
]
STRAY = [
    b"",
    b"\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"0\r\n\r\n",
]


@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("stray", STRAY)
@pytest.mark.parametrize("answer", WHOLE)
async def test_what_follows_an_answer_is_not_the_next_one(
    answer: bytes, stray: bytes, bytewise: bool
) -> None:
    """The connection is used again only if the server sent nothing but its answer."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    connections = requests = 0

    async def received(stream: trio.SocketStream) -> bytes:
        try:
            return bytes(await stream.receive_some())
        except trio.BrokenResourceError:
            return b""

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal connections, requests
        connections += 1
        while await received(stream):
            requests += 1
            if requests > 1:
                await stream.send_all(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
            elif bytewise:
                for byte in answer[:-1]:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(0)
                await stream.send_all(answer[-1:] + stray)
            else:
                await stream.send_all(answer + stray)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        url = URL.parse(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/")
        http, statuses = client(60), []
        for _ in range(3):
            async with aclosing(await http.start("GET", url, {})) as found:
                statuses.append(found.status)
                await read(found)
        assert statuses[1:] == [500, 500]
        assert connections == (2 if stray else 1)
        await http.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("text", "host", "netloc", "target", "credentials"),
    [
        ("http://a", "a", "a", "/", ""),
        ("http://a:80/x", "a", "a", "/x", ""),
        ("https://A.b:4151/?q=%20 ü", "a.b", "a.b:4151", "/?q=%20%20%C3%BC", ""),
        ("http://[::1]:4151/x", "::1", "[::1]:4151", "/x", ""),
        ("https://[::1]", "::1", "[::1]", "/", ""),
        ("http://bücher.example/", "xn--bcher-kva.example", "xn--bcher-kva.example", "/", ""),
        ("http://me:p%40ss@a/x#y", "a", "a", "/x", "me:p@ss"),
    ],
)
def test_urls(text: str, host: str, netloc: str, target: str, credentials: str) -> None:
    url = URL.parse(text)
    assert (url.host, url.netloc, url.target, url.credentials) == (host, netloc, target, credentials)
    assert "p@ss" not in repr(url)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:80",
        "ftp://a/",
        "http:///x",
        "http://a:99999/",
        "http://a b/",
        "http://a\r\nX: y/",
        "http://[::1/",
        "http://a/x\r\ny",
    ],
)
def test_not_urls(text: str) -> None:
    with pytest.raises(ValueError):
        URL.parse(text)


async def test_no_header_can_be_added_by_a_value() -> None:
    async with answering(HEAD + b"Content-Length: 0\r\n\r\n") as (address, asked):
        with pytest.raises(RequestFailed):
            await client().start("GET", URL.parse(f"http://{address}/"), {"X": "a\r\nY: b"})
        assert b"Y: b" not in b"".join(asked)
