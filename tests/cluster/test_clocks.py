"""Tests for clocks that tests set."""

import os
import subprocess
import sys
import time
from pathlib import Path

from cluster.clocks import Clock

HOUR_S = 3600
_TELL = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.time_ns(), flush=True)"


def test_a_clock_is_set_while_its_process_runs(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    with subprocess.Popen(
        [sys.executable, "-c", _TELL],
        env=os.environ | clock.environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead_s in (0, HOUR_S, -HOUR_S):
            clock.set(ahead_s)
            before_s = time.time()
            process.stdin.write("\n")
            process.stdin.flush()
            seconds, nanoseconds = (float(word) for word in process.stdout.readline().split())
            assert before_s - 1 <= seconds - ahead_s <= time.time() + 1
            assert before_s - 1 <= nanoseconds / 1e9 - ahead_s <= time.time() + 1
        process.stdin.close()
