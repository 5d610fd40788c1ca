"""The poller: one task reads the sockets of all clients, and sends to them directly.

A task switch for each read costs more than most commands. So one task asks the kernel which sockets are readable, and
serves these clients one after the other, in rounds. A client's own task is woken only for work that has to wait. The
results of threads are handled in the same rounds. `broker/scheduler.py` is this task, and shows the order of its work.

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
from threading import Lock, get_ident
from time import perf_counter
from typing import Any, Final

import trio

from ..platform.compiled import mypyc_attr
from ..platform.requirements import require_epoll
from ..protocol import NSQError
from ..protocol.compression import Codec
from .pacing import Pacing

require_epoll()

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

RECEIVE_BYTES: Final = 64 * 1024
_MAX_PARTS: Final = 256
_CONGESTED_BYTES: Final = 4 * 1024 * 1024
# Edge-triggered: a socket is registered once, and each arrival of data causes an event.
_EVENTS: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_UNWATCHED: Final = select.EPOLLET  # still reports once that the connection is lost
_ENDED: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class EndpointState(Enum):
    """Which task reads a client's socket. `PolledEndpoint` has all transitions, and checks them.

    IN_TASK  -- rest -->              RESTING
    RESTING  -- serve -->             SERVING
    SERVING  -- rest -->              RESTING
    SERVING  -- await_completion -->  AWAITING, and from there each of these three, when the result is there
    SERVING  -- hand_over -->         IN_TASK
    """

    RESTING = auto()
    """The poller, when data arrives."""
    SERVING = auto()
    """The poller is reading now."""
    AWAITING = auto()
    """None: the client waits for a result. The code that completes it continues with the client."""
    IN_TASK = auto()
    """The client's own task, which may wait for a result, too."""


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
        handed_over: Set when the client's task takes over; None: no task waits for that.
        is_unread: The socket may have unread data.
        read_bytes: Maximum size of a read.
    """

    def __init__(self, sock: socket.socket, poller: "Poller") -> None:
        self.state: EndpointState = IN_TASK
        self.handed_over: trio.Event | None = None
        self.read_bytes = RECEIVE_BYTES
        self._sock = sock
        self._poller = poller
        self.is_unread: bool = True
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
        assert self.state is not RESTING
        self.state = RESTING

    def await_completion(self) -> None:
        """Stop reading until the client's request is complete."""
        assert self.state is SERVING or self.state is AWAITING
        self.state = AWAITING

    def hand_over(self) -> None:
        """Wake the client's task."""
        assert self.state is not RESTING
        self.state = IN_TASK
        if self.handed_over is not None:
            self.handed_over.set()

    def read_later(self) -> None:
        """Have the poller not read for `Pacing.finishes_s`, because more will have arrived then."""
        assert self.state is RESTING
        self._poller.read_later(self._sock.fileno())

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
        on_full: Called when `drain` has something to do, also because the connection is lost; None: it runs always.
        broken: The connection is lost; further data is dropped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.patience_s: float = math.inf
        self.full: bool = False
        self.on_full: Callable[[], object] | None = None
        self.broken: bool = False
        self._sock = sock
        self._codecs: list[Codec] = []  # in the order of encoding
        self._wire: deque[bytes | memoryview] = deque()
        # Data before encoding; the same deque as `_wire` without a codec.
        self._plain: deque[bytes | memoryview] = self._wire
        self._late_bytes = 0
        # While tasks wait for these: most clients never need them.
        self._became_full: trio.Event | None = None
        self._emptied: trio.Event | None = None

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
                self._fill()

    def _fill(self) -> None:
        if self._became_full is not None:
            self._became_full.set()
        if self.on_full is not None:
            self.on_full()

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
        if not self.full:
            self._became_full = trio.Event()
            await self._became_full.wait()
            self._became_full = None
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
        self._wake_waiting()
        return True

    async def emptied(self) -> None:
        """Wait until all data is sent or the connection is lost. `drain` must run in another task."""
        if self.full and not self.broken:
            if self._emptied is None:
                self._emptied = trio.Event()
            await self._emptied.wait()

    def _wake_waiting(self) -> None:
        """Wake the tasks that wait in `emptied`."""
        if self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    def abandon(self) -> None:
        """Mark the connection as lost: drop all data, now and later."""
        self.broken = True
        self.full = True
        self._plain.clear()
        self._wire.clear()
        self._fill()
        self._wake_waiting()


