"""Decompress bodies up to a limit of bytes, whatever they claim to be.

gzip, zlib, zstd and framed snappy begin with bytes that say so; a block of snappy does not.
"""

import importlib
import zlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import snappy

from ..platform.extras import install_hint
from .errors import BodyError, BodySchemaError

_SNAPPY_FRAME = b"\xff\x06\x00\x00sNaPpY"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
"""What decompression may keep in memory; the frames of `zstd -19` have this window."""
FIRST_BYTES = b"\x1f\x28\x78\xff"
"""What compressed bodies begin with, except a block of snappy."""
_SNAPPY_PIECE = 64 * 1024
_INFLATE_PIECE = 4 * 1024
"""What a member of gzip leaves unused is copied: the rest of a piece, not that of the body."""


class Compression(StrEnum):
    """How a body is compressed; `AUTO`: its first bytes say so."""

    AUTO = "auto"
    NONE = "none"
    GZIP = "gzip"
    ZLIB = "zlib"
    ZSTD = "zstd"
    SNAPPY = "snappy"


def compression_of(body: bytes) -> Compression:
    """Return the compression that the first bytes of a body name; `NONE`: they name none."""
    if body[:1] not in FIRST_BYTES or len(body) < 2:
        return Compression.NONE
    if body.startswith(b"\x1f\x8b\x08"):
        return Compression.GZIP
    if body.startswith(_ZSTD):
        return Compression.ZSTD
    if body.startswith(_SNAPPY_FRAME):
        return Compression.SNAPPY
    # The second byte makes the first two a multiple of 31. With a preset dictionary (0x20), nobody could read it.
    if body[0] == 0x78 and int.from_bytes(body[:2], "big") % 31 == 0 and not body[1] & 0x20:
        return Compression.ZLIB
    return Compression.NONE


def decompress(body: bytes, compression: Compression, most_bytes: int) -> tuple[bytes, bool]:
    """Return a decompressed body, and whether it is complete: at most the first `most_bytes` are returned.

    Raises:
        BodyError: The body is damaged.
        BodySchemaError: A package is missing.
    """
    if compression is Compression.AUTO:
        compression = compression_of(body)
    if compression is Compression.NONE:
        return body, True
    try:
        found = _DECOMPRESS[compression](body, most_bytes)
    except (zlib.error, ValueError, EOFError, RuntimeError, MemoryError, OverflowError) as exc:
        raise BodyError(f"the body is not valid {compression}: {exc}") from exc
    return found[:most_bytes], len(found) <= most_bytes


def check_packages(compression: Compression) -> None:
    """Raises BodySchemaError: the package for a compression is missing."""
    if compression is Compression.ZSTD:
        _zstandard()


def _inflate(window_bits: int) -> Callable[[bytes, int], bytes]:
    def inflate(body: bytes, most_bytes: int) -> bytes:
        found, inflater = bytearray(), zlib.decompressobj(window_bits)
        for start in range(0, len(body), _INFLATE_PIECE):
            piece = body[start : start + _INFLATE_PIECE]
            while piece:
                if inflater.eof and window_bits <= zlib.MAX_WBITS:
                    return bytes(found)
                if inflater.eof:  # gzip has members, one after the other
                    inflater = zlib.decompressobj(window_bits)
                found += inflater.decompress(piece, most_bytes + 1 - len(found))
                if len(found) > most_bytes:
                    return bytes(found)
                piece = inflater.unused_data
        if not inflater.eof:
            raise EOFError("it ends early")
        return bytes(found)

    return inflate


def _zstandard() -> Any:  # its type information differs between versions
    try:
        return importlib.import_module("zstandard")
    except ModuleNotFoundError as exc:
        raise BodySchemaError(
            f"zstd bodies need a package that is not installed: {install_hint('zstd')}"
        ) from exc


def _zstd(body: bytes, most_bytes: int) -> bytes:
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    found = b""
    try:
        with decompressor.stream_reader(body, read_across_frames=True) as stream:
            while len(found) <= most_bytes and (piece := bytes(stream.read(most_bytes + 1 - len(found)))):
                found += piece
        # -1: the frame does not say its size.
        if len(found) < min(zstandard.frame_content_size(body), most_bytes):
            raise EOFError("it ends early")
    except zstandard.ZstdError as exc:
        raise ValueError(str(exc)) from exc
    return found


def _unsnap(body: bytes, most_bytes: int) -> bytes:
    if not body.startswith(_SNAPPY_FRAME):
        return snap_block(body, most_bytes)
    stream = snappy.StreamDecompressor()
    found: bytes = b""
    for start in range(0, len(body), _SNAPPY_PIECE):
        try:
            found += stream.decompress(body[start : start + _SNAPPY_PIECE])
        except Exception as exc:  # of cramjam, which has no common base
            raise ValueError(str(exc)) from exc
        if len(found) > most_bytes:
            return found
    if stream.remains:
        raise EOFError("it ends early")
    return found


def snap_block(body: bytes, most_bytes: int) -> bytes:
    """Decompress a block of snappy, whose first bytes have its size: a larger one is not begun. Raises ValueError."""
    size = 0
    for shift, byte in enumerate(body[:5]):
        size |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            break
    else:
        raise ValueError("it has no size")
    if size > most_bytes:
        raise ValueError(f"it says that it has {size} bytes, and the limit is {most_bytes}")
    try:
        return bytes(snappy.uncompress(body))
    except snappy.UncompressError as exc:
        raise ValueError("the block is damaged") from exc


_DECOMPRESS: Mapping[Compression, Callable[[bytes, int], bytes]] = {
    Compression.GZIP: _inflate(zlib.MAX_WBITS + 16),
    Compression.ZLIB: _inflate(zlib.MAX_WBITS),
    Compression.ZSTD: _zstd,
    Compression.SNAPPY: _unsnap,
}
