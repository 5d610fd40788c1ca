"""One HTTP connection: requests are read, answered in order, and the connection kept for as long as both want it.

A single cancel scope, the watchdog, holds whatever deadline is due: for the next request to begin, for one that has
begun to arrive, for the client to take its answer. While a handler works there is none.
"""

import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from email.utils import formatdate
from functools import lru_cache
from typing import TypeAlias

import trio

from ..bodies import Bodies
from .messages import INTERNAL_ERROR, CutOff, HTTPError, Request, Response, encode_head
from .parsing import Exchange, RequestReader
from .routing import Route

logger = logging.getLogger("trio_nsq.http")

IDLE_TIMEOUT_S = 120.0
"""How long a connection may rest between requests, and how long a client may take to accept an answer, or one piece of
a generated one. Go's and most
other clients drop resting connections after 90 s: they do so first, and no request meets a closing connection."""
REQUEST_TIMEOUT_S = 60.0
"""How long one request may take to arrive, from its first byte to its last."""
LINGER_S = 1.0
"""How long what a client still sends is read and dropped after the last answer: closing with unread input resets the
connection, and the reset can overtake the answer."""

RECEIVE_BYTES = 64 * 1024

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"Connection: close\r\n"
_KEEP_ALIVE = b"Connection: keep-alive\r\n"

OnRequest: TypeAlias = Callable[[Request, int, float], None]
"""Told each answered request, the status, and how many seconds the answer took. Of a request that was refused it sees
as much as is known; method and path are `""` if that is nothing. It must not raise."""


class Connection:
    """A connected client, until `run` returns; arguments as for `serve_connection`, which closes the stream."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        reader: RequestReader,
        on_request: OnRequest | None,
        bodies: Bodies,
    ) -> None:
        self.peer = reader.peer
        self._stream = stream
        self._reader = reader
        self._watchdog = trio.CancelScope()
        self._on_request = on_request
        self._bodies = bodies
        self._takes_room = False  # of the bodies, or waits for it
        self._exchanges: deque[Exchange] = deque()  # to be answered
        self._has_begun = False  # a further request has, and its time is not set

    async def run(self) -> None:
        """Serve the client until it leaves, breaks the rules or is too slow. Raises trio.BrokenResourceError."""
        try:
            with self._watchdog:
                await self._serve()
        finally:
            self._give_room_back()

    def close(self) -> None:
        """End the connection soon, from outside."""
        self._watchdog.cancel()

    async def _serve(self) -> None:
        self._allow(IDLE_TIMEOUT_S)
        while await self._receive():
            while self._exchanges:
                if not await self._answer(self._exchanges.popleft()):
                    await self._linger()
                    return
            self._time_request()
            if not self._has_room():
                await self._bodies.wait(self, self._reader.unfinished_bytes)
            if self._reader.continue_expected:
                self._reader.continue_expected = False
                await self._stream.send_all(_CONTINUE)

    async def _receive(self) -> bool:
        """Wait for what the client sends; false if that has come to its end."""
        data = await self._stream.receive_some(RECEIVE_BYTES)
        if data:
            self._take_in(data)
        return bool(data)

    def _take_in(self, data: bytes | bytearray) -> None:
        was_at_rest = self._reader.at_rest
        exchanges = self._reader.receive_data(data)
        self._exchanges += exchanges
        if self._takes_room and not self._reader.unfinished_bytes:
            self._give_room_back()
        # Once for each request: further bytes of it give it no more time.
        self._has_begun = not self._reader.at_rest and (was_at_rest or bool(exchanges))

    def _has_room(self) -> bool:
        """Whether the rest of a large body may come."""
        missing = self._reader.unfinished_bytes
        if not missing:
            return True
        self._takes_room = True
        return self._bodies.admit(self, missing)

    def _give_room_back(self) -> None:
        if self._takes_room:
            self._takes_room = False
            self._bodies.leave(self)

    def _time_request(self) -> None:
        """All before it is answered: let the time run that a request has to arrive."""
        if self._has_begun:
            self._has_begun = False
            self._allow(REQUEST_TIMEOUT_S)

    def _allow(self, seconds: float) -> None:
        self._set_deadline(trio.current_time() + seconds)

    def _set_deadline(self, at_s: float) -> None:
        self._watchdog.deadline = at_s

    async def _answer(self, exchange: Exchange) -> bool:
        """Answer one request; false if the connection ends with it."""
        started = trio.current_time()
        self._set_deadline(math.inf)
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
        self._allow(IDLE_TIMEOUT_S)
        await self._stream.send_all(data)

    async def _send_pieces(self, exchange: Exchange, body: AsyncGenerator[bytes, None]) -> bool:
        """Send a generated body; false if it could not be sent to its end."""
        chunked = exchange.chunked
        try:
            async with aclosing(body):
                self._set_deadline(math.inf)
                async for piece in body:
                    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
                    if piece:
                        try:
                            await self._send(framed)
                        except trio.BrokenResourceError:
                            return False
                    self._set_deadline(math.inf)
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

    async def _linger(self) -> None:
        self._allow(LINGER_S)
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()
        while await self._stream.receive_some(RECEIVE_BYTES):
            pass


async def _respond(exchange: Exchange) -> tuple[Response, bytes]:
    answer = exchange.answer
    try:
        try:
            response = answer if isinstance(answer, Response) else await answer.handler(exchange.request)
        except HTTPError as error:
            response = error.response()
        return response, head_of(exchange, response)
    except Exception:
        # Also what a handler returns may be at fault: no Response at all, or one that cannot be sent.
        logger.exception("%s %s failed", exchange.request.method, exchange.request.path)
        return INTERNAL_ERROR, head_of(exchange, INTERNAL_ERROR)


def head_of(exchange: Exchange, response: Response) -> bytes:
    """The head of an answer. Raises ValueError if it cannot be sent."""
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
