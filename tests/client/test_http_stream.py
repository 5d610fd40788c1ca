"""Tests for a GET with a streamed answer, from correct and faulty servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from trio_nsq.client.reading.http_stream import AnswerLost, StreamedAnswer, stream_get

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


async def get(address: str, silence_s: float = 20) -> StreamedAnswer:
    return await stream_get(address, "/a?b=c", connect_timeout_s=5, silence_s=silence_s)


async def read(answer: StreamedAnswer) -> bytes:
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
        assert asked[0] == f"GET /a?b=c HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode()


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
    ("pieces", "reason"),
    [
        ([], "closed before the end"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP"),
        ([HEAD], "closed before the end"),
    ],
)
async def test_invalid_answers(pieces: list[bytes], reason: str) -> None:
    async with answering(*pieces) as (address, _):
        with pytest.raises(AnswerLost, match=reason):
            await get(address)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([CHUNKED, b"5\r\nhe"], "closed before the end"),
        ([CHUNKED, b"5\r\nhello\r\n"], "closed before the end"),
        ([HEAD + b"Content-Length: 5\r\n\r\nhe"], "closed before the end"),
        ([CHUNKED, b"x\r\n"], "not HTTP"),
    ],
)
async def test_truncated_answers(pieces: list[bytes], reason: str) -> None:
    async with answering(*pieces) as (address, _):
        answer = await get(address)
        with pytest.raises(AnswerLost, match=reason):
            await read(answer)
        await answer.aclose()


async def test_silence(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    answer = StreamedAnswer(ours, 30)
    await theirs.send_all(CHUNKED + b"5\r\nhello\r\n")
    await answer.receive_head()
    assert await answer.receive() == b"hello"
    with pytest.raises(AnswerLost, match="no data for 30 s"):
        await answer.receive()
    assert trio.current_time() == 30
    await answer.aclose()


async def test_nobody_listens() -> None:
    with pytest.raises(OSError):
        await get("127.0.0.1:1")
