"""A broker that follows the test's script: it sends given bytes, and compares what it receives byte by byte."""

import functools
import json
import os
import select
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import trio
import trio.testing

from trio_nsq.protocol.frames import OK_FRAME, FrameType, encode_error, encode_frame, encode_response
from trio_nsq.protocol.limits import MAGIC_V2

PATIENCE_S = 60.0
"""The time limit of a test."""

P = ParamSpec("P")


def bounded(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Fail a test that takes too long."""

    @functools.wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with trio.fail_after(PATIENCE_S):
            started_at = trio.current_time()
            await test(*args, **kwargs)
            # Shielded code cannot be cancelled.
            assert trio.current_time() - started_at < PATIENCE_S

    return run


def identify_reply(max_rdy_count: int = 2500, **more: object) -> bytes:
    """Return the frame that answers IDENTIFY."""
    fields = {"max_rdy_count": max_rdy_count, "version": "1.3.0", **more}
    return encode_response(json.dumps(fields).encode())


def message_id(number: int) -> bytes:
    """Return the id of message `number`."""
    return b"%016x" % number


def message(number: int, body: bytes = b"", attempts: int = 1, timestamp_ns: int = 0) -> bytes:
    """Return the frame of message `number`."""
    head = struct.pack(">qH16s", timestamp_ns, attempts, message_id(number))
    return encode_frame(FrameType.MESSAGE, head + (body or b"body %d" % number))


def fins(*numbers: int) -> bytes:
    """Return FIN commands for these messages."""
    return b"".join(b"FIN %s\n" % message_id(number) for number in numbers)


def reqs(*numbers: int, delay_ms: int = 0) -> bytes:
    """Return REQ commands for these messages."""
    return b"".join(b"REQ %s %d\n" % (message_id(number), delay_ms) for number in numbers)


def error(text: str) -> bytes:
    """Return an error frame."""
    return encode_error(text.encode())


def sized(body: bytes) -> bytes:
    """Return a body with its size in front."""
    return struct.pack(">i", len(body)) + body


def pub(topic: str, body: bytes) -> bytes:
    """Return a PUB command."""
    return b"PUB %s\n" % topic.encode() + sized(body)


def mpub(topic: str, *bodies: bytes) -> bytes:
    """Return an MPUB command."""
    messages = struct.pack(">i", len(bodies)) + b"".join(map(sized, bodies))
    return b"MPUB %s\n" % topic.encode() + sized(messages)


class Peer:
    """The broker's end of one connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._unread = b""

    async def _read(self, count: int) -> bytes:
        while len(self._unread) < count:
            data = await self._stream.receive_some()
            assert data, f"the client hung up after {self._unread!r}, with {count} bytes expected"
            self._unread += data
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken

    async def expect(self, *pieces: bytes) -> None:
        """Wait for exactly these bytes."""
        for piece in pieces:
            # Received bytes are compared before waiting for more, so a wrong byte fails at once.
            for place in range(len(piece)):
                got = await self._read(1)
                assert got == piece[place : place + 1], f"{got + self._unread!r} instead of {piece[place:]!r}"

    async def expect_nothing(self) -> None:
        """Check that nothing arrives until every task waits."""
        await trio.testing.wait_all_tasks_blocked()
        assert self.receive_nowait() == b""

    async def receive(self) -> bytes:
        """Wait for bytes, and return all that have arrived."""
        return await self._read(1) + self.receive_nowait()

    async def receive_line(self) -> bytes:
        """Wait for a line."""
        line = b""
        while not line.endswith(b"\n"):
            line += await self._read(1)
        return line

    def receive_nowait(self) -> bytes:
        """Return the bytes that have arrived."""
        taken, self._unread = self._unread, b""
        # Until trio has processed its events.
        own = socket.socket(fileno=os.dup(self._stream.socket.fileno()))
        with own:
            try:
                return taken + own.recv(1_000_000, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken

    async def expect_end(self) -> None:
        """Wait until the client has disconnected without sending anything else."""
        assert self._unread == b""
        try:
            rest = await self._stream.receive_some()
        except trio.BrokenResourceError:
            rest = b""  # the client had unread data, so the kernel resets the connection
        assert rest == b""

    async def expect_identify(self) -> dict[str, Any]:
        """Wait for the magic and IDENTIFY; return the fields."""
        await self.expect(MAGIC_V2, b"IDENTIFY\n")
        (size,) = struct.unpack(">i", await self._read(4))
        fields: dict[str, Any] = json.loads(await self._read(size))
        return fields

    async def greet(self, max_rdy_count: int = 2500, **more: object) -> None:
        """Accept the client's IDENTIFY."""
        await self.expect_identify()
        await self.send(identify_reply(max_rdy_count, **more))

    async def subscribe(self, *, ready: int, max_rdy_count: int = 2500) -> None:
        """Accept the client's IDENTIFY and SUB, and wait for its RDY."""
        await self.greet(max_rdy_count)
        await self.expect(b"SUB topic channel\n")
        await self.send(OK_FRAME)
        await self.expect(b"RDY %d\n" % ready)

    async def send(self, *pieces: bytes) -> None:
        """Send bytes."""
        await self._stream.send_all(b"".join(pieces))

    def hang_up(self) -> None:
        """Close the connection cleanly."""
        self._stream.socket.close()

    def reset(self) -> None:
        """Reset the connection, as after a crash."""
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._stream.socket.close()


async def at_once(peer: Peer) -> None:
    """Before IDENTIFY."""


async def after_identify(peer: Peer) -> None:
    """After IDENTIFY."""
    await peer.expect_identify()


async def within_the_reply(peer: Peer) -> None:
    """After half of the answer to IDENTIFY."""
    await peer.expect_identify()
    await peer.send(identify_reply()[:20])


class FakeBroker:
    """Listens on a free loopback port, and on the same one again after `stop`."""

    def __init__(self) -> None:
        self._listener: trio.SocketListener | None = None
        self._peers: list[Peer] = []
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen."""
        (self._listener,) = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = self._listener.socket.getsockname()[1]

    def stop(self) -> None:
        """Stop listening: new connections are refused."""
        if self._listener is not None:
            self._listener.socket.close()
            self._listener = None

    async def accept(self) -> Peer:
        """Wait for the next connection."""
        assert self._listener is not None
        peer = Peer(await self._listener.accept())
        self._peers.append(peer)
        return peer

    async def expect_no_connection(self) -> None:
        """Check that no client connects before every task waits."""
        assert self._listener is not None
        await trio.testing.wait_all_tasks_blocked()
        readable, _, _ = select.select([self._listener.socket.fileno()], [], [], 0)
        assert not readable

    def close(self) -> None:
        """Close all sockets."""
        self.stop()
        for peer in self._peers:
            peer.hang_up()


@asynccontextmanager
async def fake_broker() -> AsyncIterator[FakeBroker]:
    """A listening `FakeBroker`."""
    broker = FakeBroker()
    await broker.start()
    try:
        yield broker
    finally:
        broker.close()
