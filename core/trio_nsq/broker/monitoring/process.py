"""Memory and garbage collection of the process, for `/stats` and statsd, under nsqd's names.

nsqd reports metrics of its Go runtime. If CPython has an equivalent or similar value, the broker reports that, else 0,
so that dashboards find every key. docs/reference/metrics.md has the table.
"""

import gc
import os
import sys
from collections import deque
from math import ceil
from pathlib import Path
from time import perf_counter_ns

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KEPT_PAUSES = 256
"""The number that Go's runtime keeps."""


class ProcessFigures:
    """Records garbage collections until closed, and reads memory usage on request."""

    def __init__(self) -> None:
        self._runs = 0
        self._pauses_ns: deque[int] = deque(maxlen=_KEPT_PAUSES)
        self._began_ns = 0
        gc.callbacks.append(self._observe)

    def close(self) -> None:
        """Stop recording. Closing again does nothing."""
        if self._observe in gc.callbacks:
            gc.callbacks.remove(self._observe)

    def _observe(self, phase: str, info: dict[str, int]) -> None:
        # Collections of the youngest generation take microseconds, and are so frequent that they would displace others.
        if phase == "start":
            self._began_ns = perf_counter_ns()
        elif info["generation"] > 0:
            self._pauses_ns.append(perf_counter_ns() - self._began_ns)
            self._runs += 1

    def memory(self) -> dict[str, int]:
        """Return `memory` of `/stats`, keys in nsqd's order."""
        pauses_ns = sorted(self._pauses_ns)
        return {
            "heap_objects": sys.getallocatedblocks(),
            "heap_idle_bytes": 0,
            "heap_in_use_bytes": private_bytes(),
            "heap_released_bytes": 0,
            "gc_pause_usec_100": _percentile_us(pauses_ns, 100),
            "gc_pause_usec_99": _percentile_us(pauses_ns, 99),
            "gc_pause_usec_95": _percentile_us(pauses_ns, 95),
            "next_gc_bytes": 0,
            "gc_total_runs": self._runs,
        }


def private_bytes() -> int:
    """Return the private resident memory of this process; 0 on systems without /proc."""
    try:
        _, resident, shared, *_ = _STATM.read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _percentile_us(ascending_ns: list[int], percent: int) -> int:
    if not ascending_ns:
        return 0
    return ascending_ns[ceil(len(ascending_ns) * percent / 100) - 1] // 1000
