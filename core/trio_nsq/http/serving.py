"""Serves one HTTP connection, in a task or by a poller, and logs requests."""

import logging
import math
import socket

import trio

from ..event_loop.reactor import IN_TASK, PolledEndpoint, Poller
from ..protocol.address import format_peer
from ..server.body_memory import BodyMemoryLimit
from .connection import IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S, Connection, OnRequest, WaitingClients, head_of
from .decisions import RequestGuard
from .messages import HTTPError, Request, Response, TakesOver
from .parsing import Exchange, RequestReader
from .prefixed_stream import with_prefix
from .routing import Route, Router


class PolledConnection(PolledEndpoint, Connection):
    """A connected client served by a poller.

    The poller answers its requests in `serve_data`, or when a started publish completes. All other waiting is handed
    over to the client's own task, which returns the client to the poller when all input is handled. While an answer is
    pending, neither reads. See `EndpointState`.

    Args:
        stream: The stream, for the task.
        sock: The same socket, non-blocking, for the poller.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        reader: RequestReader,
        on_request: OnRequest | None,
        bodies: BodyMemoryLimit,
        *,
        sock: socket.socket,
        poller: Poller,
    ) -> None:
        PolledEndpoint.__init__(self, sock, poller)
        Connection.__init__(self, stream, reader, on_request, bodies)
        self._unsent = b""  # rest of an answer, for the task to send
        self._failure: Exception | None = None  # for the task to raise
        self._response: Response | None = None  # to send for the first exchange
        self._began_s = 0.0  # when the route's `begin` was called, by trio's clock
        self._due_s = (
            math.inf
        )  # the deadline, by trio's clock; the watchdog has it while the task serves the client
        self._is_gone = False

    async def run(self) -> TakesOver | None:
        self.start_polling()
        try:
            return await super().run()
        finally:
            self._is_gone = True
            self.stop_polling()

    # ------------------------------------------------------------------ in the task

    async def _receive(self) -> bool:
        if self.is_unread:
            await trio.lowlevel.checkpoint()
            try:
                data = self.receive_now()
            except BlockingIOError:
                return True
            except OSError:
                return False
            if data:
                self._take_in(data)
            return bool(data)
        if not await self._leave_to_poller():
            return False
        if self._failure is not None:
            failure, self._failure = self._failure, None  # breaks a reference cycle
            raise failure
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            await self._stream.send_all(unsent)
        return True

    async def _leave_to_poller(self) -> bool:
        """Let the poller serve the client until it needs the task. Returns False if the deadline has passed."""
        self._watchdog.deadline = math.inf
        handed_over = self.handed_over = trio.Event()
        self.rest()
        while not handed_over.is_set():
            now_s = trio.current_time()
            if now_s >= self._due_s:
                self.state = IN_TASK
                return False
            # A deadline that is set after now cannot pass before the next check.
            next_s = now_s + min(IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S)
            with trio.move_on_at(min(self._due_s, next_s)):
                await handed_over.wait()
        self._watchdog.deadline = self._due_s
        return True

    def _set_deadline(self, at_s: float) -> None:
        self._due_s = at_s
        if self.state is IN_TASK:
            self._watchdog.deadline = at_s

    # ------------------------------------------------------------------ in the poller

    def serve_data(self, data: bytes | None) -> None:
        if data:
            self._go_on(data)
        else:
            self.is_unread = True  # the task reads the end or the error again
            self.hand_over()

    def _go_on(self, data: bytes = b"") -> None:
        """Answer the requests read, until none is left, an answer is pending, or the task is needed."""
        try:
            if data:
                self._take_in(data)
            while self._exchanges and not self._unsent:
                if self._response is None:
                    self._response = self._answer_now(self._exchanges[0])
                if self._response is None:
                    return
                self._send_response(self._response)
            reader = self._reader
            if self._unsent or reader.continue_expected or reader.undecided or not self._has_room():
                self.hand_over()
            else:
                self._time_request()
                self.rest()
        except Exception as exc:  # a bug in the broker: it must not affect other clients
            self._failure = exc
            self.hand_over()

    def _answer_now(self, exchange: Exchange) -> Response | None:
        """Return the answer if it is ready. Otherwise `begin` calls `_complete` with it, or the task answers."""
        route, request, guard = exchange.answer, exchange.request, self._reader.guard
        if exchange.undecided or not (isinstance(route, Route) and route.begin and exchange.keep_alive):
            self.hand_over()
            return None
        if request.identity is not None and guard is not None and not guard.is_current(request, route):
            self.hand_over()  # the task refuses it
            return None
        self._began_s = trio.current_time()
        self._due_s = math.inf
        try:
            if route.begin(request, self._complete):
                self.await_completion()
            else:
                self.hand_over()
        except HTTPError as exc:
            return exc.response()
        return None

    def _complete(self, response: Response) -> None:
        """Send the answer of a route's `begin`, and continue."""
        self._response = response
        if not self._is_gone:
            self._go_on()
            self.poll_again()

    def _send_response(self, response: Response) -> None:
        """Send the answer to the first request, as much as the socket accepts without waiting."""
        exchange, self._response = self._exchanges.popleft(), None
        assert isinstance(response.body, bytes)
        data = head_of(exchange, response) + response.body
        try:
            sent = self._sock.send(data)
        except OSError:  # the socket is full; or it is broken, and the task will notice
            sent = 0
        self._unsent = data[sent:]
        now_s = trio.current_time()
        self._due_s = now_s + IDLE_TIMEOUT_S
        if self._on_request is not None:
            self._on_request(exchange.request, response.status, now_s - self._began_s)


