"""A broker in the test's own trio run, and a client that says exactly what it is told to."""

import errno
import gc
import json
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest
import trio
import trio.testing

from trio_nsq.broker import BoundAddresses, BrokerOptions, StartupError, serve
from trio_nsq.broker.delivery import Delivery
from trio_nsq.broker.readers import Readers
from trio_nsq.broker.state.broker import Broker
from trio_nsq.broker.timers import Timers
from trio_nsq.log import DiskLog, Files
from trio_nsq.reactor import Poller

PATIENCE_S = 20
"""How long anything may take before a test fails instead of hanging; by the real clock unless the test's is a mock."""
BOTH_SYNCS = pytest.mark.parametrize("sync", ["always", "interval"])
"""For tests with both sync modes."""


@asynccontextmanager
async def running_broker(
    data_path: Path, *, files: Files | None = None, **options: Any
) -> AsyncIterator[BoundAddresses]:
    """A broker on free loopback ports; stopped gracefully at the end."""
    addresses = dict.fromkeys(("tcp_address", "http_address", "https_address"), "127.0.0.1:0")
    settings = BrokerOptions(data_path=data_path, **(addresses | options))
    async with trio.open_nursery() as nursery:
        with time_limit(nursery.cancel_scope):
            started: Any = await nursery.start(lambda task_status: _serve(settings, files, task_status))
            scope, bound = started
            yield bound
            scope.cancel()


@contextmanager
def time_limit(scope: trio.CancelScope) -> Iterator[None]:
    """Fail a test that hangs under a mock clock, by which no time passes."""
    token = trio.lowlevel.current_trio_token()
    timer = threading.Timer(3 * PATIENCE_S, lambda: token.run_sync_soon(scope.cancel))
    timer.daemon = True
    timer.start()
    try:
        yield
        assert not scope.cancel_called, "the test hung"
    except trio.Cancelled:
        if timer.finished.is_set():
            raise AssertionError("the test hung") from None
        raise
    finally:
        timer.cancel()


async def _serve(options: BrokerOptions, files: Files | None, task_status: Any) -> None:
    class Started:
        def started(self, bound: BoundAddresses) -> None:
            task_status.started((scope, bound))

    with trio.CancelScope() as scope:
        status: Any = Started()
        await serve(options, files=files, task_status=status)


class RawClient:
    """Bytes to a broker, frames back."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""
        self._early: deque[bytes] = deque()  # messages that came between a command and its answer

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self.stream.send_all(data)

    async def frame(self) -> tuple[int, bytes] | None:
        """The next frame's type and data; None when the broker has closed the connection."""
        head = await self.exactly(8)
        if head is None:
            return None
        size, frame_type = unpack(">ii", head)
        data = await self.exactly(size - 4)
        assert data is not None, "the connection ended inside a frame"
        return frame_type, data

    async def exactly(self, size: int) -> bytes | None:
        """So many bytes, whatever they are; None when the broker has closed the connection."""
        with trio.fail_after(PATIENCE_S):
            while len(self._buffer) < size:
                more = await self.stream.receive_some(65536)
                if not more:
                    assert not self._buffer, "the connection ended inside a frame"
                    return None
                self._buffer += more
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def take_received(self) -> bytes:
        """What has come and is no whole frame yet; it is the caller's from now on."""
        received, self._buffer = self._buffer, b""
        return received

    async def ok(self) -> None:
        """Expect OK; messages may come before it."""
        while (frame := await self.frame()) is not None and frame[0] == 2:
            self._early.append(frame[1])
        assert frame == (0, b"OK")

    async def error(self) -> str:
        """Expect an error frame; returns its text."""
        frame = await self.frame()
        assert frame is not None
        assert frame[0] == 1, frame
        return frame[1].decode("utf-8", "surrogateescape")

    async def message(self) -> "Received":
        """Expect a message."""
        if self._early:
            data = self._early.popleft()
        else:
            frame = await self.frame()
            assert frame is not None
            assert frame[0] == 2, frame
            data = frame[1]
        timestamp_ns, attempts, message_id = unpack(">qH16s", data[:26])
        return Received(message_id, data[26:], attempts, timestamp_ns)

    async def publish(self, topic: str, *bodies: bytes) -> None:
        """MPUB, and expect OK."""
        await self.send(mpub(topic, *bodies))
        await self.ok()

    async def subscribe(self, topic: str, channel: str, ready_count: int = 0) -> None:
        """SUB, expect OK, RDY."""
        await self.send(f"SUB {topic} {channel}\n".encode())
        await self.ok()
        if ready_count:
            await self.send(b"RDY %d\n" % ready_count)

    async def nothing_more(self) -> None:
        """Expect that the broker, having obeyed everything sent so far, has sent nothing else.

        A PUB to another topic is answered in its turn, so its OK marks the place.
        """
        assert not self._early
        await self.send(pub("marker", b"x"))
        await self.ok()
        assert not self._early


