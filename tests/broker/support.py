"""A broker in the test's trio run, and a raw client."""

import errno
import gc
import json
import os
import socket
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest
import trio
import trio.testing

from trio_nsq.broker import BoundAddresses, BrokerOptions, StartupError, serve
from trio_nsq.broker.clock import BrokerClock
from trio_nsq.broker.delivery import Deliverer
from trio_nsq.broker.reader_pool import ReaderPool
from trio_nsq.broker.state.broker import Broker
from trio_nsq.event_loop.reactor import PolledEndpoint, Poller
from trio_nsq.log import DiskLog, Files

PATIENCE_S = 60
"""The time limit of a step before a test fails; by the real clock unless the test has a mock clock."""
BOTH_SYNCS = pytest.mark.parametrize("sync", ["always", "interval"])
"""Parametrizes a test with both sync modes."""


@asynccontextmanager
async def running_broker(
    data_path: Path, *, files: Files | None = None, **options: Any
) -> AsyncIterator[BoundAddresses]:
    """Run a broker on free loopback ports; it is stopped cleanly at the end."""
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
    """Fail a test that hangs under a mock clock, for which no time passes."""
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
    """Sends bytes to a broker and reads frames."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = b""
        self._taken = 0  # bytes at the beginning of the buffer that were returned
        self._early: deque[bytes] = deque()  # messages that arrived between a command and its answer

    async def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        await self.stream.send_all(data)

    async def frame(self) -> tuple[int, bytes] | None:
        """Return the next frame's type and data; None if the broker has closed the connection."""
        head = await self.exactly(8)
        if head is None:
            return None
        size, frame_type = unpack(">ii", head)
        data = await self.exactly(size - 4)
        assert data is not None, "the connection ended inside a frame"
        return frame_type, data

    async def exactly(self, size: int) -> bytes | None:
        """Read this many bytes; None if the broker has closed the connection."""
        if len(self._buffer) - self._taken < size:
            with trio.fail_after(PATIENCE_S):
                self._buffer = self.take_received()
                while len(self._buffer) < size:
                    more = await self.stream.receive_some(65536)
                    if not more:
                        assert not self._buffer, "the connection ended inside a frame"
                        return None
                    self._buffer += more
        begin, self._taken = self._taken, self._taken + size
        return self._buffer[begin : self._taken]

    def take_received(self) -> bytes:
        """Return and remove the received bytes that are no complete frame."""
        received, self._buffer, self._taken = self._buffer[self._taken :], b"", 0
        return received

    async def ok(self) -> None:
        """Expect OK; messages may arrive before it."""
        while (frame := await self.frame()) is not None and frame[0] == 2:
            self._early.append(frame[1])
        assert frame == (0, b"OK")

    async def error(self) -> str:
        """Expect an error frame; return its text."""
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
        """Send MPUB, and expect OK."""
        await self.send(mpub(topic, *bodies))
        await self.ok()

    async def subscribe(self, topic: str, channel: str, ready_count: int = 0) -> None:
        """Send SUB, expect OK, send RDY."""
        await self.send(f"SUB {topic} {channel}\n".encode())
        await self.ok()
        if ready_count:
            await self.send(b"RDY %d\n" % ready_count)

    async def nothing_more(self) -> None:
        """Check that the broker has executed everything sent so far and sent nothing else.

        The answer to a PUB to another topic marks the end of the earlier answers.
        """
        assert not self._early
        await self.send(pub("marker", b"x"))
        await self.ok()
        assert not self._early


class Received:
    """A received message."""

    def __init__(self, message_id: bytes, body: bytes, attempts: int, timestamp_ns: int) -> None:
        self.id = message_id
        self.body = body
        self.attempts = attempts
        self.timestamp_ns = timestamp_ns


def identify(**fields: object) -> bytes:
    """Return an IDENTIFY command."""
    body = json.dumps(fields).encode()
    return b"IDENTIFY\n" + pack(">i", len(body)) + body


