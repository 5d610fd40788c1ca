"""The link to a follower that has the whole folder: the poller sends operations to it, and reads what it has stored."""

import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

import trio

from ..event_loop.reactor import PolledEndpoint, Poller, SendBuffer
from .answer_times import AnswerTimes
from .link import FrameKind, FrameReader, LinkError, decode_number, encode_frame, encode_operations
from .stream import OperationStream, TooFarBehind

_ROUND_BYTES: Final = 1024 * 1024


class LiveLink(PolledEndpoint):
    """Sends operations without a task switch; `run` has the timeouts.

    Args:
        sock: A non-blocking socket.
        reader: What it divides into frames.
        number: The number of the last operation that the follower has been sent.
        on_stored: Called with the number in each frame STORED. May raise LinkError.
        answers: Is told when something is sent, and stored.
        on_alive: Called with the free bytes of the follower's disk in frames ALIVE that tell them.
        alive_s, timeout_s: As of `Leader`.
    """

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        stream: OperationStream,
        reader: FrameReader,
        number: int,
        on_stored: Callable[[int], None],
        answers: AnswerTimes,
        on_alive: Callable[[int], None] = lambda free_bytes: None,
        *,
        alive_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(sock, poller)
        self._stream = stream
        self._reader = reader
        self._number = number
        self._on_stored = on_stored
        self._answers = answers
        self._on_alive = on_alive
        self._alive_s = alive_s
        self._timeout_s = timeout_s
        self._buffer = SendBuffer(sock)
        self._buffer.patience_s = timeout_s
        self._has_sent = self._has_received = False  # since the last look
        self._error: Exception | None = None
        self._over: trio.Event = trio.Event()
        self.handed_over = self._over

    async def run(self, received: Iterable[tuple[FrameKind, memoryview]]) -> None:
        """Serve the follower until its connection ends, which is an error.

        Args:
            received: Frames that were received already.

        Raises:
            LinkError: It sends something else, nothing, or accepts nothing, or has ended the connection.
            TooFarBehind: Operations that it lacks are no longer kept.
            trio.BrokenResourceError: The connection is broken.
        """
        self.start_polling()
        try:
            self._take(received)
            self.rest()
            self.send()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drain)
                nursery.start_soon(self._watch)
                await self._over.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.stop_polling()
        if self._error is not None:
            raise self._error

    def send(self) -> None:
        """Send the operations that the follower was not sent, as far as the socket accepts them."""
        stream, buffer = self._stream, self._buffer
        try:
            while self._number < stream.last_number and not buffer.full:
                self._number, pieces = stream.after(self._number, _ROUND_BYTES)
                self._put(encode_operations(self._number, pieces))
                self._answers.sent(self._number, time.monotonic())
        except TooFarBehind as exc:
            self._end(exc)

    def _put(self, frame: Iterable[bytes | memoryview]) -> None:
        for piece in frame:
            self._buffer.put(piece)
        self._buffer.flush()
        self._has_sent = True

    def serve_data(self, data: bytes | None) -> None:
        try:
            if data is None:
                raise trio.BrokenResourceError
            if not data:
                raise LinkError("the other side has ended the connection")
            self._has_received = True
            self._take(self._reader.receive(data))
        except (LinkError, trio.BrokenResourceError) as exc:
            self._error = self._error or exc
            self.hand_over()
        else:
            self.rest()

    def _take(self, frames: Iterable[tuple[FrameKind, memoryview]]) -> None:
        """Handle frames from the follower. Raises LinkError."""
        for kind, payload in frames:
            if kind is FrameKind.STORED:
                self._on_stored(number := decode_number(payload))
                self._answers.stored(number, time.monotonic())
            elif kind is not FrameKind.ALIVE:
                raise LinkError(f"it has sent a frame {kind.name}")
            elif payload:
                self._on_alive(decode_number(payload))

    def _end(self, error: Exception) -> None:
        """Have `run` end with this error."""
        self._error = self._error or error
        self._over.set()

    async def _drain(self) -> None:
        """Send what the socket did not accept at once, and then what has come since."""
        while await self._buffer.drain():
            self.send()
        if self._buffer.broken:
            self._end(trio.BrokenResourceError())
        else:
            self._end(LinkError(f"the other side has accepted nothing for {self._timeout_s:g} s"))

    async def _watch(self) -> None:
        """Send ALIVE if there was nothing else to send, and end the link if the follower is silent."""
        received_s = trio.current_time()
        while True:
            await trio.sleep(self._alive_s)
            if not self._has_received:
                self.serve()  # if the event loop was held up, the poller has not read what is there
            if self._has_received:
                received_s = trio.current_time()
            elif trio.current_time() - received_s >= self._timeout_s:
                self._end(LinkError(f"the other side has sent nothing for {self._timeout_s:g} s"))
            if not (self._has_sent or self._buffer.full):
                self._put(encode_frame(FrameKind.ALIVE))
            self._has_sent = self._has_received = False
