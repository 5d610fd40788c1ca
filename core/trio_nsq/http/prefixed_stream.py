"""A stream of which some bytes were read already."""

import trio


def with_prefix(data: bytes, stream: trio.abc.Stream) -> trio.abc.Stream:
    """Return a stream that returns these bytes first; the same stream if there are none."""
    return PrefixedStream(data, stream) if data else stream


class PrefixedStream(trio.abc.HalfCloseableStream):
    """A stream that returns some bytes before those that arrive. It closes the stream that it wraps."""

    def __init__(self, data: bytes, stream: trio.abc.Stream) -> None:
        self._data = data
        self._stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._data:
            return await self._stream.receive_some(max_bytes)
        await trio.lowlevel.checkpoint()
        data, self._data = self._data[:max_bytes], self._data[max_bytes:] if max_bytes is not None else b""
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As trio's. The wrapped stream must be able to end one side alone."""
        assert isinstance(self._stream, trio.abc.HalfCloseableStream)
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()
