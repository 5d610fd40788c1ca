"""The clients' sockets, beside trio: one task reads them all, and what is sent to them goes out at once.

A task of its own for each read costs more than what most reads ask for. So one task, the poller, asks the kernel who
has sent something, and serves these clients in its own turn, one after the other. What all of them published in one
round is stored together. A client's own task is woken for what has to be waited for.

Results of threads are handled in the same rounds. What can wait is done when nobody has sent anything.

To send needs no task switch either: see `SendBuffer`.
"""

import logging
import math
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from threading import Lock
from time import perf_counter
from typing import Any, Protocol

import trio

from .pacing import Pacing
from .protocol import NSQError
from .protocol.compression import Codec

logger = logging.getLogger("trio_nsq.broker")

RECEIVE_BYTES = 64 * 1024
_MAX_PARTS = 256
_CONGESTED_BYTES = 4 * 1024 * 1024
# Edge-triggered: a socket is registered once, and an event comes each time that something arrives.
_EVENTS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class EndpointState(Enum):
    """Who reads what a client sends."""

    RESTING = auto()
    """Nobody, until something comes: then the poller."""
    SERVING = auto()
    """The poller, in its turn."""
    AWAITING = auto()
    """Nobody, until what the client asked for is done: who did it goes on with the client."""
    IN_TASK = auto()
    """The client's own task."""


# To look a member up in its class takes longer than the rest of such a comparison.
RESTING, SERVING, AWAITING, IN_TASK = EndpointState


class PolledEndpoint:
    """A client's socket, read by the poller as far as nothing has to be waited for, and by the client's task otherwise.

    A subclass implements `serve_data`. At the end of that it calls `rest`, `hand_over`, or `await_completion`.

    Attributes:
        state: Who reads.
        handed_over: Set when the task has to go on.
        is_unread: There may be something in the socket.
        read_bytes: How much is read at a time.
    """

    def __init__(self, sock: socket.socket, poller: "Poller") -> None:
        self.state = IN_TASK
        self.handed_over = trio.Event()
        self.read_bytes = RECEIVE_BYTES
        self._sock = sock
        self._poller = poller
        self.is_unread = True
        self._ended = False  # what is there is the last

    def start_polling(self) -> None:
        """Have the poller watch the socket. The client's task has the client still, until it calls `rest`."""
        self._poller.add(self._sock.fileno(), self)

    def stop_polling(self) -> None:
        """Serve the client in its task only; before the socket is closed."""
        self.state = IN_TASK
        self._poller.remove(self._sock.fileno())

    def serve_data(self, data: bytes | None) -> None:
        """In the poller's turn, handle what was read: b"" if the client has ended its side, None if it is lost."""
        raise NotImplementedError

    def mark_readable(self, *, ended: bool) -> None:
        """Something has come; `ended`: and it is the last."""
        self.is_unread = True
        self._ended |= ended

    def serve(self) -> bool:
        """In the poller's turn, read once and handle that. True: there may be more to read."""
        if self.state is not RESTING:
            return False
        self.state = SERVING
        data: bytes | None
        try:
            data = self.receive_now()
        except BlockingIOError:
            self.rest()
            return False
        except OSError:
            data = None
        self.serve_data(data)
        return self.is_unread and self.state is RESTING

    def receive_now(self) -> bytes:
        """What the socket has, `read_bytes` at most. Raises OSError, BlockingIOError if it has nothing."""
        try:
            data = self._sock.recv(self.read_bytes)
        except BlockingIOError:
            self.is_unread = False
            raise
        # A short read has taken all there was: the kernel tells of what comes afterwards. But not again of the end.
        self.is_unread = len(data) == self.read_bytes or self._ended
        return data

    def rest(self) -> None:
        """Leave the client to the poller."""
        self.state = RESTING

    def await_completion(self) -> None:
        """Let nobody read until what the client asked for is done."""
        self.state = AWAITING

    def hand_over(self) -> None:
        """Wake the client's task."""
        self.state = IN_TASK
        self.handed_over.set()

    def look_again(self) -> None:
        """After a completion: have the poller read on if there may be something."""
        if self.is_unread and self.state is RESTING:
            self._poller.look_again(self._sock.fileno())