def pub(topic: str, body: bytes) -> bytes:
    """Return a PUB command."""
    return b"PUB %s\n%s%s" % (topic.encode(), pack(">i", len(body)), body)


def dpub(topic: str, defer_ms: int, body: bytes) -> bytes:
    """Return a DPUB command."""
    return b"DPUB %s %d\n%s%s" % (topic.encode(), defer_ms, pack(">i", len(body)), body)


def mpub(topic: str, *bodies: bytes) -> bytes:
    """Return an MPUB command."""
    content = pack(">i", len(bodies)) + b"".join(pack(">i", len(body)) + body for body in bodies)
    return b"MPUB %s\n%s%s" % (topic.encode(), pack(">i", len(content)), content)


@asynccontextmanager
async def connected(
    address: str, greeting: bytes = b"  V2", source: str | None = None
) -> AsyncIterator[RawClient]:
    """Connect to `host:port`, from another loopback address if one is given, and send the magic."""
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port), local_address=source) as stream:
        client = RawClient(stream)
        if greeting:
            await client.send(greeting)
        yield client


async def settle() -> None:
    """Run until all tasks wait for a socket, a thread or time."""
    await trio.testing.wait_all_tasks_blocked(0.01)


def is_idle(thread: threading.Thread) -> bool:
    """Return whether this is an idle worker thread of the broker, by its name."""
    return thread.name.endswith(", idle")


async def threads_done() -> None:
    """Run until all tasks wait, and none of them for a busy thread."""

    def are_done() -> bool:
        idle = sum(map(is_idle, threading.enumerate()))
        return trio.testing.active_thread_count() <= idle

    await settle()
    while not are_done():
        await until(are_done)
        await settle()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that depends on threads or other tasks."""
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.lowlevel.checkpoint()


class PolledClient(PolledEndpoint):
    """A client that has sent something once, and is done when it has been served.

    Attributes:
        other: The client's end.
    """

    def __init__(self, name: str, served: list[str], poller: Poller) -> None:
        self.ours, self.other = socket.socketpair()
        self.ours.setblocking(False)
        super().__init__(self.ours, poller)
        self._name = name
        self._served = served
        self.other.send(b"x")
        self.rest()
        poller.add(self.ours.fileno(), self)

    def serve_data(self, data: bytes | None) -> None:
        self._served.append(self._name)
        self.rest()

    def close(self) -> None:
        self.ours.close()
        self.other.close()


async def serve_clients(poller: Poller) -> None:
    """Serve the clients of a poller without a broker; runs until cancelled."""
    poller.open()
    try:
        while True:
            await poller.sleep()
            while poller.poll():
                poller.in_round = True
                poller.serve()
                poller.in_round = False
                await trio.lowlevel.checkpoint()
    finally:
        poller.close()


def a_delivery(broker: Broker, options: BrokerOptions, poller: Poller, nursery: trio.Nursery) -> Deliverer:
    """Return a `Deliverer` for a broker's state."""
    return Deliverer(broker, options, BrokerClock(), poller, ReaderPool(broker), nursery)