class Received:
    """A message as it came."""

    def __init__(self, message_id: bytes, body: bytes, attempts: int, timestamp_ns: int) -> None:
        self.id = message_id
        self.body = body
        self.attempts = attempts
        self.timestamp_ns = timestamp_ns


def identify(**fields: object) -> bytes:
    """IDENTIFY."""
    body = json.dumps(fields).encode()
    return b"IDENTIFY\n" + pack(">i", len(body)) + body


def pub(topic: str, body: bytes) -> bytes:
    """PUB."""
    return b"PUB %s\n%s%s" % (topic.encode(), pack(">i", len(body)), body)


def dpub(topic: str, defer_ms: int, body: bytes) -> bytes:
    """DPUB."""
    return b"DPUB %s %d\n%s%s" % (topic.encode(), defer_ms, pack(">i", len(body)), body)


def mpub(topic: str, *bodies: bytes) -> bytes:
    """MPUB."""
    content = pack(">i", len(bodies)) + b"".join(pack(">i", len(body)) + body for body in bodies)
    return b"MPUB %s\n%s%s" % (topic.encode(), pack(">i", len(content)), content)


@asynccontextmanager
async def connected(address: str, greeting: bytes = b"  V2") -> AsyncIterator[RawClient]:
    """A raw connection to `host:port` that has sent its magic."""
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        client = RawClient(stream)
        if greeting:
            await client.send(greeting)
        yield client


async def settle() -> None:
    """Let every task run until all of them wait for a socket, a thread or for time."""
    await trio.testing.wait_all_tasks_blocked(0.01)


def is_idle(thread: threading.Thread) -> bool:
    """Whether it is one of the broker's threads that stay, and has nothing to do: its name says so."""
    return thread.name.endswith(", idle")


async def threads_done() -> None:
    """Let every task run until all of them wait, and none of them for a thread that has something to do."""

    def are_done() -> bool:
        idle = sum(map(is_idle, threading.enumerate()))
        return trio.testing.active_thread_count() <= idle

    await settle()
    while not are_done():
        await until(are_done)
        await settle()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that only threads or other tasks bring about."""
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.lowlevel.checkpoint()


class QuietRounds:
    """For a `Poller`: nothing is done around its rounds."""

    is_busy = False

    def end_round(self) -> None:
        """Nothing."""

    def idle(self) -> bool:
        """Nothing."""
        return False


def a_delivery(broker: Broker, options: BrokerOptions, poller: Poller, nursery: trio.Nursery) -> Delivery:
    """What delivers the messages of a broker's state."""
    return Delivery(broker, options, Timers(broker), poller, Readers(broker), nursery)


