"""Fuzz targets for compressed connections."""

import zlib
from random import Random
from struct import pack

import snappy

from fuzz.engine import ways
from trio_nsq.protocol import NSQError
from trio_nsq.protocol.compression import MAX_PIECE_BYTES, Codec, Deflate, Snappy

STREAM_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
BOMB_BYTES = 2_000_000


def plain(rng: Random) -> bytes:
    """Return data to compress."""
    if rng.random() < 0.02:
        return b"\0" * 70_000
    return rng.choice(
        (b"NOP\n", b"", b"x" * 1000, b"FIN 0123456789abcdef\n" * 5, rng.randbytes(rng.randrange(300)))
    )


class _Compressed:
    """The common part of both codecs."""

    name: str
    memory_per_byte = 100
    # One piece, its parts, and the window of the other side.
    memory_bytes = 4 * MAX_PIECE_BYTES + 200_000

    def codec(self) -> Codec:
        raise NotImplementedError

    def check(self, data: bytes, rng: Random) -> None:
        whole, error = self._decode([data])
        for pieces in ways(data, rng):
            again, error_again = self._decode(pieces)
            where = f"in pieces of {[*map(len, pieces)][:9]}"
            assert bool(error) == bool(error_again), f"{where}: {error_again}; whole: {error}"
            # How much of the data just before an error is returned depends on how it arrives.
            same = again.startswith(whole) or whole.startswith(again) if error else again == whole
            assert same, f"{where}: {again[:200]!r}; whole: {whole[:200]!r}"

    def _decode(self, pieces: list[bytes]) -> tuple[bytes, str]:
        """Return the decoded data, and the error if there is one. As a broker, stop at the end of a stream."""
        codec = self.codec()
        found: list[bytes] = []
        try:
            for data in pieces:
                for piece in codec.decode(data):
                    assert 0 < len(piece) <= max(MAX_PIECE_BYTES, self.most(data))
                    found.append(piece)
        except NSQError as error:
            return b"".join(found), str(error)
        return b"".join(found), ""

    def most(self, data: bytes) -> int:
        """Return the maximum output of one piece."""
        return 0

    def read(self, data: bytes) -> None:
        try:
            for _ in self.codec().decode(data):
                pass
        except NSQError:
            pass


class SnappyStream(_Compressed):
    """Snappy's framing format."""

    name = "snappy"

    def codec(self) -> Codec:
        return Snappy()

    def most(self, data: bytes) -> int:
        """All complete chunks; three bytes of snappy repeat at most 64."""
        return 65536 + 22 * len(data)

    def valid(self, rng: Random) -> list[bytes]:
        compressor = snappy.StreamCompressor()
        pieces = [compressor.add_chunk(plain(rng)) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3:
            kind = rng.choice(b"\x02\x7f\x80\xfe\xff")
            pieces.insert(rng.randrange(len(pieces) + 1), bytes([kind, 3, 0, 0]) + b"abc")
        if rng.random() < 0.1:
            pieces.append(STREAM_IDENTIFIER)
        return pieces


class DeflateStream(_Compressed):
    """Raw DEFLATE."""

    name = "deflate"

    def codec(self) -> Codec:
        return Deflate(6)

    def valid(self, rng: Random) -> list[bytes]:
        compressor = zlib.compressobj(rng.randrange(1, 10), zlib.DEFLATED, -zlib.MAX_WBITS)
        pieces = []
        for _ in range(rng.randrange(1, 4)):
            data = bytes(BOMB_BYTES) if rng.random() < 0.002 else plain(rng)
            pieces += [compressor.compress(data), compressor.flush(zlib.Z_SYNC_FLUSH)]
        if rng.random() < 0.2:
            pieces.append(compressor.flush(zlib.Z_FINISH))
        if rng.random() < 0.2:
            size = rng.choice((0, 1, 4, 65535))
            pieces.append(b"\0" + pack("<HH", size, size ^ rng.choice((0xFFFF, 0xFFFE))) + b"NOP\n"[:size])
        return pieces
