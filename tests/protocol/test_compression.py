"""Tests for snappy and deflate as used by connections; the other side uses python-snappy and zlib directly."""

import zlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snappy import StreamCompressor, StreamDecompressor

from trio_nsq.protocol.compression import MAX_PIECE_BYTES, Codec, CompressionError, Deflate, Snappy

CODECS = [Snappy, lambda: Deflate(6)]
IDS = ["snappy", "deflate"]
both = pytest.mark.parametrize("codec", CODECS, ids=IDS)


def raw_deflate() -> "zlib._Compress":
    return zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)


def decode(codec: Codec, data: bytes, at_a_time: int) -> bytes:
    pieces = [data[start : start + at_a_time] for start in range(0, len(data), at_a_time)]
    return b"".join(piece for part in pieces for piece in codec.decode(part))


@both
@given(sent=st.lists(st.binary(max_size=300)), at_a_time=st.integers(1, 500))
def test_round_trip_in_any_pieces(codec: "type[Snappy]", sent: list[bytes], at_a_time: int) -> None:
    sender, receiver = codec(), codec()
    wire = b"".join(sender.encode(data) for data in sent)
    assert decode(receiver, wire, at_a_time) == b"".join(sent)


@both
@pytest.mark.parametrize(
    "data", [b"x", bytes(1_000_000), Random(1).randbytes(300_000)], ids=["byte", "zeros", "random"]
)
def test_each_flush_can_be_read_without_later_data(codec: "type[Snappy]", data: bytes) -> None:
    sender, receiver = codec(), codec()
    for _ in range(3):
        assert b"".join(receiver.decode(sender.encode(data))) == data


def test_snappy_uses_the_framing_format() -> None:
    wire = Snappy().encode(b"hello" * 30_000)
    assert wire.startswith(b"\xff\x06\x00\x00sNaPpY\x00")
    assert StreamDecompressor().decompress(wire) == b"hello" * 30_000
    sender = StreamCompressor()
    codec = Snappy()
    assert [b"".join(codec.decode(sender.add_chunk(data))) for data in (b"one", b"two")] == [b"one", b"two"]


def test_snappy_skips_padding() -> None:
    sender, codec = StreamCompressor(), Snappy()
    wire = (
        sender.add_chunk(b"one") + b"\xfe\x03\x00\x00\0\0\0" + b"\x80\x01\x00\x00x" + sender.add_chunk(b"two")
    )
    assert b"".join(codec.decode(wire)) == b"onetwo"


def test_deflate_is_raw_and_flushes_at_a_byte_boundary() -> None:
    wire = Deflate(6).encode(b"hello")
    assert wire.endswith(b"\x00\x00\xff\xff")
    assert zlib.decompressobj(-zlib.MAX_WBITS).decompress(wire) == b"hello"


def test_deflate_levels_differ() -> None:
    data = b"".join(b"%d," % (n * n) for n in range(20_000))
    assert len(Deflate(9).encode(data)) < len(Deflate(1).encode(data))


@pytest.mark.parametrize(
    "wire",
    [
        b"\x02\x01\x00\x00x",  # a chunk type that must be understood, and is unknown
        b"\x00\x05\x00\x00aaaaa",  # not snappy
        b"\x01\x05\x00\x00\0\0\0\0x",  # a wrong checksum
        b"\xff\x06\x00\x00sNaPpX",
    ],
)
def test_invalid_snappy(wire: bytes) -> None:
    codec = Snappy()
    assert b"".join(codec.decode(Snappy().encode(b"good"))) == b"good"
    with pytest.raises(CompressionError, match="snappy"):
        list(codec.decode(wire))


def test_too_long_snappy_chunk_is_refused_at_its_header() -> None:
    """A client cannot make the broker buffer 16 MiB for a chunk."""
    with pytest.raises(CompressionError, match="chunk of 16777215 bytes"):
        list(Snappy().decode(b"\xfe\xff\xff\xff"))


def test_invalid_deflate() -> None:
    with pytest.raises(CompressionError, match="deflate"):
        list(Deflate(6).decode(b"\xff" * 10))


@both
def test_highly_compressed_data_is_expanded_in_limited_pieces(codec: "type[Snappy]") -> None:
    size = 64 * MAX_PIECE_BYTES + 1
    wire = codec().encode(bytes(size))
    assert len(wire) < size / 20
    pieces = [len(piece) for piece in codec().decode(wire)]
    assert max(pieces) <= MAX_PIECE_BYTES
    assert sum(pieces) == size


def test_data_after_the_end_of_a_deflate_stream_is_ignored() -> None:
    packer = raw_deflate()
    codec = Deflate(6)
    assert not codec.ended
    assert b"".join(codec.decode(packer.compress(b"last") + packer.flush() + b"more")) == b"last"
    assert codec.ended
    assert list(codec.decode(b"and more")) == []


def test_long_stream_with_bytes_after_its_end_terminates() -> None:
    packer = raw_deflate()
    size = MAX_PIECE_BYTES + 5000
    codec = Deflate(6)
    pieces = list(codec.decode(packer.compress(bytes(size)) + packer.flush() + b"x"))
    assert sum(map(len, pieces)) == size
    assert codec.ended


@both
@pytest.mark.parametrize("garbage", [b"CLS\n", b"\x00\x05\x00\x00aaaaa", b"\xff" * 9])
def test_data_before_garbage_is_returned(codec: "type[Snappy]", garbage: bytes) -> None:
    """nsqjs sends its last commands compressed, and then plain text."""
    sender, receiver = codec(), codec()
    got = b"".join(receiver.decode(sender.encode(b"one")))
    pieces = receiver.decode(sender.encode(b"two") + sender.encode(b"three") + garbage)
    with pytest.raises(CompressionError):  # noqa: PT012 - what comes before it matters
        for piece in pieces:
            got += piece
    assert got == b"onetwothree"
