"""Frames over a socket, for a thread."""

import socket
from collections.abc import Sequence
from threading import Lock

import trio

from .link import FrameKind, FrameReader, LinkError, encode_frame, encode_number

_SEND_BYTES = 256 * 1024


class FrameSocket:
    """Sends and receives frames; both block. Any thread may send; only one may receive.

    Args:
        sock: A non-blocking socket.
        timeout_s: Limit for the other side to send anything, and to accept anything.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._reader = FrameReader()
        self._sending = Lock()
        sock.settimeout(timeout_s)

    def send(self, frame: Sequence[bytes | memoryview]) -> None:
        """Send a frame. Raises LinkError: the other side does not accept it; trio.BrokenResourceError."""
        data = memoryview(b"".join(frame))
        with self._sending:
            try:
                for at in range(0, len(data), _SEND_BYTES):
                    self._sock.sendall(data[at : at + _SEND_BYTES])
            except TimeoutError as exc:
                raise LinkError(f"the other side has accepted nothing for {self._timeout_s:g} s") from exc
            except OSError as exc:
                raise trio.BrokenResourceError(str(exc)) from exc

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
        reader = self._reader
        while True:
            try:
                count = self._sock.recv_into(reader.room())
            except TimeoutError as exc:
                raise LinkError(f"the other side has sent nothing for {self._timeout_s:g} s") from exc
            except OSError as exc:
                raise trio.BrokenResourceError(str(exc)) from exc
            if not count:
                raise LinkError("the other side has ended the connection")
            if frames := reader.add(count):
                return frames

    def end(self) -> None:
        """Have sending and receiving end now, in whatever thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has ended the connection already