class HeldFiles(Files):
    """A real file system where chosen operations wait, in their threads, until they are released."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._go_on = threading.Event()
        self._reached = trio.Event()

    def hold(self, *operations: str) -> None:
        """Let these operations wait from now on: `read`, `write`, `sync`, `replace` (also `extend`), `rename`
        or `remove_folder`."""
        self._go_on = threading.Event()
        self._reached = trio.Event()
        self._held = set(operations)  # last, because threads may be at such an operation

    async def reached(self) -> None:
        """Wait until a thread waits."""
        with trio.fail_after(PATIENCE_S):
            await self._reached.wait()

    def release(self) -> None:
        """Release all operations."""
        self._held = set()
        self._go_on.set()

    def _pass(self, operation: str) -> None:
        if operation in self._held:
            trio.from_thread.run_sync(self._reached.set)
            assert self._go_on.wait(PATIENCE_S)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self._pass("read")
        return super().read(fd, size, offset)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self._pass("write")
        super().write(fd, offset, parts)

    def sync(self, fd: int) -> None:
        self._pass("sync")
        super().sync(fd)

    def replace(self, path: Path, content: bytes) -> None:
        self._pass("replace")
        super().replace(path, content)

    def extend(self, path: Path, offset: int, content: bytes) -> None:
        self._pass("replace")
        super().extend(path, offset, content)

    def rename(self, path: Path, to: Path) -> None:
        self._pass("rename")
        super().rename(path, to)

    def remove_folder(self, path: Path) -> None:
        self._pass("remove_folder")
        super().remove_folder(path)


def open_files_before() -> list[str]:
    """Return the open files before a test, after closing files that wait for the garbage collector."""
    gc.collect()
    return open_files()


def open_files() -> list[str]:
    """Return the open files of this process, sorted; sockets without their numbers."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(fd.readlink()).partition(":[")[0])
        except OSError:
            pass  # the descriptor of the listing itself
    return sorted(found)


def left_open(before: list[str]) -> list[str]:
    """Return the files that are open and were not before. Others may be closed: earlier tests' threads still end."""
    return sorted((Counter(open_files()) - Counter(before)).elements())


class TopicsFiles(Files):
    """A real file system where syncs of some topics wait at a gate, or fail."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.failing: set[str] = set()
        self.refusing: set[str] = set()
        """The names of files that cannot be written."""
        self.truncated: list[str] = []
        """The names of files that were truncated, in order."""
        self.syncing: list[str] = []
        """The topics whose files are being synced."""
        self.most = 0
        """The maximum number of concurrent syncs."""

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().name in self.refusing:
            raise OSError(errno.EIO, "broken")
        super().write(fd, offset, parts)

    def truncate(self, fd: int, size: int) -> None:
        self.truncated.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        super().truncate(fd, size)

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
    """A real file system with a switch for each kind of failure."""

    def __init__(self) -> None:
        self.full_after: int | None = None
        """The remaining free bytes; None for no limit."""
        self.sync_fails = False

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
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


class UnsavedStates(Files):
    """States cannot be saved while `fails`, as on a full disk."""

    fails = False

    def replace(self, path: Path, content: bytes) -> None:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().replace(path, content)

    def extend(self, path: Path, offset: int, content: bytes) -> None:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().extend(path, offset, content)


async def bodies(client: RawClient, count: int) -> list[bytes]:
    """Return the bodies of the next messages."""
    return [(await client.message()).body for _ in range(count)]


async def refusal(data_path: Path, **options: Any) -> str:
    """Return why the broker does not start."""
    with pytest.raises(ExceptionGroup) as caught:
        async with running_broker(data_path, **options):
            pass
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, StartupError), error
    return str(error)


class Watched(RawClient):
    """A consumer whose messages can be checked without waiting."""

    async def here(self) -> list[bytes]:
        """The bodies of the messages received so far."""
        await settle()
        try:
            while data := os.read(self.stream.socket.fileno(), 65536):
                self._buffer += data
        except BlockingIOError:
            pass
        bodies: list[bytes] = []
        while self._early or len(self._buffer) > self._taken:
            bodies.append((await self.message()).body)
        return bodies


@asynccontextmanager
async def watching(
    address: str, *, channel: str = "c", ready: int = 100, **fields: object
) -> AsyncIterator[Watched]:
    """Run a consumer of topic t."""
    async with connected(address) as plain:
        client = Watched(plain.stream)
        await client.send(identify(**fields))
        await client.ok()
        await client.subscribe("t", channel, ready_count=ready)
        await settle()
        yield client


async def send_for_ever(client: RawClient, data: bytes = b"NOP\n" * 100_000) -> None:
    """Publish all the time; runs until cancelled."""
    while True:
        await client.send(data)


def record_counts(folder: Path, topic: str = "t") -> list[int]:
    """Return the number of messages of each record in a topic of a stopped broker."""
    log = DiskLog(folder / "topics" / f"{topic}.topic")
    try:
        return [header.count for header in log.headers(0)]
    finally:
        log.close()
