"""One HTTP connection: requests are read, answered in order, and the connection kept for as long as both want it.

A single cancel scope, the watchdog, holds whatever deadline is due: for the next request to begin, for one that has
begun to arrive, for the client to take its answer. While a handler works there is none.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from email.utils import formatdate
from functools import lru_cache
from typing import TypeAlias

import trio

from ..protocol.address import format_peer
from .messages import INTERNAL_ERROR, CutOff, HTTPError, Request, Response, encode_head
from .parsing import Exchange, RequestReader
from .routing import Route, Router

logger = logging.getLogger("trio_nsq.http")

IDLE_TIMEOUT_S = 120.0
"""How long a connection may rest between requests, and how long a client may take to accept an answer. Go's and most
other clients drop resting connections after 90 s: they do so first, and no request meets a closing connection."""
REQUEST_TIMEOUT_S = 60.0
"""How long one request may take to arrive, from its first byte to its last."""
LINGER_S = 1.0
"""How long what a client still sends is read and dropped after the last answer: closing with unread input resets the
connection, and the reset can overtake the answer."""

_RECEIVE_BYTES = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"Connection: close\r\n"
_KEEP_ALIVE = b"Connection: keep-alive\r\n"

OnRequest: TypeAlias = Callable[[Request, int, float], None]
"""Told each answered request, the status, and how many seconds the answer took. Of a request that was refused it sees
as much as is known; method and path are `""` if that is nothing. It must not raise."""


async def serve_connection(
    stream: trio.abc.Stream,
    router: Router,
    *,
    peer: str | None = None,
    on_request: OnRequest | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
) -> None:
    """Serve one client until it leaves, breaks the rules or is too slow; none of that is an error.

    A handler that is running when this is cancelled is cancelled too; nothing is sent then.

    Args:
        stream: Closed at the end in every case.
        router: Who answers.
        peer: The client's address, for `Request.peer`; None: the stream's, if it is a socket.
        on_request: See `OnRequest`; None for nobody.
        idle_timeout_s: See `IDLE_TIMEOUT_S`. For a generated body, the time to accept one piece.
        request_timeout_s: See `REQUEST_TIMEOUT_S`.
    """
    try:
        with trio.CancelScope() as watchdog:
            reader = RequestReader(router, peer_of(stream) if peer is None else peer)
            connection = _Connection(stream, reader, watchdog, on_request, idle_timeout_s, request_timeout_s)
            await connection.serve()
    except trio.BrokenResourceError:
        pass  # the client has gone
    finally:
        # At once, for all has been said; and shielded, for a Cancelled raised here would take the place of an
        # exception on its way out.
        with trio.CancelScope(shield=True) as closing:
            closing.cancel()
            await stream.aclose()


class _Connection:
    def __init__(
        self,
        stream: trio.abc.Stream,
        reader: RequestReader,
        watchdog: trio.CancelScope,
        on_request: OnRequest | None,
        idle_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._stream = stream
        self._reader = reader
        self._watchdog = watchdog
        self._on_request = on_request
        self._idle_timeout_s = idle_timeout_s
        self._request_timeout_s = request_timeout_s

    async def serve(self) -> None:
        reader = self._reader
        self._allow(self._idle_timeout_s)
        while data := await self._stream.receive_some(_RECEIVE_BYTES):
            was_at_rest = reader.at_rest
            exchanges = reader.receive_data(data)
            for exchange in exchanges:
                if not await self._answer(exchange):
                    await self._linger()
                    return
            # Once for each request: further bytes of it give it no more time.
            if not reader.at_rest and (was_at_rest or exchanges):
                self._allow(self._request_timeout_s)
            if reader.continue_expected:
                reader.continue_expected = False
                await self._stream.send_all(_CONTINUE)

    def _allow(self, seconds: float) -> None:
        self._watchdog.deadline = trio.current_time() + seconds

    async def _answer(self, exchange: Exchange) -> bool:
        """Answer one request; false if the connection ends with it."""
        started = trio.current_time()
        self._watchdog.deadline = math.inf
        response, head = await _respond(exchange)
        whole = True
        if exchange.request.method == "HEAD":  # RFC 9110 9.3.2: the headers alone, Content-Length among them
            await self._send(head)
        elif isinstance(response.body, bytes):
            await self._send(head + response.body)
        else:
            await self._send(head)
            whole = await self._send_pieces(exchange, response.body)
        if self._on_request is not None:
            self._on_request(exchange.request, response.status, trio.current_time() - started)
        return whole and _can_go_on(exchange, response)

    async def _send(self, data: bytes) -> None:
        # The next thing is mostly to wait for a request, for as long as this, so it is not set anew.
        self._allow(self._idle_timeout_s)
        await self._stream.send_all(data)

    async def _send_pieces(self, exchange: Exchange, body: AsyncGenerator[bytes, None]) -> bool:
        """Send a generated body; false if it could not be sent to its end."""
        chunked = exchange.chunked
        try:
            async with aclosing(body):
                self._watchdog.deadline = math.inf
                async for piece in body:
                    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
                    if piece and not await self._sent(framed):
                        return False
                    self._watchdog.deadline = math.inf
        except CutOff as reason:
            request = exchange.request
            logger.warning("the response to %s %s was cut off: %s", request.method, request.path, reason)
            return False
        except Exception:
            request = exchange.request
            logger.exception("the response to %s %s was cut off", request.method, request.path)
            return False
        await self._send(b"0\r\n\r\n" if chunked else b"")
        return True

    async def _sent(self, data: bytes) -> bool:
        try:
            await self._send(data)
        except trio.BrokenResourceError:
            return False
        return True

    async def _linger(self) -> None:
        self._allow(LINGER_S)
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()
        while await self._stream.receive_some(_RECEIVE_BYTES):
            pass


async def _respond(exchange: Exchange) -> tuple[Response, bytes]:
    try:
        response = await _call(exchange)
        return response, _head(exchange, response)
    except Exception:
        # Also what a handler returns may be at fault: no Response at all, or one that cannot be sent.
        logger.exception("%s %s failed", exchange.request.method, exchange.request.path)
        return INTERNAL_ERROR, _head(exchange, INTERNAL_ERROR)


async def _call(exchange: Exchange) -> Response:
    if isinstance(exchange.answer, Response):
        return exchange.answer
    try:
        return await exchange.answer.handler(exchange.request)
    except HTTPError as error:
        return error.response()


def _head(exchange: Exchange, response: Response) -> bytes:
    connection = b""
    if not _can_go_on(exchange, response):
        connection = _CLOSE
    elif not exchange.chunked:  # HTTP/1.0 closes unless both sides say otherwise
        connection = _KEEP_ALIVE
    plain = isinstance(exchange.answer, Route) and exchange.answer.plain
    about = _date(int(time.time())) + connection
    return encode_head(response, plain=plain, about=about, chunked=exchange.chunked)


@lru_cache(maxsize=1)
def _date(unix_s: int) -> bytes:
    return f"Date: {formatdate(unix_s, usegmt=True)}\r\n".encode()  # RFC 9110 6.6.1 demands it


def _can_go_on(exchange: Exchange, response: Response) -> bool:
    # A body of unknown length ends an HTTP/1.0 response only with the connection.
    return exchange.keep_alive and (exchange.chunked or isinstance(response.body, bytes))


def peer_of(stream: trio.abc.Stream) -> str:
    """The address of whoever is at the other end.

    Args:
        stream: Any stream.

    Returns:
        As `format_peer` puts it; `""` if the stream is not a socket, or the client has gone.
    """
    if not isinstance(stream, trio.SocketStream):
        return ""
    try:
        return format_peer(stream.socket.getpeername())
    except OSError:
        return ""
