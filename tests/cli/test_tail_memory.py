"""Test that the broker and `qcli tail` read a large topic in little memory, even with a slow reader."""

import time
from pathlib import Path

import pytest

from cli.support import DEADLINE_S, Cli
from interop.peers import qcli_serve

MIB = 1024 * 1024
BODY_BYTES = 4096
MESSAGES = 12_000


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024


def forget_peak(pid: int) -> int:
    """Reset the peak; return the resident memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def worked_ticks(pid: int) -> int:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_until_idle(*pids: int) -> None:
    """Wait until the processes use no more processor time."""
    deadline, before = time.monotonic() + DEADLINE_S, [-1]
    while (now := [worked_ticks(pid) for pid in pids]) != before:
        assert time.monotonic() < deadline
        before = now
        time.sleep(0.3)


@pytest.mark.slow
def test_slow_reader_does_not_fill_memory(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--mem-queue-size=10", "--cache-bytes=1000000") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        for start in range(0, MESSAGES, 1000):
            bodies = [b"%06d" % number + b"x" * (BODY_BYTES - 6) for number in range(start, start + 1000)]
            broker.post("/mpub", b"\n".join(bodies), topic="t")
        resident = forget_peak(broker.process.pid)
        with qcli.running("tail", "t", "--from", "earliest", "--to", "latest") as reader:
            began = reader.read(4096)
            wait_until_idle(broker.process.pid, reader.process.pid)
            lines = began.count(b"\n")
            while lines < MESSAGES * 0.9:
                lines += reader.read(16 * 1024).count(b"\n")
            reads = peak_bytes(reader.process.pid)
            lines += reader.end().out.count(b"\n")
        assert lines == MESSAGES
        assert peak_bytes(broker.process.pid) - resident < 20 * MIB
        assert reads < 80 * MIB  # the initial value is 50
