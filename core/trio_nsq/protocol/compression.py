"""Compressed connections: what IDENTIFY's `snappy` and `deflate` switch on (NSQ protocol: IDENTIFY).

Snappy is the framing format (google/snappy, framing_format.txt); deflate is raw DEFLATE (RFC 1951, no zlib header),
with a sync flush wherever the sender flushes. Both go in both directions, and are streams: a codec serves one
connection from its upgrade to its end.
"""

import zlib
from collections.abc import Iterator
from typing import Protocol

from snappy import StreamCompressor, StreamDecompressor

from .errors import NSQError
from .limits import KIB

MAX_PIECE_BYTES = 256 * KIB
"""What `Deflate.decode` gives at a time, so that a few bytes do not become gigabytes at once. (A snappy chunk holds
64 KiB at most.)"""

_CHUNK_HEADER_BYTES = 4
_MAX_CHUNK_BYTES = 128 * KIB
"""More than 64 KiB can become by snappy; beyond it there is only padding, of which a sender needs less."""


class CompressionError(NSQError):
    """The peer's bytes are not what was negotiated; the connection is of no further use."""


class Codec(Protocol):
    """One layer of a connection: what is sent goes through `encode`, what is received through `decode`."""

    @property
    def ended(self) -> bool:
        """The peer has said, in this layer's way, that nothing more will come."""

    def encode(self, data: bytes) -> bytes:
        """What to send for this data; the peer can decode all of it without waiting for more."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The data in what was received, in pieces; none if more is needed.

        Raises:
            NSQError: What was received makes no sense.
        """


class Snappy:
    """Snappy's framing format, a chunk for every 64 KiB that are sent together."""

    ended = False
    """The format has no end."""

    def __init__(self) -> None:
        self._compressor = StreamCompressor()
        self._decompressor = StreamDecompressor()
        self._incomplete = b""

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        return bytes(self._compressor.add_chunk(data))

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See `Codec`; at most as many pieces as there are calls."""
        data = self._incomplete + data
        end = _end_of_whole_chunks(data)
        self._incomplete = data[end:]
        if end:
            try:
                piece = self._decompressor.decompress(data[:end])
            except (OSError, ValueError) as exc:
                raise CompressionError(str(exc)) from exc
            if piece:
                yield piece


def _end_of_whole_chunks(data: bytes) -> int:
    position = 0
    while len(data) - position >= _CHUNK_HEADER_BYTES:
        size = int.from_bytes(data[position + 1 : position + _CHUNK_HEADER_BYTES], "little")
        if size > _MAX_CHUNK_BYTES:
            raise CompressionError(f"snappy: a chunk of {size} bytes")
        if position + _CHUNK_HEADER_BYTES + size > len(data):
            break
        position += _CHUNK_HEADER_BYTES + size
    return position


class Deflate:
    """Raw DEFLATE.

    Args:
        level: 1..9.
    """

    def __init__(self, level: int) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)

    @property
    def ended(self) -> bool:
        """See `Codec`."""
        return self._decompressor.eof

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See `Codec`; no piece is longer than MAX_PIECE_BYTES. What follows the end of the stream is ignored."""
        decompressor = self._decompressor
        while True:
            try:
                piece = decompressor.decompress(data, MAX_PIECE_BYTES)
            except zlib.error as exc:
                raise CompressionError(f"deflate: {exc}") from exc
            if piece:
                yield piece
            data = decompressor.unconsumed_tail
            if not data and len(piece) < MAX_PIECE_BYTES:
                return