class HeldFiles(Files):
    """A real file system where chosen operations wait, in their threads, until they are let go."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._go_on = threading.Event()
        self._reached = trio.Event()

    def hold(self, *operations: str) -> None:
        """Make these wait from now on: `write`, `sync`, `replace` or `rename`."""
        self._held = set(operations)
        self._go_on = threading.Event()
        self._reached = trio.Event()

    async def reached(self) -> None:
        """Wait until a thread waits."""
        with trio.fail_after(PATIENCE_S):
            await self._reached.wait()

    def release(self) -> None:
        """Let all go on."""
        self._held = set()
        self._go_on.set()

    def _pass(self, operation: str) -> None:
        if operation in self._held:
            trio.from_thread.run_sync(self._reached.set)
            assert self._go_on.wait(PATIENCE_S)

    def write(self, fd: int, offset: int, parts: Sequence[bytes]) -> None:
        self._pass("write")
        super().write(fd, offset, parts)

    def sync(self, fd: int) -> None:
        self._pass("sync")
        super().sync(fd)

    def replace(self, path: Path, content: bytes) -> None:
        self._pass("replace")
        super().replace(path, content)

    def rename(self, path: Path, to: Path) -> None:
        self._pass("rename")
        super().rename(path, to)


def open_files_before() -> list[str]:
    """What is open before a test: what earlier ones have left to the garbage collector is closed first."""
    gc.collect()
    return open_files()


def open_files() -> list[str]:
    """What this process has open, sorted; sockets without their numbers."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(fd.readlink()).partition(":[")[0])
        except OSError:
            pass  # the one the listing was made with
    return sorted(found)


class TopicsFiles(Files):
    """A real file system where the syncs of some topics wait at a gate, or fail."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.failing: set[str] = set()
        self.syncing: list[str] = []
        """The topics whose files are being synced."""
        self.most = 0
        """As many were at the same time."""

    def sync(self, fd: int) -> None:
        topic = Path(f"/proc/self/fd/{fd}").readlink().parent.stem
        if topic in self.failing:
            raise OSError(errno.EIO, "broken")
        self.syncing.append(topic)
        self.most = max(self.most, len(self.syncing))
        try:
            if topic in self.gates:
                assert self.gates[topic].wait(PATIENCE_S)
            super().sync(fd)
        finally:
            self.syncing.remove(topic)


class FailingFiles(Files):
    """A real file system with a switch for each thing that can fail."""

    def __init__(self) -> None:
        self.full_after: int | None = None
        """Bytes that still fit; None for no limit."""
        self.sync_fails = False

    def write(self, fd: int, offset: int, parts: Sequence[bytes]) -> None:
        if self.full_after is not None:
            data = b"".join(parts)[: self.full_after]
            self.full_after -= len(data)
            super().write(fd, offset, [data])
            if len(data) < sum(map(len, parts)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            super().write(fd, offset, parts)

    def sync(self, fd: int) -> None:
        if self.sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


async def bodies(client: RawClient, count: int) -> list[bytes]:
    """Those of the next messages."""
    return [(await client.message()).body for _ in range(count)]


async def refusal(data_path: Path, **options: Any) -> str:
    """Why the broker does not start."""
    with pytest.raises(ExceptionGroup) as caught:
        async with running_broker(data_path, **options):
            pass
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, StartupError), error
    return str(error)


class Watched(RawClient):
    """Knows without waiting what has come."""

    async def here(self) -> list[bytes]:
        """The bodies of the messages that have come by now."""
        await settle()
        try:
            while data := os.read(self.stream.socket.fileno(), 65536):
                self._buffer += data
        except BlockingIOError:
            pass
        bodies: list[bytes] = []
        while self._early or self._buffer:
            bodies.append((await self.message()).body)
        return bodies


@asynccontextmanager
async def watching(
    address: str, *, channel: str = "c", ready: int = 100, **fields: object
) -> AsyncIterator[Watched]:
    """A consumer of t."""
    async with connected(address) as plain:
        client = Watched(plain.stream)
        await client.send(identify(**fields))
        await client.ok()
        await client.subscribe("t", channel, ready_count=ready)
        await settle()
        yield client


async def send_for_ever(client: RawClient, data: bytes = b"NOP\n" * 100_000) -> None:
    """Keep a broker busy; runs until cancelled."""
    while True:
        await client.send(data)


def record_counts(folder: Path, topic: str = "t") -> list[int]:
    """How many messages each record of a stopped broker's topic has."""
    log = DiskLog(folder / "topics" / f"{topic}.topic")
    try:
        return [header.count for header in log.headers(0)]
    finally:
        log.close()
