"""Measure the sync time of the disk: the lower limit for any broker that syncs before its OK."""

import os
import statistics
import tempfile
import time
from pathlib import Path

PROBE_S = 0.5
LEAST_SYNCS = 5


def sync_times(folder: Path, size: int, seconds: float = PROBE_S) -> list[float]:
    """Append `size` bytes to a file and sync it (fdatasync) repeatedly; return the seconds of each sync."""
    data = os.urandom(size)
    took_s: list[float] = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        until_s = time.perf_counter() + seconds
        while len(took_s) < LEAST_SYNCS or time.perf_counter() < until_s:
            began_s = time.perf_counter()
            file.write(data)
            os.fdatasync(file.fileno())
            took_s.append(time.perf_counter() - began_s)
    return took_s


def most_messages(folder: Path, connections: int, batch: int, size: int) -> float:
    """Return the maximum synced messages per second if every connection waits for the OK of one request.

    At best one sync serves the requests of all connections, so this is the bytes of one sync divided by its time.
    """
    together = connections * batch
    return together / statistics.median(sync_times(folder, together * (4 + size)))
