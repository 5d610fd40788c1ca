"""Connections of the HTTP client that are not used again if the server sent more than its answer.

What is left after an answer would be taken for the answer to the next request: a receiver that refuses a message would
seem to accept it. httpcore keeps such bytes for the next answer, and has no way to ask for them. So each answer is
parsed a second time, with the parser that httpcore uses.
"""

import ssl
from collections.abc import Iterable
from typing import Any

import h11
import httpcore
from httpcore import SOCKET_OPTION

_MAX_HEAD_BYTES = 100 * 1024
"""The limit of httpcore."""


class ExactBackend(httpcore.AsyncNetworkBackend):
    """Opens connections, see `ExactStream`."""

    def __init__(self) -> None:
        self._backend = httpcore.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return ExactStream(
            await self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        )

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[SOCKET_OPTION] | None = None
    ) -> httpcore.AsyncNetworkStream:
        return ExactStream(await self._backend.connect_unix_socket(path, timeout, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


class ExactStream(httpcore.AsyncNetworkStream):
    """A connection that tells the library that it is used up when more than an answer has arrived.

    The library asks for `is_readable` before it uses an idle connection again, and closes one that is.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._exchange: h11.Connection | None = (
            None  # the last request, and its answer as far as it has arrived
        )
        self._has_answer = False
        self._is_broken = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._has_answer = True
        if self._exchange is not None and not self._is_broken:
            try:
                _parse(self._exchange, data)
            except h11.RemoteProtocolError:
                self._is_broken = True
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._exchange is None or self._has_answer:
            self._has_answer = False
            self._exchange = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
            # Of the request, only the method matters for the answer.
            method = bytes(buffer).partition(b" ")[0]
            self._exchange.send(h11.Request(method=method, target="/", headers=[("Host", "")]))
            self._exchange.send(h11.EndOfMessage())
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return ExactStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and not self._is_exact():
            return True
        return self._stream.get_extra_info(info)

    def _is_exact(self) -> bool:
        """Whether one whole answer has arrived since the request, and nothing else; True also before the first one."""
        if self._exchange is None:
            return True
        is_whole = self._exchange.their_state is h11.DONE and not self._is_broken
        return is_whole and not self._exchange.trailing_data[0]


def _parse(exchange: h11.Connection, data: bytes) -> None:
    """Parse a part of an answer. Raises h11.RemoteProtocolError."""
    exchange.receive_data(data)
    event: object = None
    while not (event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed)):
        event = exchange.next_event()
