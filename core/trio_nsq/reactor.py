"""The poller: one task reads the sockets of all clients, and sends to them directly.

A task switch for each read costs more than most commands. So one task, the poller, asks the kernel which sockets are
readable, and serves these clients one after the other. All publishes of one round are stored together. A client's own
task is woken only for work that has to wait.

The poller handles the results of threads in the same rounds. Work that can wait runs when no client sends anything.

Sending needs no task switch either: see `SendBuffer`.
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
from typing import Any, Final, Protocol

import trio

from .compiled import mypyc_attr
from .pacing import Pacing
from .protocol import NSQError
from .protocol.compression import Codec

logger = logging.getLogger("trio_nsq.broker")

RECEIVE_BYTES: Final = 64 * 1024
_MAX_PARTS: Final = 256
_CONGESTED_BYTES: Final = 4 * 1024 * 1024
# Edge-triggered: a socket is registered once, and each arrival of data causes an event.
_EVENTS: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_ENDED: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class EndpointState(Enum):
    """Which task reads a client's socket."""

    RESTING = auto()
    """The poller, when data arrives."""
    SERVING = auto()
    """The poller is reading now."""
    AWAITING = auto()
    """None: the client waits for a result. The code that completes it continues with the client."""
    IN_TASK = auto()
    """The client's own task."""


# Globals: an attribute lookup on the enum costs more than the comparison.
RESTING: Final = EndpointState.RESTING
SERVING: Final = EndpointState.SERVING
AWAITING: Final = EndpointState.AWAITING
IN_TASK: Final = EndpointState.IN_TASK


@mypyc_attr(allow_interpreted_subclasses=True)  # the HTTP connections, which gain nothing
class PolledEndpoint:
    """A client's socket. The poller reads it while no command has to wait; otherwise the client's task does.

    A subclass implements `serve_data`, which ends with a call of `rest`, `hand_over`, or `await_completion`.

    Attributes:
        state: Which task reads.
        handed_over: Set when the client's task takes over.
        is_unread: The socket may have unread data.
        read_bytes: Maximum size of a read.
    """

    def __init__(self, sock: socket.socket, poller: "Poller") -> None:
        self.state = IN_TASK
        self.handed_over = trio.Event()
        self.read_bytes = RECEIVE_BYTES
        self._sock = sock
        self._poller = poller
        self.is_unread = True
        self._ended = False  # the client has ended its side; data before that may be unread

    def start_polling(self) -> None:
        """Have the poller watch the socket. The client's task reads it until `rest` is called."""
        self._poller.add(self._sock.fileno(), self)

    def stop_polling(self) -> None:
        """Remove the socket from the poller. Call this before the socket is closed."""
        self.state = IN_TASK
        self._poller.remove(self._sock.fileno())

    def serve_data(self, data: bytes | None) -> None:
        """Handle data the poller has read: b"" if the client has ended its side, None if the connection is lost."""
        raise NotImplementedError

    def mark_readable(self, *, ended: bool) -> None:
        """Record that data has arrived; with `ended`, that the client has ended its side after it."""
        self.is_unread = True
        self._ended |= ended

    def serve(self) -> bool:
        """In the poller: read once and handle the data. Returns True if there may be more to read."""
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
        """Read at most `read_bytes`. Raises OSError; BlockingIOError if there is no data."""
        try:
            data = self._sock.recv(self.read_bytes)
        except BlockingIOError:
            self.is_unread = False
            raise
        # A short read has emptied the socket: the kernel reports later data, but not the end a second time.
        self.is_unread = len(data) == self.read_bytes or self._ended
        return data

    def rest(self) -> None:
        """Leave the client to the poller."""
        self.state = RESTING

    def await_completion(self) -> None:
        """Stop reading until the client's request is complete."""
        self.state = AWAITING

    def hand_over(self) -> None:
        """Wake the client's task."""
        self.state = IN_TASK
        self.handed_over.set()

    def poll_again(self) -> None:
        """After a completion, have the poller read again if there may be unread data."""
        if self.is_unread and self.state is RESTING:
            self._poller.poll_again(self._sock.fileno())


