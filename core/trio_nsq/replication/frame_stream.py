"""Frames over a stream of trio."""

from collections import deque
from collections.abc import Sequence

import trio

from .link import FrameKind, FrameReader, LinkError

_RECEIVE_BYTES = 256 * 1024
_SEND_BYTES = 256 * 1024


class FrameStream:
    """Sends and receives frames. Any task may send; only one may receive at a time.

    Args:
        timeout_s: Limit for the other side to send anything, and to accept anything.
    """

    def __init__(self, stream: trio.abc.Stream, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._reader = FrameReader()
        self._received: deque[tuple[FrameKind, memoryview]] = deque()
        self._sending = trio.Lock()

    async def send(self, frame: Sequence[bytes | memoryview]) -> None:
        """Send a frame. Raises LinkError: the other side does not accept it; trio.BrokenResourceError."""
        data = memoryview(b"".join(frame))
        async with self._sending:
            for at in range(0, len(data), _SEND_BYTES):
                with trio.move_on_after(self._timeout_s) as waiting:
                    await self._stream.send_all(data[at : at + _SEND_BYTES])
                if waiting.cancelled_caught:
                    raise LinkError(f"the other side has accepted nothing for {self._timeout_s:g} s")

    async def receive(self) -> list[tuple[FrameKind, memoryview]]:
        """Return the next frames, at least one. Their payloads are valid until the next call.

        Raises:
            LinkError: The other side has ended the connection, sends nothing, or sends something else.
            trio.BrokenResourceError: The connection is broken.
        """
        await self._fill()
        frames = list(self._received)
        self._received.clear()
        return frames

    async def receive_one(self) -> tuple[FrameKind, memoryview]:
        """Return the next frame; errors as of `receive`."""
        await self._fill()
        return self._received.popleft()

    def leave(self) -> tuple[FrameReader, list[tuple[FrameKind, memoryview]]]:
        """Let something else receive: return what has the beginning of the next frame, and the frames before it."""
        return self._reader, list(self._received)

    async def _fill(self) -> None:
        while not self._received:
            with trio.move_on_after(self._timeout_s) as waiting:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            if waiting.cancelled_caught:
                raise LinkError(f"the other side has sent nothing for {self._timeout_s:g} s")
            if not data:
                raise LinkError("the other side has ended the connection")
            self._received += self._reader.receive(bytes(data))
