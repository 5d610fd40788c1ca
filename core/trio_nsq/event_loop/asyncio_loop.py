"""The side of asyncio of `runtime`: its functions by anyio, which has trio's cancellation; sockets and waits without.

anyio's streams and events cost several times as much as these, per read and per publish.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.abc
import anyio.lowlevel

from ..protocol.limits import KIB
from .sides import BrokenResourceError, ClosedResourceError, in_trio_task

_running_loop = asyncio._get_running_loop

READ_BYTES = 256 * KIB
NEXT_ADDRESS_S = 0.25
"""How long an attempt to connect may take before another address is tried beside it (RFC 8305)."""


class AsyncioLoop:
    """The functions of `runtime`."""

    sleep = staticmethod(anyio.sleep)
    sleep_until = staticmethod(anyio.sleep_until)
    checkpoint = staticmethod(anyio.lowlevel.checkpoint)
    running = staticmethod(_running_loop)

    @staticmethod
    async def checkpoint_if_cancelled() -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # not by a scope of anyio
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.lowlevel.checkpoint_if_cancelled()

    @staticmethod
    def current() -> asyncio.AbstractEventLoop | None:
        """Return the loop of the calling task or callback; None if none calls, or a task of trio as its guest."""
        return None if in_trio_task() else _running_loop()

    @staticmethod
    def in_task() -> bool:
        """Whether a task of asyncio calls; `current` has a loop."""
        return asyncio.current_task() is not None

    @staticmethod
    def current_time() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def clock() -> Callable[[], float]:
        return asyncio.get_running_loop().time

    @staticmethod
    def scheduler() -> Callable[[Callable[[], object]], object]:
        return asyncio.get_running_loop().call_soon_threadsafe

    @staticmethod
    def cancel_scope(*, shield: bool = False) -> anyio.CancelScope:
        return anyio.CancelScope(shield=shield)

    def move_on_after(self, seconds: float) -> anyio.CancelScope:
        return anyio.CancelScope(deadline=self.current_time() + seconds)

    @staticmethod
    def move_on_at(deadline: float) -> anyio.CancelScope:
        return anyio.CancelScope(deadline=deadline)

    @staticmethod
    async def shielded(work: Callable[[], Awaitable[None]]) -> None:
        """Run the function in a task of its own: `Task.cancel` of the caller would pass anyio's shields."""

        async def run() -> None:
            await work()

        task = asyncio.create_task(run())
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled
        await task

    @staticmethod
    def is_cancellation(error: BaseException) -> bool:
        return isinstance(error, asyncio.CancelledError)

    @staticmethod
    def is_stray_cancellation(error: BaseException) -> bool:
        task = asyncio.current_task()
        return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()

    @staticmethod
    def open_nursery() -> AbstractAsyncContextManager[anyio.abc.TaskGroup]:
        return anyio.create_task_group()

    @staticmethod
    def detached_tasks() -> "DetachedTasks":
        return DetachedTasks()

    @staticmethod
    async def open_tcp_stream(host: str, port: int) -> "SocketStream":
        """Connect as trio does: address after address, without waiting long for any of them."""
        loop = asyncio.get_running_loop()
        try:  # numbers need no thread
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        connected: list[socket.socket] = []
        errors: list[OSError] = []

        async def attempt(family: int, address: tuple[object, ...], failed: anyio.Event) -> None:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
            except OSError as error:
                errors.append(error)
                sock.close()
                failed.set()
            except BaseException:
                sock.close()
                raise
            else:
                connected.append(sock)
                group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                for family, *_, address in places:
                    failed = anyio.Event()
                    group.start_soon(attempt, family, address, failed)
                    with anyio.move_on_after(NEXT_ADDRESS_S):
                        await failed.wait()
            if not connected:
                raise errors[-1]
            return SocketStream(connected.pop(0))
        finally:
            for sock in connected:  # of another address, or the caller was cancelled
                sock.close()


class SocketStream:
    """A connected socket, which `aclose` closes at once.

    It is not a transport of asyncio: after a failed write, a transport drops what was received before, which may have
    the reason. The loop watches the socket all the time, so that a read does not register it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._received: list[bytes] = []
        self._is_watched = False
        self._end: Exception | None = None  # after what was received; EOFError: the peer ended the data
        self._arrived: asyncio.Future[None] | None = None  # that the reading task awaits
        self._sendable: asyncio.Future[None] | None = None  # that the writing task awaits
        self._watch()

    def _watch(self) -> None:
        self._is_watched = True
        self._loop.add_reader(self._sock, self._receive)

    def _unwatch(self) -> None:
        self._is_watched = False
        self._loop.remove_reader(self._sock)

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
        else:
            if data:
                self._received.append(data)
            else:
                self._end = EOFError()
            if not data or len(self._received) > 1:  # the reader is slow: leave the rest to the kernel
                self._unwatch()
        _wake(self._arrived)

    def _fail(self, cause: OSError) -> BrokenResourceError:
        if self._is_watched:
            self._unwatch()
        self._end = BrokenResourceError(str(cause))
        self._end.__cause__ = cause
        return self._end

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what has arrived, b"" at the end of the data; `max_bytes` is not used."""
        while not self._received:
            if isinstance(self._end, EOFError):
                return b""
            if self._end is not None:
                raise self._end
            self._arrived = self._loop.create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        self._received.clear()
        if not self._is_watched and self._end is None:
            self._watch()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Return when the kernel has all the data."""
        left = memoryview(data)
        while True:
            self._check_open()
            try:
                left = left[self._sock.send(left) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                failed = BrokenResourceError(str(error))
                raise failed from error
            if not left:
                return
            await self.wait_send_all_might_not_block()

    async def wait_send_all_might_not_block(self) -> None:
        self._check_open()
        self._sendable = self._loop.create_future()
        self._loop.add_writer(self._sock, _wake, self._sendable)
        try:
            await self._sendable
        finally:
            self._sendable = None
            if self._sock.fileno() >= 0:
                self._loop.remove_writer(self._sock)

    def _check_open(self) -> None:
        if self._sock.fileno() < 0:
            raise ClosedResourceError("the socket is closed")

    async def send_eof(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        if self._sock.fileno() < 0:
            return
        if self._is_watched:
            self._unwatch()
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._received.clear()
        self._end = ClosedResourceError("the socket is closed")
        _wake(self._arrived)
        _wake(self._sendable)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


class DetachedTasks:
    """Tasks that belong to an object, not to the task that starts them: any task may end them, in any order."""

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._main: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, main: Callable[[], Awaitable[None]], crashed: Callable[[Exception], object]) -> None:
        """Start the task that `stop` cancels.

        Args:
            crashed: Called if it raises, so that no task waits for it in vain.
        """

        async def run() -> None:
            try:
                with self._scope:
                    await main()
            except Exception as error:
                crashed(error)
                raise

        self._main = self._start(run)

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await work()

        self._start(run)

    def _start(self, run: Callable[[], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(run())
        self._tasks.add(task)
        return task

    async def stop(self) -> None:
        """Cancel the first task and wait until it ends."""
        self._scope.cancel()
        if self._main is not None:
            await asyncio.wait([self._main])

    async def close(self) -> None:
        """Cancel the first task, and wait until all have ended. Raises a group of what they raised."""
        await self.stop()
        errors = []
        while self._tasks:
            await asyncio.wait(self._tasks)
            ended = {task for task in self._tasks if task.done()}
            self._tasks -= ended
            errors += [error for task in ended if not task.cancelled() and (error := task.exception())]
        if errors:
            raise BaseExceptionGroup("tasks in the background failed", errors)
