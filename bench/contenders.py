"""The compared brokers with their settings, and the memory and processor time of a broker's process."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from interop.peers import Broker, nsqd, qcli_serve

_PROCESS_SCHEDULED = 2
"""CPUCLOCK_SCHED of Linux: the clock of another process, in nanoseconds, is `~pid << 3` with this."""


@dataclass(frozen=True)
class Contender:
    """A broker with its settings.

    Attributes:
        name: The name in the tables.
        start: Starts the broker.
        flags: The settings; if a flag is repeated, the last one counts.
        pace: The fraction of a workload for this broker, so that all brokers take about the same time.
    """

    name: str
    start: Callable[..., AbstractContextManager[Broker]]
    flags: tuple[str, ...] = ()
    pace: float = 1.0

    @property
    def is_nsqd(self) -> bool:
        return self.start is nsqd

    def with_flags(self, *flags: str) -> "Contender":
        """Return the broker with additional flags."""
        return replace(self, flags=(*self.flags, *flags))

    @contextmanager
    def running(self, data_path: Path, prepare: Callable[[Broker], None] | None = None) -> Iterator[Broker]:
        """Run the broker on an empty folder below `data_path`.

        nsqd is killed at the end: on SIGTERM it would first write all its messages to disk.

        Args:
            data_path: The parent of the folder.
            prepare: Is called with a first run of the broker on the folder; the second run is the measured one.
        """
        with tempfile.TemporaryDirectory(prefix="bench-", dir=data_path) as folder:
            data = Path(folder) / "data"
            if prepare is not None:
                with self.start(data, *self.flags) as broker:
                    prepare(broker)
            with self.start(data, *self.flags) as broker:
                yield broker
                if self.is_nsqd:
                    broker.process.kill()
                    broker.process.wait()


NSQD = Contender("nsqd", nsqd)
# Enough for the messages of a few seconds. nsqd allocates this queue for every channel at once, and its garbage
# collector scans all of it: with a ten times larger queue, nsqd is up to a third slower.
IN_MEMORY = Contender("nsqd, in memory", nsqd, ("--mem-queue-size=10000000",))
ON_DISK = Contender("nsqd, on disk", nsqd, ("--mem-queue-size=0",), pace=0.2)
SYNCED = Contender("nsqd, every message synced", nsqd, ("--mem-queue-size=0", "--sync-every=1"), pace=0.002)
INTERVAL = Contender("ours, --sync=interval", qcli_serve, ("--sync=interval",))
EVERY_OK = Contender("ours, every OK synced", qcli_serve)


def memory_mib(broker: Broker) -> float:
    """Return the resident memory of a broker's process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{broker.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def process_memory_mib(pid: int) -> float:
    """Return the memory of a process and its children. What they share counts once."""
    found = 0.0
    with suppress(OSError):  # the child has ended
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = sum(map(int, re.findall(r"^Pss:\s+(\d+) kB", told, re.MULTILINE))) / 1024
        found += sum(map(process_memory_mib, _children(pid)))
    return found


def _children(pid: int) -> Iterator[int]:
    """Yield the running children of all threads of a process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            yield from map(int, (task / "children").read_text().split())


def cpu_s(broker: Broker) -> float:
    """Return the processor time of a broker in seconds: all threads and child processes, also those that have ended."""
    return process_cpu_s(broker.process.pid)


def process_cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds: all threads and children, also those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ended_s = (int(fields[13]) + int(fields[14])) / os.sysconf(
        "SC_CLK_TCK"
    )  # children that it has waited for
    running_s = 0.0
    for child in _children(pid):
        with suppress(OSError):  # it has ended
            running_s += process_cpu_s(child)
    return time.clock_gettime(~pid << 3 | _PROCESS_SCHEDULED) + ended_s + running_s
