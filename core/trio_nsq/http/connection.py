"""One HTTP connection: reads requests, answers them in order, and keeps the connection open until one side closes it.

A single cancel scope, the watchdog, has the current deadline: for the next request to start, for a request to arrive
completely, or for the client to accept its answer. While a handler runs there is no deadline.
"""

import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from email.utils import formatdate
from functools import lru_cache, partial
from typing import TypeAlias

import trio

from ..server.body_memory import BodyMemoryLimit, PieceRoom
from .decisions import Deny
from .messages import (
    INTERNAL_ERROR,
    CutOff,
    EndOfAnswer,
    HTTPError,
    Request,
    Response,
    TakesOver,
    encode_head,
    encode_switching,
)
from .parsing import Exchange, RequestReader
from .routing import Route

logger: logging.Logger = logging.getLogger("trio_nsq.http")

IDLE_TIMEOUT_S = 120.0
"""Limit for an idle connection, and for a client to accept an answer, or one piece of a generated answer. Go's and most
other clients drop idle connections after 90 s. They close first, so no request is sent to a closing connection."""
REQUEST_TIMEOUT_S = 60.0
"""Limit for one request to arrive, from its first byte to its last."""
LINGER_S = 1.0
"""After the last answer, input is read and dropped for this long: closing with unread input resets the connection, and
the reset can overtake the answer."""

RECEIVE_BYTES = 64 * 1024
LARGE_BYTES = 64 * 1024

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"Connection: close\r\n"
_KEEP_ALIVE = b"Connection: keep-alive\r\n"


