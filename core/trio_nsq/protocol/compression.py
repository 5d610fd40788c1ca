"""Compressed connections: IDENTIFY's `snappy` and `deflate` (NSQ protocol: IDENTIFY).

Snappy is the framing format (google/snappy, framing_format.txt); deflate is raw DEFLATE (RFC 1951, no zlib header),
with a sync flush at each flush of the sender. Both are streams in both directions: a codec serves one connection from
its upgrade to its end.
"""

import zlib
from collections.abc import Iterator
from typing import Protocol

from .errors import NSQError
from .limits import KIB

MAX_PIECE_BYTES = 64 * KIB
"""The largest piece that `decode` yields, so that a few compressed bytes cannot expand to gigabytes at once."""

_CHUNK_HEADER_BYTES = 4
_MAX_CHUNK_BYTES = 128 * KIB
"""More than snappy's output for 64 KiB; larger chunks could only be padding."""
_FLUSH = b"\x00\x00\xff\xff"
"""The end of a sync flush of DEFLATE."""


class CompressionError(NSQError):
    """The peer's bytes are invalid; the connection is unusable."""


class Codec(Protocol):
    """One layer of a connection: it encodes sent data and decodes received data."""

    @property
    def ended(self) -> bool:
        """Whether the peer has closed the stream of this layer."""

    def encode(self, data: bytes) -> bytes:
        """Encode data to send; the peer can decode all of it without more bytes."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decode received bytes and yield the data in pieces; nothing if more bytes are needed.

        Raises NSQError for invalid bytes, after yielding the data before them.
        """


class Snappy:
    """Snappy's framing format; one chunk per 64 KiB of a write."""

    ended = False
    """The format has no end marker."""

    def __init__(self) -> None:
        import snappy  # here, because its library has 4 MB and most clients do not compress

        self._compressor = snappy.StreamCompressor()
        self._new_decompressor = snappy.StreamDecompressor
        self._decompressor = snappy.StreamDecompressor()
        self._incomplete = b""

    def encode(self, data: bytes) -> bytes:
        """See `Codec`."""
        return bytes(self._compressor.add_chunk(data))

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See `Codec`. No piece is longer than MAX_PIECE_BYTES."""
        data = self._incomplete + data
        chunks = list(_chunks(data))
        end = chunks[-1][1] if chunks else 0
        self._incomplete = data[end:]
        try:
            yield from self._decompress(data[:end])
        except CompressionError:
            for start, end in chunks:  # the chunks before the invalid one are valid
                yield from self._decompress(data[start:end])
        size = _chunk_size(self._incomplete)
        if size > _MAX_CHUNK_BYTES:
            raise CompressionError(f"snappy: a chunk of {size} bytes")

    def _decompress(self, chunks: bytes) -> Iterator[bytes]:
        try:
            piece = self._decompressor.decompress(chunks) if chunks else b""
        except (OSError, ValueError) as exc:
            self._decompressor = self._new_decompressor()
            raise CompressionError(str(exc)) from exc
        for start in range(0, len(piece), MAX_PIECE_BYTES):
            yield piece[start : start + MAX_PIECE_BYTES]


def _chunk_size(data: bytes) -> int:
    """Return the size of the first chunk, without its header; 0 if the header is incomplete."""
    return int.from_bytes(data[1:_CHUNK_HEADER_BYTES], "little") if len(data) >= _CHUNK_HEADER_BYTES else 0


def _chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of the leading complete chunks."""
    start = 0
    while len(data) - start >= _CHUNK_HEADER_BYTES:
        size = _chunk_size(data[start : start + _CHUNK_HEADER_BYTES])
        end = start + _CHUNK_HEADER_BYTES + size
        if size > _MAX_CHUNK_BYTES or end > len(data):
            return
        yield start, end
        start = end


class Deflate:
    """Raw DEFLATE at a level within 1..9."""

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
        """See `Codec`. No piece is longer than MAX_PIECE_BYTES. Bytes after the end of the stream are ignored."""
        # On an error zlib drops its earlier output of the same call, so flushed data is decoded separately.
        flushed = data.rfind(_FLUSH) + len(_FLUSH) if _FLUSH in data else 0
        for part in (data[:flushed], data[flushed:]):
            if not self.ended:
                yield from self._decompress(part)

    def _decompress(self, data: bytes) -> Iterator[bytes]:
        decompressor = self._decompressor
        while True:
            try:
                piece = decompressor.decompress(data, MAX_PIECE_BYTES)
            except zlib.error as exc:
                raise CompressionError(f"deflate: {exc}") from exc
            if piece:
                yield piece
            if decompressor.eof:
                return  # bytes after the end stay in `unconsumed_tail`
            data = decompressor.unconsumed_tail
            if not data and len(piece) < MAX_PIECE_BYTES:
                return