class SendBuffer:
    """Bytes for one non-blocking socket, sent in the caller's turn while the socket takes them.

    Only when the socket is full does the client's own task wait for it, in `drain`.

    Attributes:
        patience_s: How long the socket may take nothing at all before the connection is given up; math.inf is
            for ever.
        full: The socket took less than there is; set until `drain` has sent the rest.
        broken: The connection is lost; what is put here goes nowhere.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.patience_s = math.inf
        self.full = False
        self.broken = False
        self._sock = sock
        self._codecs: list[Codec] = []  # what is put goes through the first of them first
        self._wire: deque[bytes | memoryview] = deque()
        # What is still to be encoded, when there is a codec; until then it is what goes over the wire.
        self._plain: deque[bytes | memoryview] = self._wire
        self._late_bytes = 0
        self._became_full = trio.Event()
        self._emptied = trio.Event()

    def put(self, data: bytes | memoryview) -> None:
        """Add data to be sent by the next flush."""
        self._plain.append(data)
        if self.full:
            self._late_bytes += len(data)

    def put_encoded(self, data: bytes) -> None:
        """Add data that no codec is to see, such as what TLS says by itself; it goes before what is not encoded yet."""
        if data:
            self._wire.append(data)
            if self.full:
                self._late_bytes += len(data)

    def add_codec(self, codec: Codec) -> None:
        """Encode all that is put from now on, before the codecs that there are already see it."""
        self.encode()
        self._codecs.insert(0, codec)
        self._plain = deque()

    @property
    def congested(self) -> bool:
        """A lot has come since the socket is full: time to stop doing what makes more of it."""
        return self._late_bytes > _CONGESTED_BYTES

    def flush(self) -> None:
        """Send what there is, as much as the socket takes without waiting."""
        if (self._plain or self._wire) and not self.full:
            self._send()
            if self._plain or self._wire:
                self.full = True
                self._emptied = trio.Event()
                self._became_full.set()

    def encode(self) -> None:
        """Let the codecs see now, not at the next flush, what was put."""
        if not self._codecs or not self._plain:
            return
        data = b"".join(self._plain)
        self._plain.clear()
        try:
            for codec in self._codecs:
                data = codec.encode(data)
        except NSQError as exc:
            logger.info("nothing more can be sent: %s", exc)
            self.abandon()
        else:
            self._wire.append(data)

    def _send(self) -> None:
        if self._codecs:
            self.encode()
        parts = self._wire
        while parts:
            try:
                if len(parts) == 1:
                    sent = self._sock.send(parts[0])
                else:
                    sent = self._sock.sendmsg([parts[i] for i in range(min(len(parts), _MAX_PARTS))])
            except BlockingIOError:
                return
            except OSError:
                self.abandon()
                return
            if len(parts) == 1 and sent == len(parts[0]):
                parts.clear()
                return
            while parts and sent >= len(parts[0]):
                sent -= len(parts.popleft())
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    async def drain(self) -> bool:
        """Wait until the socket is full, then until it has taken everything.

        False: the connection is lost, or the socket took nothing for `patience_s`.
        """
        await self._became_full.wait()
        while self._plain or self._wire:
            with trio.move_on_after(self.patience_s) as scope:
                try:
                    await trio.lowlevel.wait_writable(self._sock)
                except (OSError, trio.ClosedResourceError):
                    self.abandon()
            if scope.cancelled_caught or self.broken:
                return False
            self._send()
        if self.broken:
            return False
        self.full = False
        self._late_bytes = 0
        self._became_full = trio.Event()
        self._emptied.set()
        return True

    async def emptied(self) -> None:
        """Wait, while `drain` runs in another task, until nothing is left to be sent or the connection is lost."""
        if self.full:
            await self._emptied.wait()

    def abandon(self) -> None:
        """Give up the connection: drop what there is, and whatever comes."""
        self.broken = self.full = True
        self._plain.clear()
        self._wire.clear()
        self._became_full.set()
        self._emptied.set()


class Rounds(Protocol):
    """What is done around the rounds of a poller."""

    @property
    def is_busy(self) -> bool:
        """A thread will soon need the event loop, which therefore is not to be kept waiting."""

    def end_round(self) -> None:
        """All who had sent something are served."""

    def idle(self) -> bool:
        """Nobody has sent anything: do something of what can wait. True: there may be more of it."""


class Poller:
    """The clients whose sockets are watched. One for a broker.

    Attributes:
        clock_s: Seconds, by any clock that never steps.
        in_round: Clients are being served: what they ask for is best gathered until the end of the round.
    """

    def __init__(self, pacing: Pacing | None = None, clock_s: Callable[[], float] = perf_counter) -> None:
        self.in_round = False
        self._pacing = pacing or Pacing()
        self.clock_s = clock_s
        self._token = trio.lowlevel.current_trio_token()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._waking = Lock()
        self._wake_fd = -1  # an eventfd, while `run` runs
        self._is_woken = False  # it was written to, and nobody has noticed yet
        self._epoll: select.epoll | None = None  # while `run` runs
        self._endpoints: dict[int, PolledEndpoint] = {}
        # In order, and each once: news of a client that is here already give it no second turn.
        self._again: dict[PolledEndpoint, None] = {}

    def add(self, fd: int, endpoint: PolledEndpoint) -> None:
        """Watch a client's socket, until `remove`."""
        if self._epoll is not None:
            self._epoll.register(fd, _EVENTS)
        self._endpoints[fd] = endpoint

    def remove(self, fd: int) -> None:
        """Forget a client; before its socket is closed."""
        del self._endpoints[fd]
        if self._epoll is not None:
            self._epoll.unregister(fd)

    def look_again(self, fd: int) -> None:
        """Serve a client soon whose socket may have something although no event will tell of it."""
        if self.in_round:
            self._again[self._endpoints[fd]] = None
        elif self._epoll is not None:
            self._epoll.modify(fd, _EVENTS)  # that tells of what is there, and wakes us if need be

    def wake(self) -> None:
        """Look soon what there is to do. May be called in a thread."""
        with self._waking:
            self._wake()

    def _wake(self) -> None:
        if self._epoll is not None and not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """In any thread: have something called in the next round, or, while `run` does not run, by trio."""
        with self._waking:
            if self._epoll is not None:
                self._calls.append((call, args))
                self._wake()
                return
        self._token.run_sync_soon(call, *args)

    async def run(self, rounds: Rounds) -> None:
        """Serve clients; runs until cancelled."""
        with select.epoll() as epoll:
            self._wake_fd, self._is_woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
            epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
            for fd in self._endpoints:
                epoll.register(fd, _EVENTS)
            self._epoll = epoll
            try:
                while True:
                    fell_asleep_s = self.clock_s()
                    await trio.lowlevel.wait_readable(epoll.fileno())
                    await self._serve_all(epoll, rounds, fell_asleep_s)
            finally:
                with self._waking:
                    self._epoll = None
                    os.close(self._wake_fd)
                for call, args in self._calls:
                    self._token.run_sync_soon(call, *args)
                self._calls.clear()

    async def _serve_all(self, epoll: select.epoll, rounds: Rounds, fell_asleep_s: float) -> None:
        """Serve clients, and do what could wait, until there is nothing to do."""
        pacing, awake_s = self._pacing, self.clock_s()
        stays_awake = awake_s - fell_asleep_s < 2 * pacing.awake_s
        turn_over_s = awake_s + pacing.turn_s
        while (
            self._serve_round(epoll, rounds)
            or rounds.idle()
            or (stays_awake and self._wait_awake(epoll, rounds, awake_s + pacing.awake_at_most_s))
        ):
            if self.clock_s() > turn_over_s:
                await trio.lowlevel.checkpoint()
                turn_over_s = self.clock_s() + pacing.turn_s

    def _wait_awake(self, epoll: select.epoll, rounds: Rounds, until_s: float) -> bool:
        """Whether somebody soon sends something, if nobody else needs the event loop."""
        if self.clock_s() > until_s or rounds.is_busy:
            return False
        if trio.lowlevel.current_statistics().tasks_runnable:
            return False
        over_s = self.clock_s() + self._pacing.awake_s
        while self.clock_s() < over_s:
            if events := epoll.poll(0, self._pacing.clients_per_round):
                self._mark_readable(events)
                return True
        return False

    def _mark_readable(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            if fd == self._wake_fd:
                self._is_woken = False  # from now on whoever calls wakes us again, and his call is seen below
                continue
            endpoint = self._endpoints[fd]
            endpoint.mark_readable(ended=bool(event & _ENDED))
            self._again[endpoint] = None

    def _serve_round(self, epoll: select.epoll, rounds: Rounds) -> bool:
        """Serve all who have sent something or called, while the turn lasts; False if there were none."""
        pacing, clock_s = self._pacing, self.clock_s
        self._mark_readable(epoll.poll(0, pacing.clients_per_round))
        endpoints, self._again = self._again, {}
        if not endpoints and not self._calls:
            return False
        late: list[PolledEndpoint] = []
        again: list[PolledEndpoint] = []
        served: set[PolledEndpoint] = set()
        turn_over_s = clock_s() + pacing.turn_s
        self.in_round = True
        try:
            for _ in range(len(self._calls)):  # what these call soon comes in the next round
                call, args = self._calls.popleft()
                call(*args)
            while True:
                for endpoint in endpoints:
                    if clock_s() > turn_over_s:
                        late.append(endpoint)
                    elif endpoint.serve():
                        again.append(endpoint)
                if late or len(endpoints) < pacing.many_clients:
                    break
                # Who was served has had his turn: all wait for the end of the round.
                served.update(endpoints)
                self._mark_readable(epoll.poll(0, pacing.clients_per_round))
                again += [endpoint for endpoint in self._again if endpoint in served]
                endpoints = {endpoint: None for endpoint in self._again if endpoint not in served}
                self._again = {}
            self._again |= dict.fromkeys(late + again)
        finally:
            try:
                rounds.end_round()
            finally:
                self.in_round = False
        return True
