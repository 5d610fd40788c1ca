"""Finds out which process has locked a folder, for error messages."""

import os
from pathlib import Path

_LOCKS = Path("/proc/locks")


def lock_holder(fd: int) -> str:
    """Return `process PID` for the process that holds a lock (flock) on this file or folder.

    If the system does not tell, as for a process in another container, return `another process`.
    """
    status = os.fstat(fd)
    file_id = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return "another process"
    # A line is `1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF`, with `->` after the number for a waiting process.
    pids = [fields[4] for fields in map(str.split, lines) if fields[1] == "FLOCK" and fields[5] == file_id]
    return f"process {pids[0]}" if pids and int(pids[0]) > 0 else "another process"