class WaitingClients:
    """The connections that wait for a TLS handshake or the head of a request: their scopes, longest first."""

    def __init__(self) -> None:
        self._scopes: dict[trio.CancelScope, None] = {}

    def note(self, scope: trio.CancelScope, *, waits: bool) -> None:
        """Note whether a connection waits; one that did already keeps its place."""
        if waits:
            self._scopes.setdefault(scope)
        else:
            self._scopes.pop(scope, None)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count as waiting while the block runs; it may be cancelled."""
        with trio.CancelScope() as scope:
            self.note(scope, waits=True)
            try:
                yield
            finally:
                self.note(scope, waits=False)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("another client needs its place")

    def end_longest(self) -> bool:
        """End the connection that waits longest, to make room. Returns False if none waits."""
        scope = next(iter(self._scopes), None)
        if scope is None:
            return False
        del self._scopes[scope]
        scope.cancel()
        return True


OnRequest: TypeAlias = Callable[[Request, int, float], None]
"""Called for each answered request, with the status and the seconds the answer took. A refused request has the fields
parsed so far; method and path may be `""`. It must not raise."""


class Connection:
    """A connected client. Arguments as for `serve_connection`, which closes the stream after `run`."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        reader: RequestReader,
        on_request: OnRequest | None,
        bodies: BodyMemoryLimit,
        *,
        waiting: WaitingClients | None = None,
        send_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self.peer: str = reader.peer
        self._stream = stream
        self._reader = reader
        self._watchdog = trio.CancelScope()
        self._on_request = on_request
        self._bodies = bodies
        self._takes_room = False  # has a reservation in `bodies`, or waits for one
        self._exchanges: deque[Exchange] = deque()  # to be answered
        self._waiting = waiting
        self._send_timeout_s = send_timeout_s
        self._read_ahead: bytes | bytearray = b""  # while an answer was sent
        self._has_begun = False  # a request has started to arrive, and its deadline is not set yet
        self._takes_over: TakesOver | None = None

    async def run(self) -> TakesOver | None:
        """Serve the client until it disconnects, violates HTTP or is too slow. Raises trio.BrokenResourceError.

        Returns what speaks another protocol from now on, if the client has asked for one.
        """
        try:
            with self._watchdog:
                await self._serve()
        finally:
            self._release_room()
            self._note_waiting(waits=False)
        return self._takes_over

    def close(self) -> None:
        """Have the connection's task close the connection."""
        self._watchdog.cancel()

    async def _serve(self) -> None:
        self._allow(IDLE_TIMEOUT_S)
        self._note_waiting(waits=True)
        while await self._receive():
            self._note_waiting(waits=self._reader.awaits_head and not self._exchanges)
            while self._exchanges:
                if not await self._answer(self._exchanges.popleft()):
                    if self._takes_over is None:
                        await self._linger()
                    return
                self._allow(IDLE_TIMEOUT_S)
            if self._reader.undecided and (refused := await self._reader.decide()) is not None:
                await self._answer(refused)
                await self._linger()
                return
            self._note_waiting(waits=self._reader.awaits_head)
            self._time_request()
            if not self._has_room():
                await self._wait_for_room()
            if self._reader.continue_expected:
                self._reader.continue_expected = False
                await self._stream.send_all(_CONTINUE)

    async def _receive(self) -> bool:
        """Wait for data from the client. Returns False at its end."""
        data, self._read_ahead = self._read_ahead, b""
        data = data or await self._stream.receive_some(RECEIVE_BYTES)
        if data:
            self._take_in(data)
        return bool(data)

    def _note_waiting(self, *, waits: bool) -> None:
        if self._waiting is not None:
            self._waiting.note(self._watchdog, waits=waits)

    def _take_in(self, data: bytes | bytearray) -> None:
        was_at_rest = self._reader.at_rest
        exchanges = self._reader.receive_data(data)
        self._exchanges += exchanges
        if self._takes_room and not self._reader.unfinished_bytes:
            self._release_room()
        # Only for the first bytes of a request: further bytes do not extend its deadline.
        self._has_begun = not self._reader.at_rest and (was_at_rest or bool(exchanges))

    def _has_room(self) -> bool:
        """Whether the client may send the rest of a large body."""
        missing = self._reader.unfinished_bytes
        if not missing:
            return True
        self._takes_room = True
        return self._bodies.admit(self, missing)

    async def _wait_for_room(self) -> None:
        """Wait for room for a large body. Nothing is read meanwhile, so the deadline of the request does not run."""
        due_s, began_s = self._watchdog.deadline, trio.current_time()
        self._set_deadline(math.inf)
        await self._bodies.wait(self, self._reader.unfinished_bytes)
        self._set_deadline(due_s + trio.current_time() - began_s)

    def _release_room(self) -> None:
        if self._takes_room:
            self._takes_room = False
            self._bodies.leave(self)

    def _time_request(self) -> None:
        """If a request has started to arrive, set its deadline. All earlier requests must be answered."""
        if self._has_begun:
            self._has_begun = False
            self._allow(REQUEST_TIMEOUT_S)

    def _allow(self, seconds: float) -> None:
        self._set_deadline(trio.current_time() + seconds)

    def _set_deadline(self, at_s: float) -> None:
        self._watchdog.deadline = at_s

    async def _answer(self, exchange: Exchange) -> bool:
        """Answer one request. Returns False if the connection ends after it."""
        started = trio.current_time()
        self._set_deadline(math.inf)
        exchange = self._checked_again(exchange)
        try:
            response, head = await self._respond(exchange)
            if response.delay_s:
                await trio.sleep(response.delay_s)
            whole = await self._send_answer(exchange, response, head)
        finally:
            if isinstance(exchange.answer, Route) and exchange.answer.limiter is not None:
                exchange.answer.limiter.leave(self)
            if exchange.request.room is not None:
                exchange.request.room.leave()
        if self._on_request is not None:
            self._on_request(exchange.request, response.status, trio.current_time() - started)
        self._takes_over = response.takes_over
        return whole and _can_go_on(exchange, response)

    def _checked_again(self, exchange: Exchange) -> Exchange:
        """Return the exchange, or its refusal if the client may not send the request any more."""
        request, route, guard = exchange.request, exchange.answer, self._reader.guard
        if (
            request.identity is None  # nothing can be revoked
            or exchange.undecided
            or guard is None
            or not isinstance(route, Route)
            or guard.is_current(request, route)
        ):
            return exchange
        refusal = guard.refuse_late(request, route)
        return Exchange(request, refusal, keep_alive=False, chunked=exchange.chunked)

    async def _respond(self, exchange: Exchange) -> tuple[Response, bytes]:
        """Return the answer to a request, and its encoded head."""
        answer, guard = exchange.answer, self._reader.guard
        try:
            try:
                if exchange.undecided and guard is not None:
                    route = answer if isinstance(answer, Route) else None
                    decision = await guard.look_up(exchange.request, route)
                    answer = decision.response if isinstance(decision, Deny) else answer
                if isinstance(answer, Response):
                    response = answer
                elif answer.limiter is None:
                    if answer.pieces is not None:
                        exchange.request.room = PieceRoom(answer.pieces, self, answer.path)
                    response = await answer.handler(exchange.request)
                else:
                    compute = partial(answer.handler, exchange.request)
                    response = await answer.limiter.answer(self, answer.path, compute)
            except HTTPError as error:
                response = error.response()
            return response, head_of(exchange, response)
        except Exception:
            # Includes handlers that return no Response, or one that cannot be encoded.
            logger.exception("%s %s failed", exchange.request.method, exchange.request.path)
            return INTERNAL_ERROR, head_of(exchange, INTERNAL_ERROR)

    async def _send_answer(self, exchange: Exchange, response: Response, head: bytes) -> bool:
        """Send an answer. Returns False if it was not sent completely."""
        if exchange.request.method == "HEAD":  # RFC 9110 9.3.2: only the headers, including Content-Length
            await self._send(head)
            if not isinstance(response.body, bytes):
                await response.body.aclose()
        elif not isinstance(response.body, bytes):
            await self._send(head)
            return await self._send_generated(exchange, response.body)
        elif len(response.body) < LARGE_BYTES:
            await self._send(head + response.body)
        else:  # a copy would be held until the client has read it
            await self._send(head)
            limiter = exchange.answer.limiter if isinstance(exchange.answer, Route) else None
            size = LARGE_BYTES if limiter is not None else len(response.body)
            rest = memoryview(response.body)
            self._allow(IDLE_TIMEOUT_S)
            while rest:
                await self._stream.send_all(rest[:size])
                if limiter is not None:
                    limiter.note_sent(self, size)
                rest = rest[size:]
        return True

    async def _send(self, data: bytes | memoryview) -> None:
        self._allow(self._send_timeout_s)
        await self._stream.send_all(data)

    async def _send_piece(self, piece: bytes, chunked: bool, room: PieceRoom | None) -> None:
        if room is None or not room.size:
            await self._send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            return
        room.begin()
        if chunked:
            await self._send(b"%x\r\n" % len(piece))
        rest = memoryview(piece)
        while rest:
            await self._send(rest[:LARGE_BYTES])
            room.note_sent(len(rest[:LARGE_BYTES]))
            rest = rest[LARGE_BYTES:]
        if chunked:
            await self._send(b"\r\n")

    async def _send_generated(self, exchange: Exchange, body: AsyncGenerator[bytes, None]) -> bool:
        """Send a generated body. Returns False if it was not sent completely."""
        if not (isinstance(exchange.answer, Route) and exchange.answer.notices_end):
            return await self._send_pieces(exchange, body)
        whole = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._await_end, nursery.cancel_scope)
            with suppress(trio.BrokenResourceError):
                whole = await self._send_pieces(exchange, body)
            nursery.cancel_scope.cancel()
        return whole

    async def _await_end(self, answering: trio.CancelScope) -> None:
        """Cancel an answer when the client disconnects. The next request shows that it does not yet."""
        with suppress(trio.BrokenResourceError):
            self._read_ahead = await self._stream.receive_some(RECEIVE_BYTES)
        if not self._read_ahead:
            answering.cancel()

    async def _send_pieces(self, exchange: Exchange, body: AsyncGenerator[bytes, None]) -> bool:
        chunked = exchange.chunked
        guard, route = self._reader.guard, exchange.answer
        limiter = route.limiter if isinstance(route, Route) else None
        try:
            async with aclosing(body):
                self._set_deadline(math.inf)
                while True:
                    piece = await (anext(body, None) if limiter is None else limiter.next_piece(body))
                    if piece is None:
                        break
                    if guard is not None and isinstance(route, Route):
                        guard.check_again(exchange.request, route)
                    if piece:
                        try:
                            await self._send_piece(piece, chunked, exchange.request.room)
                        except trio.BrokenResourceError:
                            return False
                        if limiter is not None:
                            limiter.note_sent(self, len(piece))
                    del piece  # not held while the next one is computed
                    self._set_deadline(math.inf)
        except EndOfAnswer:
            pass
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


def head_of(exchange: Exchange, response: Response) -> bytes:
    """Encode the head of an answer. Raises ValueError if it is not valid."""
    if response.takes_over is not None:
        if not (isinstance(exchange.answer, Route) and exchange.answer.upgrade):
            raise ValueError("no other protocol was asked for")
        return encode_switching(exchange.answer.upgrade)
    connection = b""
    if not _can_go_on(exchange, response):
        connection = _CLOSE
    elif not exchange.chunked:  # HTTP/1.0 closes unless both sides send keep-alive
        connection = _KEEP_ALIVE
    plain = isinstance(exchange.answer, Route) and exchange.answer.plain
    about = _date(int(time.time())) + connection
    return encode_head(response, plain=plain, about=about, chunked=exchange.chunked)


@lru_cache(maxsize=1)
def _date(unix_s: int) -> bytes:
    return f"Date: {formatdate(unix_s, usegmt=True)}\r\n".encode()  # required by RFC 9110 6.6.1


def _can_go_on(exchange: Exchange, response: Response) -> bool:
    # In HTTP/1.0 only the end of the connection ends a body of unknown length.
    return exchange.keep_alive and (exchange.chunked or isinstance(response.body, bytes))
