"""Serving one HTTP connection, to its end, in a task or in a poller's turn; and what the log says of a request."""

import logging
import math
import socket

import trio

from ..bodies import Bodies
from ..protocol.address import format_peer
from ..reactor import IN_TASK, PolledEndpoint, Poller
from .connection import IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S, Connection, OnRequest, head_of
from .messages import HTTPError, Request, Response
from .parsing import Exchange, RequestReader
from .routing import Route, Router


class PolledConnection(PolledEndpoint, Connection):
    """A connected client of a poller.

    Its requests are answered in the poller's turn (`serve_data`), or when what they wait for has happened. Whatever has
    to be waited for otherwise is handed over to the client's own task, which leaves the client to the poller again when
    nothing more is to be read; while an answer is being made, neither reads. See `EndpointState`.

    Args:
        stream: For the task.
        sock: The same, non-blocking.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        reader: RequestReader,
        on_request: OnRequest | None,
        bodies: Bodies,
        *,
        sock: socket.socket,
        poller: Poller,
    ) -> None:
        PolledEndpoint.__init__(self, sock, poller)
        Connection.__init__(self, stream, reader, on_request, bodies)
        self._unsent = b""  # of an answer; for the task
        self._failure: Exception | None = None  # for the task
        self._response: Response | None = None  # to the first of the exchanges, to be sent
        self._began_s = 0.0  # when it was asked for, by trio's clock
        self._due_s = math.inf  # the deadline, by trio's clock; the watchdog's if the task has the client
        self._is_gone = False

    async def run(self) -> None:
        """As `Connection.run`."""
        self.start_polling()
        try:
            await super().run()
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
            failure, self._failure = self._failure, None  # it knows us
            raise failure
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            await self._stream.send_all(unsent)
        return True

    async def _leave_to_poller(self) -> bool:
        """Let the poller serve the client until it needs the task; false if the client's time is over."""
        self._watchdog.deadline = math.inf
        self.handed_over = trio.Event()
        self.rest()
        while not self.handed_over.is_set():
            now_s = trio.current_time()
            if now_s >= self._due_s:
                self.state = IN_TASK
                return False
            # What time begins to run later than now is not over before the next look.
            next_s = now_s + min(IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S)
            with trio.move_on_at(min(self._due_s, next_s)):
                await self.handed_over.wait()
        self._watchdog.deadline = self._due_s
        return True

    def _set_deadline(self, at_s: float) -> None:
        self._due_s = at_s
        if self.state is IN_TASK:
            self._watchdog.deadline = at_s

    # ------------------------------------------------------------------ in the poller's turn

    def serve_data(self, data: bytes | None) -> None:
        """As `PolledEndpoint.serve_data`."""
        if data:
            self._go_on(data)
        else:
            self.is_unread = True  # the task finds the same
            self.hand_over()

    def _go_on(self, data: bytes = b"") -> None:
        """Answer what was read, until the client can be left alone, an answer is being made, or the task is needed."""
        try:
            if data:
                self._take_in(data)
            while self._exchanges and not self._unsent:
                if self._response is None:
                    self._response = self._answer_now(self._exchanges[0])
                if self._response is None:
                    return
                self._send_response(self._response)
            if self._unsent or self._reader.continue_expected or not self._has_room():
                self.hand_over()
            else:
                self._time_request()
                self.rest()
        except Exception as exc:  # a mistake of ours: it must not reach the other clients
            self._failure = exc
            self.hand_over()

    def _answer_now(self, exchange: Exchange) -> Response | None:
        """The answer, if there is one at once; otherwise `_complete` will be called with it, or the task makes it."""
        route = exchange.answer
        if not (isinstance(route, Route) and route.begin and exchange.keep_alive):
            self.hand_over()
            return None
        self._began_s = trio.current_time()
        self._due_s = math.inf
        try:
            if route.begin(exchange.request, self._complete):
                self.await_completion()
            else:
                self.hand_over()
        except HTTPError as exc:
            return exc.response()
        return None

    def _complete(self, response: Response) -> None:
        """Go on with an answer; called by whoever was asked for it."""
        self._response = response
        if not self._is_gone:
            self._go_on()
            self.poll_again()

    def _send_response(self, response: Response) -> None:
        """Send what answers the first request, as much as the socket takes without waiting."""
        exchange, self._response = self._exchanges.popleft(), None
        assert isinstance(response.body, bytes)
        data = head_of(exchange, response) + response.body
        try:
            sent = self._sock.send(data)
        except OSError:  # it is full; or it is broken, as the task will find
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
    bodies: Bodies | None = None,
) -> None:
    """Serve one client until it leaves, breaks the rules or is too slow; none of that is an error.

    A handler that is running when this is cancelled is cancelled too; nothing is sent then.

    Args:
        stream: Closed at the end in every case.
        peer: The client's address, for `Request.peer`; None: the stream's, if it is a socket.
        on_request: See `OnRequest`; None: not called.
        poller: Hears the client instead of the task that this is called in, if the stream is a socket; None: the
            task does.
        bodies: Gives large bodies room, for which the client waits; None: there is always room.
    """
    bodies = bodies or Bodies()
    reader = RequestReader(router, peer_of(stream) if peer is None else peer)
    connection: Connection
    if poller is None or not isinstance(stream, trio.SocketStream):
        connection = Connection(stream, reader, on_request, bodies)
    else:
        # The plain socket can be used without a task switch; trio only waits for it.
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        connection = PolledConnection(stream, reader, on_request, bodies, sock=sock, poller=poller)
    try:
        await connection.run()
    except trio.BrokenResourceError:
        pass  # the client has gone
    finally:
        # At once, for all has been said; and shielded, for a Cancelled raised here would take the place of an
        # exception on its way out.
        with trio.CancelScope(shield=True) as closing:
            closing.cancel()
            await stream.aclose()


def peer_of(stream: trio.abc.Stream) -> str:
    """The client's address, as `format_peer` puts it; `""` if the stream is not a socket, or the client has gone."""
    if not isinstance(stream, trio.SocketStream):
        return ""
    try:
        return format_peer(stream.socket.getpeername())
    except OSError:
        return ""


# ---------------------------------------------------------------------- the request log


def log_request(logger: logging.Logger, request: Request, status: int, elapsed_s: float) -> None:
    """Log a request as nsqd does; one that could not be read shows what is known of it."""
    method, target = request.method or "-", request.target or "-"
    logger.info("%d %s %s (%s) %s", status, method, target, request.peer, _duration(elapsed_s))


def _duration(seconds: float) -> str:
    """As Go writes it, but for the digits: `921ns`, `5.140µs`, `1.116ms`."""
    for unit, size_s in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size_s:
            return f"{seconds / size_s:.3f}{unit}"
    return f"{seconds * 1e9:.0f}ns"
