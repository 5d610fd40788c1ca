"""A proxy between clients and a broker that injects a fault into each connection, at a given byte.

It uses real sockets on loopback on both sides. It decodes no data, so that a fault can be anywhere: in the middle of a
frame, a TLS record or a snappy chunk.
"""

import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import trio

_READ_BYTES = 64 * 1024
DELAY_S = 0.3
"""Delay of trickled data."""


class Towards(Enum):
    """A direction."""

    CLIENT = "client"
    BROKER = "broker"


class Kind(Enum):
    """The faults of a connection."""

    HANG_UP = "hang up"
    """Both sides see the end, after the data sent before it."""
    RESET = "reset"
    """Both sides see an error, and lose unread data."""
    END = "end"
    """This direction ends, the other continues: a half-closed connection."""
    SILENCE = "silence"
    """No more data arrives in this direction, not even the end."""
    BLACK_HOLE = "black hole"
    """No more data arrives in either direction."""
    STUCK = "stuck"
    """No more data is read in this direction, so the sender must wait."""
    FLIP = "flip"
    """One bit is flipped."""
    TRICKLE = "trickle"
    """From here on, data arrives late and byte by byte. No data is lost."""


CUTS = (Kind.HANG_UP, Kind.RESET, Kind.END)
STALLS = (Kind.SILENCE, Kind.BLACK_HOLE, Kind.STUCK)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its position.

    Attributes:
        towards: The direction that is counted and affected.
        at: The fault happens after this many bytes in that direction. A `FLIP` is in the next byte.
        bit: For a `FLIP`: 0 is the lowest.
    """

    kind: Kind
    towards: Towards
    at: int
    bit: int = 0

    def __str__(self) -> str:
        bit = f" of bit {self.bit}" if self.kind is Kind.FLIP else ""
        return f"{self.kind.value}{bit} towards the {self.towards.value} after {self.at} bytes"


class Passage:
    """One connection through the proxy.

    Attributes:
        passed: The data that was passed on in each direction.
        struck: Set when its fault happens.
        struck_at: When that was, on trio's clock.
        over: Set when both sockets are closed.
    """

    def __init__(self, client: trio.SocketStream, fault: Fault | None) -> None:
        self.passed = {towards: bytearray() for towards in Towards}
        self.struck = trio.Event()
        self.struck_at = 0.0
        self.over = trio.Event()
        self._fault = fault
        self._streams = {Towards.CLIENT: client}
        self._scope = trio.CancelScope()
        self._silent: set[Towards] = set()
        self._stuck: set[Towards] = set()
        self._trickles = False
        self._one_ended = trio.Event()  # by direction

    @property
    def lengths(self) -> dict[Towards, int]:
        """Number of bytes passed on in each direction."""
        return {towards: len(data) for towards, data in self.passed.items()}

    def plan(self, fault: Fault) -> None:
        """Schedule a fault; its position counts from now on."""
        at = len(self.passed[fault.towards]) + fault.at
        self._fault = Fault(fault.kind, fault.towards, at, fault.bit)
        self._strike_if_due(fault.towards)

    def cut(self, kind: Kind = Kind.HANG_UP) -> None:
        """End the connection now: `HANG_UP` or `RESET`."""
        if kind is Kind.RESET:
            for stream in self._streams.values():
                if stream.socket.fileno() >= 0:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._scope.cancel()

    async def run(self, broker_address: tuple[str, int]) -> None:
        """Connect to the broker and pass data on until the connection ends."""
        try:
            with self._scope:
                self._streams[Towards.BROKER] = await trio.open_tcp_stream(*broker_address)
                self._strike_if_due(*Towards)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_on, Towards.BROKER)
                    nursery.start_soon(self._pass_on, Towards.CLIENT)
        except OSError:
            pass  # no broker: the client sees its connection end
        finally:
            for stream in self._streams.values():
                stream.socket.close()
            self.over.set()

    async def _pass_on(self, towards: Towards) -> None:
        source = self._streams[Towards.BROKER if towards is Towards.CLIENT else Towards.CLIENT]
        target = self._streams[towards]
        try:
            while data := bytes(await source.receive_some(_READ_BYTES)):
                if self._trickles:
                    await trio.sleep(DELAY_S)
                while data and towards not in self._silent:
                    piece, data = self._until_fault(towards, data)
                    # Lets other tasks run, so that a single byte is read separately.
                    await target.send_all(piece)
                    self.passed[towards] += piece
                    self._strike_if_due(towards)
                if towards in self._stuck:
                    await self._one_ended.wait()
                    self.cut()
            if towards not in self._silent:
                await target.send_eof()
        except trio.BrokenResourceError:
            self.cut(Kind.RESET)
        self._one_ended.set()

    def _until_fault(self, towards: Towards, data: bytes) -> tuple[bytes, bytes]:
        """Return the data to pass on at once: up to the position of the fault."""
        fault = self._fault
        if self._trickles:
            return data[:1], data[1:]
        if fault is None or fault.towards is not towards or self.struck.is_set():
            return data, b""
        ahead = fault.at - len(self.passed[towards])
        if fault.kind is Kind.FLIP and ahead == 0:
            self._strike()
            return bytes([data[0] ^ 1 << fault.bit]), data[1:]
        return data[:ahead], data[ahead:]

    def _strike(self) -> None:
        self.struck_at = trio.current_time()
        self.struck.set()

    def _strike_if_due(self, *directions: Towards) -> None:
        fault = self._fault
        if (
            fault is None
            or self.struck.is_set()
            or fault.towards not in directions
            or fault.kind is Kind.FLIP
        ):
            return
        if len(self.passed[fault.towards]) < fault.at:
            return
        self._strike()
        match fault.kind:
            case Kind.HANG_UP | Kind.RESET:
                self.cut(fault.kind)
            case Kind.END:
                self._silent.add(fault.towards)
                self._streams[fault.towards].socket.shutdown(socket.SHUT_WR)
            case Kind.SILENCE:
                self._silent.add(fault.towards)
            case Kind.BLACK_HOLE:
                self._silent.update(Towards)
            case Kind.STUCK:
                self._silent.add(fault.towards)
                self._stuck.add(fault.towards)
            case Kind.TRICKLE:
                self._trickles = True


class Proxy:
    """Listens in front of a broker.

    Args:
        broker_address: `host:port`.

    Attributes:
        address: Where clients connect, `host:port`.
        passages: All connections, in the order in which they were accepted.
        accepted_at: When, on trio's clock.
        always: The fault of every connection without a planned one; None: no fault.
        held: While this is not None, connections wait, and nothing is passed on until a test sets their
            events.
    """

    def __init__(self, broker_address: str) -> None:
        host, _, port = broker_address.rpartition(":")
        self.broker_address = (host, int(port))
        self.address = ""
        self.passages: list[Passage] = []
        self.accepted_at: list[float] = []
        self.always: Fault | None = None
        self.held: list[trio.Event] | None = None
        self._planned: deque[Fault] = deque()
        self._news = trio.Event()

    def plan(self, *faults: Fault) -> None:
        """Schedule these faults for the next connections, one each."""
        self._planned.extend(faults)

    async def accepted(self, count: int) -> Passage:
        """Wait until this many connections were accepted in total; returns the last one."""
        while len(self.passages) < count:
            await self._news.wait()
        return self.passages[count - 1]

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, on a free port, until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = "127.0.0.1:%d" % listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve, [listener])
            task_status.started()

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.accepted_at.append(trio.current_time())
        passage = Passage(stream, self._planned.popleft() if self._planned else self.always)
        self.passages.append(passage)
        self._news.set()
        self._news = trio.Event()
        if self.held is not None:
            released = trio.Event()
            self.held.append(released)
            await released.wait()
        await passage.run(self.broker_address)


@asynccontextmanager
async def proxy_before(broker_address: str) -> AsyncIterator[Proxy]:
    """Run a proxy; at the end, close all its connections."""
    proxy = Proxy(broker_address)
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve)
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
