"""A connection whose requests are answered in a poller's turn, as far as nothing has to be waited for.

A task of its own for each read costs more than what most requests ask for. So the poller, which hears many clients in
one task, has what has come read and answered. The connection's own task is woken for the rest.
"""

import math
import socket
from enum import Enum, auto
from typing import Protocol

import trio

from .connection import RECEIVE_BYTES, Bodies, Connection, OnRequest, head_of
from .messages import Response
from .parsing import Exchange, RequestReader
from .routing import Route


class Poller(Protocol):
    """Calls `note_unread` and `serve` of those whose sockets it watches."""

    def add(self, fd: int, client: "PolledConnection") -> None:
        """Watch a client's socket, until `remove`."""

    def remove(self, fd: int) -> None:
        """Forget a client; before its socket is closed."""

    def look_again(self, fd: int) -> None:
        """Serve a client soon that was left alone although its socket may have something."""


class _Holder(Enum):
    """Who reads a client's requests."""

    NOBODY = auto()  # the poller may take it
    POLLER = auto()  # the poller is at it, or an answer is being made
    TASK = auto()


class PolledConnection(Connection):
    """A connected client of a poller.

    Its requests are answered in the poller's turn (`serve`), or when what they wait for has happened. Whatever has to
    be waited for otherwise is handed over to the client's own task, which gives the client back when nothing more is
    to be read; while an answer is being made, neither reads.

    Args:
        stream: For the task.
        reader, on_request, idle_timeout_s, request_timeout_s, bodies: As for `Connection`.
        sock: The same, non-blocking.
        poller: Who hears it.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        reader: RequestReader,
        on_request: OnRequest | None,
        idle_timeout_s: float,
        request_timeout_s: float,
        bodies: Bodies | None,
        *,
        sock: socket.socket,
        poller: Poller,
    ) -> None:
        super().__init__(stream, reader, on_request, idle_timeout_s, request_timeout_s, bodies)
        self._sock = sock
        self._poller = poller
        self._holder = _Holder.TASK
        self._unread = True  # there may be something in the socket
        self._ended = False  # what is there is the last
        self._unsent = b""  # of an answer; for the task
        self._failure: Exception | None = None  # for the task
        self._response: Response | None = None  # to the first of the exchanges, to be sent
        self._beginning = False  # it is being asked for
        self._began_s = 0.0  # when it was, by trio's clock
        self._due_s = math.inf  # the deadline, by trio's clock; the watchdog's if the task has the client
        self._handed_over = trio.Event()
        self._gone = False

    async def run(self) -> None:
        """As `Connection.run`."""
        fd = self._sock.fileno()
        self._poller.add(fd, self)
        try:
            await super().run()
        finally:
            self._holder, self._gone = _Holder.TASK, True
            self._poller.remove(fd)

    # ------------------------------------------------------------------ in the task

    async def _receive(self) -> bool:
        if self._unread:
            await trio.lowlevel.checkpoint()
            try:
                data = self._receive_now()
            except BlockingIOError:
                return True
            except OSError:
                return False
            if data:
                self._take_in(data)
            return bool(data)
        if not await self._rest():
            return False
        if self._failure is not None:
            failure, self._failure = self._failure, None  # it knows us
            raise failure
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            await self._stream.send_all(unsent)
        return True

    def _receive_now(self) -> bytes:
        """What the socket has. Raises OSError, BlockingIOError if it has nothing."""
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            self._unread = False
            raise
        # A short read has taken all there was: the poller tells of what comes afterwards. But not again of the end.
        self._unread = len(data) == RECEIVE_BYTES or self._ended
        return data

    async def _rest(self) -> bool:
        """Let the poller serve the client until it needs the task; false if the client's time is over."""
        self._watchdog.deadline = math.inf
        self._holder = _Holder.NOBODY
        self._handed_over = trio.Event()
        while not self._handed_over.is_set():
            now_s = trio.current_time()
            if now_s >= self._due_s:
                self._holder = _Holder.TASK
                return False
            # What time begins to run later than now is not over before the next look.
            next_s = now_s + min(self._idle_timeout_s, self._request_timeout_s)
            with trio.move_on_at(min(self._due_s, next_s)):
                await self._handed_over.wait()
        self._watchdog.deadline = self._due_s
        return True

    def _set_deadline(self, at_s: float) -> None:
        self._due_s = at_s
        if self._holder is _Holder.TASK:
            self._watchdog.deadline = at_s

    # ------------------------------------------------------------------ in the poller's turn

    def note_unread(self, *, ended: bool) -> None:
        """Something has come; `ended`: and it is the last."""
        self._unread = True
        self._ended |= ended

    def serve(self) -> bool:
        """Read once and answer, as far as nothing has to be waited for. True: there may be more to read."""
        if self._holder is not _Holder.NOBODY:
            return False
        self._holder = _Holder.POLLER
        try:
            data = self._receive_now()
        except BlockingIOError:
            self._holder = _Holder.NOBODY
            return False
        except OSError:
            data = b""
        if not data:
            self._unread = True  # the task finds the same
            self._hand_over()
            return False
        self._go_on(data)
        return self._unread and self._holder is _Holder.NOBODY

    def _go_on(self, data: bytes = b"") -> None:
        """Answer what was read, until the client can be left alone, an answer is being made, or the task is needed."""
        try:
            if data:
                self._take_in(data)
            while self._exchanges and not self._unsent:
                if self._response is None:
                    if not self._begin(self._exchanges[0]):
                        self._hand_over()
                        return
                    if self._response is None:
                        return
                self._send_response()
            if self._unsent or self._reader.continue_expected or not self._has_room():
                self._hand_over()
            else:
                self._time_request()
                self._holder = _Holder.NOBODY
        except Exception as exc:  # a mistake of ours: it must not reach the other clients
            self._failure = exc
            self._hand_over()

    def _hand_over(self) -> None:
        """Wake the task, to go on with whatever there is."""
        self._holder = _Holder.TASK
        self._handed_over.set()

    def _begin(self, exchange: Exchange) -> bool:
        """Have a request answered; False, and nothing is done, if that takes the task."""
        route = exchange.answer
        if not (isinstance(route, Route) and route.begin and exchange.keep_alive):
            return False
        self._began_s = trio.current_time()
        self._due_s = math.inf
        self._beginning = True
        try:
            return route.begin(exchange.request, self._note_response)
        finally:
            self._beginning = False

    def _note_response(self, response: Response) -> None:
        """Go on with the answer; called by whoever was asked for it."""
        self._response = response
        if self._beginning or self._gone:
            return
        self._go_on()
        if self._unread and self._holder is _Holder.NOBODY:
            self._poller.look_again(self._sock.fileno())

    def _send_response(self) -> None:
        """Send what answers the first request, as much as the socket takes without waiting."""
        exchange, response = self._exchanges.popleft(), self._response
        self._response = None
        assert response is not None
        assert isinstance(response.body, bytes)
        data = head_of(exchange, response) + response.body
        try:
            sent = self._sock.send(data)
        except OSError:  # it is full; or it is broken, as the task will find
            sent = 0
        self._unsent = data[sent:]
        now_s = trio.current_time()
        self._due_s = now_s + self._idle_timeout_s
        if self._on_request is not None:
            self._on_request(exchange.request, response.status, now_s - self._began_s)
