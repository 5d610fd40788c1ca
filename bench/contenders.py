"""The brokers that are compared, each with its settings, and what can be seen of a broker's process from outside."""

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from interop.peers import Broker, nsqd, qcli_serve

_PROCESS_SCHEDULED = 2
"""CPUCLOCK_SCHED of Linux: the clock of another process, in nanoseconds, is `~pid << 3` with this."""


@dataclass(frozen=True)
class Contender:
    """A broker with its settings.

    Attributes:
        name: In the tables.
        start: Runs it.
        flags: Its settings; of a flag that is there twice the last one counts.
        pace: How much of a workload it can be given, for all to take about as long.
    """

    name: str
    start: Callable[..., AbstractContextManager[Broker]]
    flags: tuple[str, ...] = ()
    pace: float = 1.0

    @property
    def is_nsqd(self) -> bool:
        return self.start is nsqd

    def with_flags(self, *flags: str) -> "Contender":
        """The same with further flags."""
        return replace(self, flags=(*self.flags, *flags))

    @contextmanager
    def running(self, data_path: Path) -> Iterator[Broker]:
        """Run it on an empty folder below `data_path`.

        nsqd is killed in the end: in good order it would first write all that it has in memory to disk.
        """
        with (
            tempfile.TemporaryDirectory(prefix="bench-", dir=data_path) as folder,
            self.start(Path(folder) / "data", *self.flags) as broker,
        ):
            yield broker
            if self.is_nsqd:
                broker.process.kill()
                broker.process.wait()


NSQD = Contender("nsqd", nsqd)
# Room for what is published in some seconds. For every channel it is made at once, and its garbage collector looks
# through all of it: with room for ten times as much, nsqd is up to a third slower.
IN_MEMORY = Contender("nsqd, in memory", nsqd, ("--mem-queue-size=10000000",))
ON_DISK = Contender("nsqd, on disk", nsqd, ("--mem-queue-size=0",), pace=0.2)
SYNCED = Contender("nsqd, every message synced", nsqd, ("--mem-queue-size=0", "--sync-every=1"), pace=0.002)
INTERVAL = Contender("ours, --sync=interval", qcli_serve, ("--sync=interval",))
EVERY_OK = Contender("ours, every OK synced", qcli_serve)


def memory_mib(broker: Broker) -> float:
    """What a broker's process has in memory (resident)."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{broker.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def cpu_s(broker: Broker) -> float:
    """Return the processor time that a broker has used, in seconds, from the kernel: of all its threads."""
    return time.clock_gettime(~broker.process.pid << 3 | _PROCESS_SCHEDULED)
