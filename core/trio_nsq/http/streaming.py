"""A GET whose answer is read as it comes, however long it is."""

import math
from typing import Any

import httptools
import trio

from ..protocol import NSQError
from ..protocol.address import parse_address

_RECEIVE_BYTES = 256 * 1024


class AnswerLost(NSQError):
    """An answer did not come, or not to its end; the text says why."""


class StreamedAnswer:
    """An answer, from the end of its head on. Made by `stream_get`; whoever has it closes it.

    Attributes:
        status: The status code.
        headers: By lower-case name.
    """

    def __init__(self, stream: trio.abc.Stream, silence_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._stream = stream
        self._silence_s = silence_s
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._headed = self._ended = False

    async def receive_head(self) -> None:
        """Wait for status and headers. Raises AnswerLost."""
        while not self._headed:
            await self._receive()
        self.status = self._parser.get_status_code()

    async def receive(self) -> bytes:
        """Some of the body; nothing at its end. Raises AnswerLost."""
        while not self._pieces and not self._ended:
            await self._receive()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def aclose(self) -> None:
        """Close the connection; returns at once."""
        await trio.aclose_forcefully(self._stream)

    async def _receive(self) -> None:
        try:
            with trio.fail_after(self._silence_s):
                data = await self._stream.receive_some(_RECEIVE_BYTES)
        except trio.TooSlowError:
            raise AnswerLost(f"nothing came for {self._silence_s:g} s") from None
        except trio.BrokenResourceError as exc:
            raise AnswerLost("the connection broke") from exc
        if not data:
            raise AnswerLost("the connection was closed in the middle of the answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            raise AnswerLost("the answer is not HTTP") from exc

    # ------------------------------------------------------------------ what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The end of the head."""
        self._headed = True

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The end of the answer."""
        self._ended = True


async def stream_get(
    address: str, target: str, *, connect_timeout_s: float, silence_s: float = math.inf
) -> StreamedAnswer:
    """Ask for something, over a connection of its own.

    Args:
        address: `host:port`.
        target: Path and query, encoded.
        connect_timeout_s: For the connection.
        silence_s: How long nothing may come before the answer counts as lost.

    Returns:
        The answer, whatever its status.

    Raises:
        OSError: There is no connection.
        AnswerLost: Something else than an answer came, or nothing.
    """
    host, port = parse_address(address)
    try:
        with trio.fail_after(connect_timeout_s):
            stream = await trio.open_tcp_stream(host, port)
    except trio.TooSlowError:
        raise TimeoutError(f"no connection within {connect_timeout_s:g} s") from None
    answer = StreamedAnswer(stream, silence_s)
    try:
        request = f"GET {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        try:
            await stream.send_all(request.encode("ascii"))
        except trio.BrokenResourceError as exc:
            raise AnswerLost("the connection broke") from exc
        await answer.receive_head()
    except BaseException:
        await answer.aclose()
        raise
    return answer