class Poller:
    """Watches the sockets of all clients, and serves the readable ones. One for a broker.

    Attributes:
        clock_s: A clock that never steps, in seconds.
        in_round: A round is running: requests are best gathered until its end.
        is_asleep: The poller waits in trio: only `wake` and clients start a round.
    """

    def __init__(self, pacing: Pacing | None = None, clock_s: Callable[[], float] = perf_counter) -> None:
        self.in_round: bool = False
        self.is_asleep: bool = False
        self._pacing = pacing or Pacing()
        self.clock_s = clock_s
        self._token = trio.lowlevel.current_trio_token()
        self._loop_thread = get_ident()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._waking = Lock()
        self._wake_fd = -1  # an eventfd, while it is open
        self._is_woken = False  # it was written to, and the poller has not seen it yet
        self._epoll: select.epoll | None = None  # while it is open
        self._endpoints: dict[int, PolledEndpoint] = {}
        # To serve next. An ordered set: a client is queued at most once.
        self._again: dict[PolledEndpoint, None] = {}
        self._due: deque[Callable[[], None]] = deque()  # to call in this round
        self._later: dict[int, float] = {}  # sockets that are not watched before this time, in its order
        self._napped_in_vain = False  # and nothing has called since

    def add(self, fd: int, endpoint: PolledEndpoint) -> None:
        """Watch a client's socket, until `remove`."""
        if self._epoll is not None:
            self._epoll.register(fd, _EVENTS)
        self._endpoints[fd] = endpoint

    def remove(self, fd: int) -> None:
        """Remove a client. Call this before its socket is closed."""
        del self._endpoints[fd]
        self._later.pop(fd, None)
        if self._epoll is not None:
            self._epoll.unregister(fd)

    def poll_again(self, fd: int) -> None:
        """Serve a client soon: its socket may have data for which no further event comes."""
        if self.in_round:
            self._again[self._endpoints[fd]] = None
        elif self._epoll is not None:
            self._later.pop(fd, None)
            self._epoll.modify(fd, _EVENTS)  # causes an event if there is data

    def read_later(self, fd: int) -> None:
        """See `PolledEndpoint.read_later`."""
        if self._epoll is not None:
            self._later.pop(fd, None)
            self._later[fd] = self.clock_s() + self._pacing.finishes_s
            self._epoll.modify(fd, _UNWATCHED)

    @property
    def reads_later(self) -> bool:
        """Whether a socket is not watched now: `poll` has to be called again soon."""
        return bool(self._later)

    def wake(self) -> None:
        """Have the poller start a round soon. Thread-safe."""
        with self._waking:
            self._wake()

    def _wake(self) -> None:
        if self._epoll is not None and not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function in the next round, or by trio if the poller is not open. Thread-safe."""
        with self._waking:
            if self._epoll is not None:
                self._calls.append((call, args))
                self._napped_in_vain = False
                # After a round, the poller looks for calls.
                if not (self.in_round and get_ident() == self._loop_thread):
                    self._wake()
                return
        self._token.run_sync_soon(call, *args)

    def call_in_next_round(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function in the next round. Only in the event loop, and by what looks for calls before it sleeps."""
        if self._epoll is None:
            self.call_soon(call, *args)
        else:
            self._calls.append((call, args))
            self._napped_in_vain = False

    def call_in_round(self, call: Callable[[], None]) -> None:
        """Call a function in this round, when it is at `call_due` again; without a round, soon. Thread-safe."""
        if self.in_round and get_ident() == self._loop_thread:
            self._due.append(call)
        else:
            self.call_soon(call)

    # ------------------------------------------------------------------ for the scheduler

    def call_due(self) -> None:
        """Call what `call_in_round` was given."""
        while self._due:
            self._due.popleft()()

    def open(self) -> None:
        """Begin to watch the clients. Calls from threads now wait for a round."""
        epoll = select.epoll()
        self._wake_fd, self._is_woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        for fd in self._endpoints:
            epoll.register(fd, _EVENTS)
        self._epoll = epoll

    def close(self) -> None:
        """End that. Trio makes the calls that wait, and later ones."""
        assert self._epoll is not None
        with self._waking:  # later calls must not overtake these
            self._epoll.close()
            self._epoll = None
            self._later.clear()
            os.close(self._wake_fd)
            for call, args in self._calls:
                self._token.run_sync_soon(call, *args)
            self._calls.clear()

    async def sleep(self) -> None:
        """Wait until there is something to serve, while trio runs other tasks."""
        assert self._epoll is not None
        self.is_asleep = True
        try:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
        finally:
            self.is_asleep = False

    def poll(self) -> bool:
        """Find the readable clients. Returns True if there is something to serve: these, or calls."""
        self._look()
        return bool(self._again or self._calls)

    def spin(self) -> bool:
        """Busy-wait briefly for clients to send. Returns True if there is something to serve."""
        clock_s = self.clock_s
        over_s = clock_s() + self._pacing.spin_s
        while clock_s() < over_s:
            if self._look():
                return True
        return False

    def nap(self) -> bool:
        """Sleep briefly without trio. Returns True if there is something to serve.

        This saves a turn of trio, and its system calls, for each client that sends soon.
        """
        return self._look(self._pacing.nap_s)

    def nap_for_call(self) -> bool:
        """As `nap`, while a thread or a follower syncs.

        After a nap in vain, for example because the disk hangs, the poller does not do this again before something was
        called.
        """
        if self._napped_in_vain:
            return False
        has_events = self.nap()
        self._napped_in_vain = not has_events
        return has_events

    def serve(self) -> None:
        """Run queued calls, and serve the readable clients, for at most a turn."""
        pacing, clock_s = self._pacing, self.clock_s
        endpoints, self._again = self._again, {}
        late: list[PolledEndpoint] = []
        again: list[PolledEndpoint] = []
        turn_over_s = clock_s() + pacing.turn_s
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
            self._look()
            again += [endpoint for endpoint in self._again if endpoint in served]
            endpoints = {endpoint: None for endpoint in self._again if endpoint not in served}
            self._again = {}
        for endpoint in late + again:
            self._again[endpoint] = None

    def _look(self, timeout_s: float = 0) -> bool:
        """Ask the kernel which sockets are readable, and wait for one. Returns whether there is one, or a call."""
        assert self._epoll is not None
        if self._later:
            self._watch_again()
        events = self._epoll.poll(timeout_s, self._pacing.clients_per_round)
        for fd, event in events:
            if fd == self._wake_fd:
                self._is_woken = False  # later calls wake the poller again; earlier ones run in this round
                continue
            endpoint = self._endpoints[fd]
            endpoint.mark_readable(ended=bool(event & _ENDED))
            self._again[endpoint] = None
        return bool(events)

    def _watch_again(self) -> None:
        """Watch the sockets again whose time is over; those with data cause events."""
        assert self._epoll is not None
        now_s = self.clock_s()
        while self._later:
            fd = next(iter(self._later))
            if self._later[fd] > now_s:
                return
            del self._later[fd]
            self._epoll.modify(fd, _EVENTS)
