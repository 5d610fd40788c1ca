"""How much freed memory the process keeps. These functions do nothing if the C library is not glibc."""

import ctypes
import os

_KEPT_BYTES = 16 * 1024 * 1024
"""More than the bodies that a few clients publish at once: bench/README.md, "Large bodies"."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt


def keep_freed_memory() -> None:
    """Keep up to 16 MiB of freed memory at the end of the heap for the next allocations.

    By default, glibc returns nearly all of it to the system at once, and the system clears each page before it gives
    it out again. For bodies of more than some KiB, that takes longer than copying them.

    Does nothing if the environment has settings of glibc's allocator.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    if (mallopt := _function("mallopt")) is not None:
        # Both, because setting one ends glibc's own adjustment of the other.
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def trim() -> None:
    """Return freed memory to the system."""
    if (malloc_trim := _function("malloc_trim")) is not None:
        malloc_trim(0)


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    try:
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
