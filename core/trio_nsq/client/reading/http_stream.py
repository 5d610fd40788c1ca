"""HTTP GET with a streamed response body."""

import math
import ssl
from typing import Any

import httptools
import trio

from ...protocol import NSQError
from ...protocol.address import parse_address
from ...secret import NO_SECRET, Secret, SecretFileError
from ..errors import WRONG_PORT

_RECEIVE_BYTES = 256 * 1024


class AnswerLost(NSQError):
    """The response is missing or incomplete; the text has the reason."""


class AnswerSilent(AnswerLost):
    """The connection is open, but no data arrived in time."""


class StreamedAnswer:
    """A response whose body is streamed. `stream_get` creates it; the caller closes it.

    Attributes:
        status: The status code.
        headers: The headers, by lower-case name.
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
        """Wait for the status and the headers. Raises AnswerLost."""
        while not self._headed:
            await self._receive()
        self.status = self._parser.get_status_code()

    async def receive(self) -> bytes:
        """Receive a part of the body; b"" at its end. Raises AnswerLost."""
        while not self._pieces and not self._ended:
            await self._receive()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def aclose(self) -> None:
        """Close the connection without waiting."""
        await trio.aclose_forcefully(self._stream)

    async def _receive(self) -> None:
        try:
            with trio.fail_after(self._silence_s):
                data = await self._stream.receive_some(_RECEIVE_BYTES)
        except trio.TooSlowError:
            raise AnswerSilent(f"no data for {self._silence_s:g} s") from None
        except trio.BrokenResourceError as exc:
            raise AnswerLost("the connection broke") from exc
        if not data:
            raise AnswerLost("the connection was closed before the end of the answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            raise AnswerLost(f"the answer is not HTTP. {WRONG_PORT}") from exc

    # ------------------------------------------------------------------ callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._ended = True


async def stream_get(
    address: str,
    target: str,
    *,
    connect_timeout_s: float,
    silence_s: float = math.inf,
    tls: ssl.SSLContext | None = None,
    secret: Secret = NO_SECRET,
) -> StreamedAnswer:
    """Make a request over a new connection.

    Args:
        address: `host:port`, or the path of a unix socket, which contains a slash.
        target: Path and query, encoded.
        connect_timeout_s: The timeout for connecting, including the TLS handshake.
        silence_s: The longest time without data; after it the answer counts as lost.
        tls: None: no TLS.
        secret: For a broker that requires authentication.

    Returns:
        The answer, with any status.

    Raises:
        OSError: Connecting failed.
        AnswerLost: No valid answer arrived, or the file of the secret cannot be used.
    """
    try:
        with trio.fail_after(connect_timeout_s):
            stream = await _open(address, tls)
    except trio.TooSlowError:
        raise TimeoutError(f"no connection within {connect_timeout_s:g} s") from None
    answer = StreamedAnswer(stream, silence_s)
    try:
        host = "localhost" if _is_unix_path(address) else address
        clear_address = "" if tls is not None or _is_unix_path(address) else address
        try:
            headers = {"Host": host, "Connection": "close", **secret.headers(clear_address)}
        except SecretFileError as exc:
            raise AnswerLost(str(exc)) from exc
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"GET {target} HTTP/1.1\r\n{lines}\r\n"
        try:
            await stream.send_all(request.encode("ascii"))
        except trio.BrokenResourceError as exc:
            raise AnswerLost("the connection broke") from exc
        await answer.receive_head()
    except BaseException:
        await answer.aclose()
        raise
    return answer


def _is_unix_path(address: str) -> bool:
    return "/" in address


async def _open(address: str, tls: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect. Raises OSError, and AnswerLost if the TLS handshake fails."""
    if _is_unix_path(address):
        return await trio.open_unix_socket(address)
    host, port = parse_address(address)
    stream = await trio.open_tcp_stream(host, port)
    if tls is None:
        return stream
    encrypted = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
    try:
        await encrypted.do_handshake()
    except BaseException as exc:
        await trio.aclose_forcefully(encrypted)
        if not isinstance(exc, trio.BrokenResourceError):
            raise
        cause = exc.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise AnswerLost(f"its certificate is not trusted: {cause.verify_message}") from exc
        raise AnswerLost(f"the TLS handshake failed: {cause or 'the connection broke'}") from exc
    return encrypted
