"""A client's side of upgrades: IDENTIFY, and the TLS and compression layers."""

import json
import ssl
import zlib
from collections.abc import Callable
from typing import Any

import trio
from snappy import StreamCompressor, StreamDecompressor

from broker.support import RawClient, identify


class CompressedStream:
    """A stream whose data is compressed and decompressed chunk by chunk."""

    def __init__(
        self,
        stream: Any,
        received: bytes,
        encode: Callable[[bytes], bytes],
        decode: Callable[[bytes], bytes],
    ) -> None:
        self.stream, self._encode, self._decode = stream, encode, decode
        self._received = received

    async def send_all(self, data: bytes) -> None:
        await self.stream.send_all(self._encode(data))

    async def receive_some(self, _max_bytes: int) -> bytes:
        while data := self._received or bytes(await self.stream.receive_some(65536)):
            self._received = b""
            if plain := self._decode(data):
                return plain
        return b""


def compress(client: RawClient, kind: str) -> None:
    """Continue compressed, including data that was already received."""
    encode: Callable[[bytes], bytes]
    decode: Callable[[bytes], bytes]
    if kind == "snappy":
        encode, decode = StreamCompressor().add_chunk, StreamDecompressor().decompress
    else:
        packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        decode = zlib.decompressobj(-zlib.MAX_WBITS).decompress

        def encode(data: bytes) -> bytes:
            return packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)

    client.stream = CompressedStream(client.stream, client.take_received(), encode, decode)  # type: ignore[assignment]


async def negotiate(client: RawClient, **fields: object) -> dict[str, Any]:
    """Send IDENTIFY; return the reply."""
    await client.send(identify(feature_negotiation=True, **fields))
    frame = await client.frame()
    assert frame is not None
    assert frame[0] == 0, frame
    reply: dict[str, Any] = json.loads(frame[1])
    return reply


async def start_tls(client: RawClient, context: ssl.SSLContext) -> None:
    """Do the handshake only; the stream is encrypted afterwards."""
    stream = trio.SSLStream(client.stream, context, server_hostname="127.0.0.1")
    await stream.do_handshake()
    client.stream = stream  # type: ignore[assignment]


async def start_tls_and_read(client: RawClient, context: ssl.SSLContext) -> None:
    """Do the handshake and read: in TLS 1.3 a client learns of its refusal only when it reads."""
    await start_tls(client, context)
    await client.frame()


async def upgrade(client: RawClient, context: ssl.SSLContext | None, kind: str | None) -> None:
    """Send IDENTIFY, and do all negotiated upgrades, with their OKs."""
    reply = await negotiate(
        client, tls_v1=context is not None, snappy=kind == "snappy", deflate=kind == "deflate"
    )
    assert (reply["tls_v1"], reply["snappy"], reply["deflate"]) == (
        context is not None,
        kind == "snappy",
        kind == "deflate",
    )
    if context is not None:
        await start_tls(client, context)
        await client.ok()
    if kind is not None:
        compress(client, kind)
        await client.ok()
