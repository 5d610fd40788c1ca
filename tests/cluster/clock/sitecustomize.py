"""Lets tests set the clock of a process: Python imports this at its start, if the folder is on PYTHONPATH.

See `cluster.clocks`.
"""

import mmap
import os
import struct
import time

_real_ns = time.time_ns
with open(os.environ["TEST_CLOCK"], "rb") as _file:
    _ahead = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)


def _time_ns() -> int:
    (ahead_ns,) = struct.unpack_from("=q", _ahead)
    return _real_ns() + int(ahead_ns)


def _time() -> float:
    return _time_ns() / 1e9


time.time_ns = _time_ns
time.time = _time