class SendBuffer:
    """Bytes for one non-blocking socket. The caller of `flush` sends them, without a task switch.

    If the socket is full, the client's own task waits for it in `drain`.

    Attributes:
        patience_s: How long the socket may accept no data before the connection is closed; math.inf is no limit.
        full: The socket did not accept all data; set until `drain` has sent the rest.
        broken: The connection is lost; further data is dropped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.patience_s = math.inf
        self.full = False
        self.broken = False
        self._sock = sock
        self._codecs: list[Codec] = []  # in the order of encoding
        self._wire: deque[bytes | memoryview] = deque()
        # Data before encoding; the same deque as `_wire` without a codec.
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
        """Add data that is not to be encoded, such as TLS records. It is sent before data not encoded yet."""
        if data:
            self._wire.append(data)
            if self.full:
                self._late_bytes += len(data)

    def add_codec(self, codec: Codec) -> None:
        """Encode all data put from now on with this codec, before the codecs already added."""
        self.encode()
        self._codecs.insert(0, codec)
        self._plain = deque()

    @property
    def congested(self) -> bool:
        """Much data was added since the socket is full: the caller should stop producing more."""
        return self._late_bytes > _CONGESTED_BYTES

    def flush(self) -> None:
        """Send as much as the socket accepts without waiting."""
        if (self._plain or self._wire) and not self.full:
            self._send()
            if self._plain or self._wire:
                self.full = True
                self._emptied = trio.Event()
                self._became_full.set()

    def encode(self) -> None:
        """Encode the data put so far now, not at the next flush."""
        if not self._codecs or not self._plain:
            return
        data = b"".join(self._plain)
        self._plain.clear()
        try:
            for codec in self._codecs:
                data = codec.encode(data)
        except NSQError as exc:
            logger.info("connection lost, data cannot be encoded: %s", exc)
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
        """Wait until the socket is full, then send the rest as the socket accepts it.

        Returns False if the connection is lost, or the socket accepted no data for `patience_s`.
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
        """Wait until all data is sent or the connection is lost. `drain` must run in another task."""
        if self.full:
            await self._emptied.wait()

    def abandon(self) -> None:
        """Mark the connection as lost: drop all data, now and later."""
        self.broken = self.full = True
        self._plain.clear()
        self._wire.clear()
        self._became_full.set()
        self._emptied.set()


class Rounds(Protocol):
    """Hooks that a poller calls around its rounds."""

    @property
    def is_busy(self) -> bool:
        """Whether a thread will soon need the event loop; then the poller must not wait awake."""

    @property
    def is_call_near(self) -> bool:
        """Whether a thread will probably need the event loop within `Pacing.doze_s`. It uses `Poller.call_soon`."""

    def end_round(self) -> None:
        """Called when all readable clients of a round are served."""

    def idle(self) -> bool:
        """Called when no client sends anything: do some deferrable work. Returns True if there may be more of it."""

    def before_sleep(self) -> bool:
        """Called before the poller sleeps: do work that waits for clients to send. Returns True if there was any."""


class _ScheduledTasks(trio.abc.Instrument):
    """Notes whether trio has scheduled tasks. Asking trio each time takes longer than a read from a socket.

    Attributes:
        some_runnable: A task was scheduled since `ask`, or was runnable then.
    """

    def __init__(self) -> None:
        self.some_runnable = False

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.some_runnable = True

    def ask(self) -> None:
        """Ask trio."""
        self.some_runnable = trio.lowlevel.current_statistics().tasks_runnable > 0


