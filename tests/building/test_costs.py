"""Tests for `tools/costs.py`: what it prints for the tests of a folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from soak import in_soak

ROOT = Path(__file__).parents[2]
CHILD_WORKS = """
import subprocess, sys
WORK = "import time\\nwhile time.process_time() < 0.4: pass"

def test_ended():
    subprocess.run([sys.executable, "-c", WORK], check=True)

def test_running():
    process = subprocess.Popen([sys.executable, "-c", WORK + "\\nprint(1, flush=True)\\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    globals()["kept"] = process

def test_end_of_the_process():
    kept.communicate(b"\\n")
"""
IDLE = "import time\n\ndef test_waits():\n    time.sleep(0.2)\n"


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--numprocesses=1"], *in_soak(([],))], ids=str)
def test_processes_count_once_and_waiting_does_not(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_busy.py").write_text(CHILD_WORKS)
    (tmp_path / "test_idle.py").write_text(IDLE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tools.costs", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^ *([\d.]+) s +([\d.]+) s +(\d+)  (.*)$", done.stdout, re.MULTILINE)
    (busy, _, count, first), (idle, elapsed, _, second) = found
    assert (first, count, second) == ("test_busy.py", "3", "test_idle.py")
    assert 0.8 <= float(busy) < 2.0
    assert float(idle) < 0.2 <= float(elapsed)