async def serve_connection(
    stream: trio.abc.Stream,
    router: Router,
    *,
    peer: str | None = None,
    on_request: OnRequest | None = None,
    poller: Poller | None = None,
    bodies: BodyMemoryLimit | None = None,
    guard: RequestGuard | None = None,
    waiting: WaitingClients | None = None,
    send_timeout_s: float = IDLE_TIMEOUT_S,
    once: bool = False,
) -> None:
    """Serve one client until it disconnects, violates HTTP or is too slow; none of that is an error.

    A cancellation also cancels a running handler, and sends nothing. If a handler switches to another protocol, that is
    spoken until its end.

    Args:
        stream: The connection. It is always closed at the end.
        peer: The client's address, for `Request.peer`; None takes that of the stream, if it is a socket.
        on_request: See `OnRequest`; None for no callback.
        poller: Reads the client instead of the calling task, if the stream is a socket; None uses the task.
        bodies: Limits the memory of large bodies that are arriving; None uses a limit for this client alone.
        guard: Checks each request before its body is read; None accepts all.
        waiting: Has the connection while it waits for a request. Without a poller only, as the next one.
        send_timeout_s: Limit for the client to accept an answer, or one piece of a generated one.
        once: Close the connection after the first answer.
    """
    bodies = bodies or BodyMemoryLimit()
    reader = RequestReader(router, peer_of(stream) if peer is None else peer, guard, once=once)
    connection: Connection
    if poller is None or not isinstance(stream, trio.SocketStream):
        connection = Connection(
            stream, reader, on_request, bodies, waiting=waiting, send_timeout_s=send_timeout_s
        )
    else:
        # The plain socket needs no task switch; trio only waits for it.
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        connection = PolledConnection(stream, reader, on_request, bodies, sock=sock, poller=poller)
    try:
        takes_over = await connection.run()
        if takes_over is not None:
            await takes_over(with_prefix(reader.beyond, stream))
    except trio.BrokenResourceError:
        pass  # the client has disconnected
    finally:
        # Close at once, because all data is sent. Shielded, because a Cancelled raised here would replace an
        # exception that is propagating.
        with trio.CancelScope(shield=True) as closing:
            closing.cancel()
            await stream.aclose()


def peer_of(stream: trio.abc.Stream) -> str:
    """Return the client's address as `format_peer` does; `""` without a socket, or if the client has disconnected."""
    if not isinstance(stream, trio.SocketStream):
        return ""
    try:
        return format_peer(stream.socket.getpeername())
    except OSError:
        return ""


# ---------------------------------------------------------------------- the request log


def log_request(logger: logging.Logger, request: Request, status: int, elapsed_s: float) -> None:
    """Log a request as nsqd does. For a refused one, log the fields parsed so far."""
    method, target = request.method or "-", request.target or "-"
    logger.info("%d %s %s (%s) %s", status, method, target, request.peer, _duration(elapsed_s))


def _duration(seconds: float) -> str:
    """Format a duration as Go does, with three decimals: `921ns`, `5.140µs`, `1.116ms`."""
    for unit, size_s in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size_s:
            return f"{seconds / size_s:.3f}{unit}"
    return f"{seconds * 1e9:.0f}ns"