class Poller:
    """Watches the sockets of all clients, and serves the readable ones in rounds. One for a broker.

    Attributes:
        clock_s: A clock that never steps, in seconds.
        in_round: A round is running: requests are best gathered until its end.
    """

    def __init__(self, pacing: Pacing | None = None, clock_s: Callable[[], float] = perf_counter) -> None:
        self.in_round = False
        self._pacing = pacing or Pacing()
        self.clock_s = clock_s
        self._token = trio.lowlevel.current_trio_token()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._waking = Lock()
        self._wake_fd = -1  # an eventfd, while `run` runs
        self._is_woken = False  # it was written to, and the poller has not seen it yet
        self._epoll: select.epoll | None = None  # while `run` runs
        self._endpoints: dict[int, PolledEndpoint] = {}
        # To serve next. An ordered set: a client is queued at most once.
        self._again: dict[PolledEndpoint, None] = {}
        self._tasks = _ScheduledTasks()
        self._dozed_in_vain = False  # and no thread has called since

    def add(self, fd: int, endpoint: PolledEndpoint) -> None:
        """Watch a client's socket, until `remove`."""
        if self._epoll is not None:
            self._epoll.register(fd, _EVENTS)
        self._endpoints[fd] = endpoint

    def remove(self, fd: int) -> None:
        """Remove a client. Call this before its socket is closed."""
        del self._endpoints[fd]
        if self._epoll is not None:
            self._epoll.unregister(fd)

    def poll_again(self, fd: int) -> None:
        """Serve a client soon: its socket may have data for which no further event comes."""
        if self.in_round:
            self._again[self._endpoints[fd]] = None
        elif self._epoll is not None:
            self._epoll.modify(fd, _EVENTS)  # causes an event if there is data

    def wake(self) -> None:
        """Have the poller start a round soon. Thread-safe."""
        with self._waking:
            self._wake()

    def _wake(self) -> None:
        if self._epoll is not None and not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function in the next round, or by trio if `run` is not running. Thread-safe."""
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
            trio.lowlevel.add_instrument(self._tasks)
            try:
                while True:
                    fell_asleep_s = self.clock_s()
                    await trio.lowlevel.wait_readable(epoll.fileno())
                    await self._serve_all(epoll, rounds, fell_asleep_s)
            finally:
                trio.lowlevel.remove_instrument(self._tasks)
                with self._waking:  # later calls must not overtake these
                    self._epoll = None
                    os.close(self._wake_fd)
                    for call, args in self._calls:
                        self._token.run_sync_soon(call, *args)
                    self._calls.clear()

    async def _serve_all(self, epoll: select.epoll, rounds: Rounds, fell_asleep_s: float) -> None:
        """Run rounds and deferrable work until there is nothing to do."""
        pacing, clock_s = self._pacing, self.clock_s
        awake_s = clock_s()
        stays_awake = awake_s - fell_asleep_s < 2 * pacing.awake_s
        awake_until_s = awake_s + pacing.awake_at_most_s
        turn_over_s = awake_s + pacing.turn_s
        self._tasks.ask()
        while True:
            self._mark_readable(epoll.poll(0, pacing.clients_per_round))
            if self._again or self._calls:
                self._serve_round(epoll, rounds)
            elif not rounds.idle():
                if stays_awake and self._wait_awake(epoll, rounds, awake_until_s):
                    self._serve_round(epoll, rounds)
                elif not rounds.before_sleep():
                    if not self._doze(epoll, rounds):
                        return
                    self._serve_round(epoll, rounds)
            if clock_s() > turn_over_s:
                await trio.lowlevel.checkpoint()
                self._tasks.ask()
                turn_over_s = clock_s() + pacing.turn_s

    def _wait_awake(self, epoll: select.epoll, rounds: Rounds, until_s: float) -> bool:
        """Busy-wait briefly for clients to send. Returns True if one did; False at once if the event loop is needed."""
        clock_s, clients = self.clock_s, self._pacing.clients_per_round
        now_s = clock_s()
        if now_s > until_s or rounds.is_busy or self._tasks.some_runnable:
            return False
        over_s = now_s + self._pacing.awake_s
        while clock_s() < over_s:
            if events := epoll.poll(0, clients):
                self._mark_readable(events)
                return True
        return False

    def _doze(self, epoll: select.epoll, rounds: Rounds) -> bool:
        """Sleep without trio while a thread works for a moment. Returns True if there is something to serve.

        This saves a turn of trio, and its system calls, for each sync. After a sleep in vain, for example because the
        disk hangs, the poller does not do this again before a thread has called.
        """
        if not rounds.is_call_near or self._dozed_in_vain or self._tasks.some_runnable:
            return False
        events = epoll.poll(self._pacing.doze_s, self._pacing.clients_per_round)
        self._dozed_in_vain = not events
        self._mark_readable(events)
        return bool(events)

    def _mark_readable(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            if fd == self._wake_fd:
                self._is_woken = False  # later calls wake the poller again; earlier ones run in this round
                self._dozed_in_vain = False
                continue
            endpoint = self._endpoints[fd]
            endpoint.mark_readable(ended=bool(event & _ENDED))
            self._again[endpoint] = None

    def _serve_round(self, epoll: select.epoll, rounds: Rounds) -> None:
        """Serve the readable clients and run queued calls, for at most a turn."""
        pacing, clock_s = self._pacing, self.clock_s
        endpoints, self._again = self._again, {}
        late: list[PolledEndpoint] = []
        again: list[PolledEndpoint] = []
        turn_over_s = clock_s() + pacing.turn_s
        self.in_round = True
        try:
            for _ in range(len(self._calls)):  # calls that these add run in the next round
                call, args = self._calls.popleft()
                call(*args)
            served: set[PolledEndpoint] = set()
            while True:
                for endpoint in endpoints:
                    if clock_s() > turn_over_s:
                        late.append(endpoint)
                    elif endpoint.serve():
                        again.append(endpoint)
                if len(endpoints) < pacing.many_clients or late:
                    break
                # A client is served once per round; a second time would delay the end of the round for all.
                served.update(endpoints)
                self._mark_readable(epoll.poll(0, pacing.clients_per_round))
                again += [endpoint for endpoint in self._again if endpoint in served]
                endpoints = {endpoint: None for endpoint in self._again if endpoint not in served}
                self._again = {}
            for endpoint in late + again:
                self._again[endpoint] = None
        finally:
            try:
                rounds.end_round()
            finally:
                self.in_round = False
