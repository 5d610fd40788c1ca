"""How long the disk takes to make bytes safe: what no broker can be faster than whose OK means that."""

import os
import statistics
import tempfile
import time
from pathlib import Path

PROBE_S = 0.5
LEAST_SYNCS = 5


def sync_times(folder: Path, size: int, seconds: float = PROBE_S) -> list[float]:
    """Append `size` bytes to a file and sync it (fdatasync), again and again; returns how many seconds each took."""
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
    """Messages per second that can be made safe if every connection waits for the OK of its one request.

    At best one sync serves the requests of all connections; so that is the bytes of a sync over the time of one.
    """
    together = connections * batch
    return together / statistics.median(sync_times(folder, together * (4 + size)))
