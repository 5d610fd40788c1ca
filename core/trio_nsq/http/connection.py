"""One HTTP connection: requests are read, answered in order, and the connection kept for as long as both want it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

import trio

from .messages import HTTPError, Request, Response, encode_head
from .parsing import Exchange, RequestReader
from .routing import Route, Router

logger = logging.getLogger("trio_nsq.http")

IDLE_TIMEOUT_S = 120.0
"""How long a connection may rest between requests."""
REQUEST_TIMEOUT_S = 60.0
"""How long one request may take to arrive."""
LINGER_S = 1.0
"""How long what a refused client still sends is read, so that the answer is not lost in a reset."""
_LINGER_BYTES = 16 * 1024 * 1024
_RECEIVE_BYTES = 64 * 1024

_INTERNAL_ERROR = HTTPError(500, "INTERNAL_ERROR").response()
_CLOSE = b"Connection: close\r\n"
_KEEP_ALIVE = b"Connection: keep-alive\r\n"

OnRequest: TypeAlias = Callable[[Request, int, float], None]
"""Told each answered request, its status, and how many seconds the answer took."""


async def serve_connection(
    stream: trio.SocketStream,
    router: Router,
    *,
    on_request: OnRequest | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
) -> None:
    """Serve one client until it leaves, breaks the rules or is too slow. A client that goes away is no error.

    Args:
        stream: Closed at the end, also on cancellation.
        router: Who answers.
        on_request: See `OnRequest`; None for nobody.
        idle_timeout_s: See `IDLE_TIMEOUT_S`.
        request_timeout_s: See `REQUEST_TIMEOUT_S`.
    """
    reader = RequestReader(router, _peer(stream))
    async with stream:
        try:
            while True:
                if not await _answer_all(stream, reader, on_request):
                    break
                if reader.refusal is not None:
                    await _send(stream, reader.refusal, plain=False, connection=_CLOSE, chunked=False)
                    await _linger(stream)
                    break
                if reader.continue_expected:
                    reader.continue_expected = False
                    await stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                if not await _receive(stream, reader, idle_timeout_s, request_timeout_s):
                    break
        except trio.BrokenResourceError:
            pass  # the client has gone


async def _receive(
    stream: trio.SocketStream, reader: RequestReader, idle_timeout_s: float, request_timeout_s: float
) -> bool:
    """Read until there is something to do; False if nothing more will come."""
    deadline = trio.current_time() + (idle_timeout_s if reader.at_rest else request_timeout_s)
    while not (reader.exchanges or reader.refusal or reader.continue_expected):
        with trio.move_on_at(deadline) as scope:
            data = await stream.receive_some(_RECEIVE_BYTES)
        if scope.cancelled_caught or not data:
            return False
        rested = reader.at_rest
        reader.receive_data(data)
        if rested:
            deadline = trio.current_time() + request_timeout_s
    return True


async def _answer_all(stream: trio.SocketStream, reader: RequestReader, on_request: OnRequest | None) -> bool:
    """Answer the requests that are whole; False if the connection ends with one of them."""
    while reader.exchanges:
        exchange = reader.exchanges.popleft()
        started = trio.current_time()
        response = await _handle(exchange)
        plain = isinstance(exchange.answer, Route) and exchange.answer.plain
        # A body of unknown length ends an HTTP/1.0 response only with the connection.
        keep_alive = exchange.keep_alive and (exchange.chunked or isinstance(response.body, bytes))
        connection = _CLOSE if not keep_alive else b"" if exchange.chunked else _KEEP_ALIVE
        whole = await _send(stream, response, plain=plain, connection=connection, chunked=exchange.chunked)
        if on_request is not None:
            on_request(exchange.request, response.status, trio.current_time() - started)
        if not (keep_alive and whole):
            return False
    return True


async def _handle(exchange: Exchange) -> Response:
    if isinstance(exchange.answer, Response):
        return exchange.answer
    try:
        return await exchange.answer.handler(exchange.request)
    except HTTPError as exc:
        return exc.response()
    except Exception:
        logger.exception("%s %s failed", exchange.request.method, exchange.request.path)
        return _INTERNAL_ERROR


async def _send(
    stream: trio.SocketStream, response: Response, *, plain: bool, connection: bytes, chunked: bool
) -> bool:
    """Send a response; False if it could not be sent to its end."""
    try:
        head = encode_head(response, plain=plain, connection=connection, chunked=chunked)
    except ValueError:
        logger.exception("a response cannot be sent")
        response = _INTERNAL_ERROR
        head = encode_head(response, plain=plain, connection=connection, chunked=chunked)
    if isinstance(response.body, bytes):
        await stream.send_all(head + response.body)
        return True
    await stream.send_all(head)
    return await _stream_body(stream, response.body, chunked)


async def _stream_body(stream: trio.SocketStream, body: AsyncGenerator[bytes, None], chunked: bool) -> bool:
    async with aclosing(body):
        try:
            async for piece in body:
                if piece:
                    await stream.send_all(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        except trio.BrokenResourceError:
            raise
        except Exception:
            logger.exception("a response was cut off")
            return False
    if chunked:
        await stream.send_all(b"0\r\n\r\n")
    return True


async def _linger(stream: trio.SocketStream) -> None:
    with trio.move_on_after(LINGER_S):
        await stream.send_eof()
        for _ in range(_LINGER_BYTES // _RECEIVE_BYTES):
            if not await stream.receive_some(_RECEIVE_BYTES):
                return


def _peer(stream: trio.SocketStream) -> str:
    try:
        address = stream.socket.getpeername()
    except OSError:
        return ""
    if not isinstance(address, tuple):
        return ""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
