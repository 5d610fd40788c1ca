"""Frames over a socket, for a thread."""

import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from threading import Event, Lock
from typing import Final, TypeVar

import trio

from .link import FrameKind, FrameReader, LinkError, encode_frame, encode_number

T = TypeVar("T")

_JOINED_BYTES: Final = 64 * 1024
"""A frame up to this size is sent as one piece: copying it takes less time than telling the kernel of its parts."""
_MAX_PARTS: Final = 256
_TIMEVAL: Final = Struct("@ll")


class FrameSocket:
    """Sends and receives frames; both block. Any thread may send; only one may receive.

    Args:
        sock: A non-blocking socket.
        timeout_s: Limit for the other side to send anything, and to accept anything.
        reader: What divides what arrives into frames.
        received: Frames that were received already.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float,
        reader: FrameReader | None = None,
        received: Iterable[tuple[FrameKind, memoryview]] = (),
    ) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._reader = reader or FrameReader()
        self._received = list(received)
        self._received_s = time.monotonic()
        self._sending = Lock()
        self._ended = Event()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        # The kernel has the timeout: with Python's, each call would ask the kernel twice, first whether it may.
        timeval = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        sock.setblocking(True)

    def send(self, frame: Sequence[bytes | memoryview]) -> None:
        """Send a frame. Raises LinkError: the other side does not accept it; trio.BrokenResourceError."""
        try:
            with self._sending:
                if sum(map(len, frame)) <= _JOINED_BYTES:
                    self._sock.sendall(b"".join(frame))
                else:
                    self._send_parts([memoryview(piece) for piece in frame])
        except BlockingIOError as exc:
            raise LinkError(f"the other side has accepted nothing for {self._timeout_s:g} s") from exc
        except OSError as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    def _send_parts(self, parts: list[memoryview]) -> None:
        at = 0
        while at < len(parts):
            sent = self._sock.sendmsg(parts[at : at + _MAX_PARTS])
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = parts[at][sent:]

    def send_alive(self, free_bytes: int | None = None) -> None:
        """Send ALIVE. That the connection is broken is noticed by others."""
        alive = FrameKind.ALIVE
        try:
            self.send(encode_frame(alive) if free_bytes is None else encode_number(alive, free_bytes))
        except (LinkError, trio.BrokenResourceError):
            pass

    def receive(self) -> list[tuple[FrameKind, memoryview]]:
        """Return the next frames, at least one. Their payloads are valid until the next call.

        Raises:
            LinkError: The other side has ended the connection, sends nothing, or sends something else.
            trio.BrokenResourceError: The connection is broken.
        """
        if self._received:
            received, self._received = self._received, []
            return received
        reader = self._reader
        while True:
            try:
                count = self._sock.recv_into(reader.room_in_frame())
            except BlockingIOError as exc:
                raise LinkError(f"the other side has sent nothing for {self._timeout_s:g} s") from exc
            except OSError as exc:
                raise trio.BrokenResourceError(str(exc)) from exc
            if not count:
                raise LinkError("the other side has ended the connection")
            if frames := reader.add(count):
                self._received_s = time.monotonic()
                return frames

    def receive_now(self) -> list[tuple[FrameKind, memoryview]]:
        """As `receive`, but return nothing if nothing has arrived, unless that is so for too long."""
        if self._received or self._readable.poll(0):
            return self.receive()
        if time.monotonic() - self._received_s >= self._timeout_s:
            raise LinkError(f"the other side has sent nothing for {self._timeout_s:g} s")
        return []

    def pause(self, pause_s: float) -> None:
        """Do nothing for this time, or until `end` is called."""
        self._ended.wait(pause_s)

    def leave(self) -> tuple[FrameReader, list[tuple[FrameKind, memoryview]]]:
        """Let something else receive: as of `FrameStream`. The socket does not block any more."""
        self._sock.setblocking(False)
        return self._reader, self._received

    def end(self) -> None:
        """Have sending and receiving end now, in whatever thread."""
        self._ended.set()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has ended the connection already


async def run_in_thread(
    frames: FrameSocket,
    alive_s: float,
    work: Callable[[], T],
    free_bytes: Callable[[], int | None] = lambda: None,
) -> T:
    """Call a function in a thread that uses these frames, and return its result.

    If this is cancelled, the connection is ended, and the function is waited for.

    Args:
        alive_s: The interval of ALIVE, which is sent while the disk or something else takes long.
        free_bytes: Returns what ALIVE says, if that is known.
    """
    results: list[T] = []
    error: Exception | None = None
    is_done = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stay_alive, frames, alive_s, free_bytes)
        nursery.start_soon(_end_if_cancelled, frames, is_done)
        try:
            with trio.CancelScope(shield=True):
                results.append(await trio.to_thread.run_sync(work, limiter=trio.CapacityLimiter(1)))
        except Exception as exc:
            error = exc  # raised below, outside of all nurseries, which would make groups of it
        is_done.set()
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return results[0]


async def _stay_alive(frames: FrameSocket, alive_s: float, free_bytes: Callable[[], int | None]) -> None:
    limiter = trio.CapacityLimiter(1)
    while True:
        await trio.sleep(alive_s)
        await trio.to_thread.run_sync(frames.send_alive, free_bytes(), limiter=limiter)


async def _end_if_cancelled(frames: FrameSocket, is_done: trio.Event) -> None:
    """Turn a cancellation into the end of the connection, because threads cannot be cancelled."""
    try:
        await is_done.wait()
    except trio.Cancelled:
        frames.end()
        raise
