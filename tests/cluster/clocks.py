"""Clocks of members that tests set: what a process of `qcli` believes the time to be."""

import os
import struct
from pathlib import Path

_PROGRAM = Path(__file__).with_name("clock")


class Clock:
    """The clock of the processes that have its `environment`. Monotonic clocks go on as they are.

    Args:
        file: Is created, and has the nanoseconds that the clock is ahead.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(_PROGRAM), *filter(None, others)]),
            "TEST_CLOCK": str(file),
        }

    def set(self, ahead_s: float) -> None:
        """Set it forward, or back if negative, relative to the clock of the machine."""
        descriptor = os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.pwrite(descriptor, struct.pack("=q", int(ahead_s * 1e9)), 0)
        finally:
            os.close(descriptor)
