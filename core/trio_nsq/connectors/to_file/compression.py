"""Compression of output files: each piece becomes a complete gzip member or zstd frame.

Files of several members or frames decompress to their concatenation. A file that ends after one is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from zlib_ng import zlib_ng

from ...platform.extras import install_hint
from ...protocol.errors import NSQError

PIECE_BYTES = 1024 * 1024
"""Pieces of this size are compressed in parallel; larger ones would hardly become smaller."""
_GZIP_FORMAT = 31  # zlib's code for a gzip header and a window of 32 KiB
SUFFIXES = {"none": "", "gzip": ".gz", "zstd": ".zst"}
DEFAULT_LEVELS = {"none": 0, "gzip": 6, "zstd": 3}


class CompressionMissing(NSQError):
    """The library of a compression is not installed; the text says how to install it."""


def _gzip(level: int) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        member = zlib_ng.compressobj(level, zlib_ng.DEFLATED, _GZIP_FORMAT)
        return member.compress(data) + member.flush()

    return compress


def _zstd(level: int) -> Callable[[bytes], bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise CompressionMissing(
            f"zstd needs the extra 'zstd', which is not installed: {install_hint('zstd')}"
        ) from error

    def compress(data: bytes) -> bytes:
        # A compressor must not be used by two threads at the same time.
        frame: bytes = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)
        return frame

    return compress


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compress")


class Compressor:
    """Compresses data in pieces, in parallel.

    Args:
        name: `gzip` or `zstd`.
        level: 1 to 9 for gzip, 1 to 22 for zstd; None: the default.

    Attributes:
        suffix: The suffix of file names.

    Raises:
        CompressionMissing: zstandard is not installed.
    """

    def __init__(self, name: str, level: int | None = None) -> None:
        self.suffix: str = SUFFIXES[name]
        level = DEFAULT_LEVELS[name] if level is None else level
        self._compress = _gzip(level) if name == "gzip" else _zstd(level)

    def compress(self, parts: Sequence[bytes]) -> list[bytes]:
        """Return complete members or frames for the concatenation of the parts; at least one."""
        data = b"".join(parts)
        if len(data) < 2 * PIECE_BYTES:
            return [self._compress(data)]
        view = memoryview(data)
        pieces = [view[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        return list(_threads().map(self._compress, pieces))
