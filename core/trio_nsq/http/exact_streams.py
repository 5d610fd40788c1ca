"""Connections of the HTTP client that are not used again if the server sent more than its answer.

What is left after an answer would be taken for the answer to the next request: a receiver that refuses a message would
seem to accept it. The library keeps such bytes for the next answer, and has no way to ask for them.
"""

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
from httpcore import SOCKET_OPTION

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_WITHOUT_BODY = ([b"204"], [b"304"])


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
        self._begin()

    def _begin(self) -> None:
        """Expect the next answer."""
        self._head = bytearray()  # with what arrived together with its end
        self._has_head = False
        self._size = 0
        self._end = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        if not self._has_head:
            searched = max(0, len(self._head) + 1 - len(_HEAD_END))
            self._head += data
            self._has_head = self._head.find(_HEAD_END, searched) >= 0
        self._size += len(data)
        self._end = (self._end + data)[-len(_LAST_CHUNK) :]
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._size:
            self._begin()
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
        """Whether what has arrived since the request is one answer; False also if that is not sure."""
        if not self._size:
            return True
        head, end, _ = bytes(self._head).partition(_HEAD_END)
        status, *lines = head.lower().split(b"\r\n")
        headers = {name.strip(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if b"transfer-encoding" in headers:
            return self._end == _LAST_CHUNK
        length = headers.get(b"content-length", b"")
        if status.split(b" ")[1:2] in _WITHOUT_BODY:
            length = b"0"
        return length.isdigit() and self._size == len(head) + len(end) + int(length)
