"""What a process of a node knows of the node: its listeners, and where the other processes are."""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from zlib import crc32

from ..server.listening import Listening

ENDED: Final = -1
Kind = Literal["TCP", "HTTP", "HTTPS"]
_KINDS: Final[tuple[Kind, ...]] = ("TCP", "HTTP", "HTTPS")
_READY: Final = len(_KINDS)
_STARTS: Final = _READY + 1
_ROWS: Final = _STARTS + 1
WAITS_S: Final = 0.002
"""A process with fewer clients that is idle accepts within this time, and one that is busy should not get more."""
DRAINING_WAITS_S: Final = 0.02
_NUMBER: Final = struct.Struct("i")


class Counts:
    """What the processes of a node know of each other, in memory that all share: numbers by process.

    Each process writes its own; the supervisor writes those of a process that has ended.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._numbers = memoryview(mmap.mmap(-1, _NUMBER.size * processes * _ROWS)).cast("i")

    def _place(self, row: int, index: int) -> int:
        return row * self._processes + index

    def clients(self, kind: Kind) -> list[int]:
        """The number of clients of each process on a shared port; `ENDED` for one that does not run."""
        start = self._place(_KINDS.index(kind), 0)
        return list(self._numbers[start : start + self._processes])

    def add(self, kind: Kind, index: int, difference: int) -> None:
        """Count clients that came or went."""
        self._numbers[self._place(_KINDS.index(kind), index)] += difference

    def begin(self, index: int) -> None:
        """A process starts: it has no clients."""
        self._set_clients(index, 0)
        self._numbers[self._place(_STARTS, index)] += 1

    def end(self, index: int) -> None:
        """A process has ended."""
        self._set_clients(index, ENDED)
        self._numbers[self._place(_READY, index)] = 0

    def set_ready(self, index: int) -> None:
        """A process accepts clients."""
        self._numbers[self._place(_READY, index)] = 1

    def is_ready(self, index: int) -> bool:
        """Whether a process accepts clients."""
        return bool(self._numbers[self._place(_READY, index)])

    def starts(self, index: int) -> int:
        """How often a process was started."""
        return self._numbers[self._place(_STARTS, index)]

    def _set_clients(self, index: int, number: int) -> None:
        for row in range(len(_KINDS)):
            self._numbers[self._place(row, index)] = number


@dataclass(frozen=True, slots=True)
class Siblings:
    """A process of a node, and the others.

    Attributes:
        index: The number of this process, from 0.
        instance: Identifies this run of the node, as `instance` in `/info` does for a broker.
        shared: The listeners that all processes accept from, by kind.
        own: The listeners of this process alone, by kind.
        internal: The listeners of this process for the others: unix sockets, `TCP` and `HTTP`.
        tcp_addresses, http_addresses: Of each process, for clients.
        tcp_paths, http_paths: Of each process, for the others.
        counts: Who has how many clients.
    """

    index: int
    instance: str
    shared: Mapping[Kind, Listening]
    own: Mapping[str, Listening]
    internal: Mapping[Kind, Listening]
    tcp_addresses: Sequence[str]
    http_addresses: Sequence[str]
    tcp_paths: Sequence[str]
    http_paths: Sequence[str]
    counts: Counts

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self.tcp_paths)

    @property
    def more_ports(self) -> int:
        """The descriptors of a client of each shared port, besides those of a broker alone.

        A consumer is passed on to each process, and each process passes some on to this one.
        """
        return len(self.shared) + 2 * self.count

    def is_ready(self, index: int) -> bool:
        """Whether a process serves clients: it may be starting again."""
        return index == self.index or self.counts.is_ready(index)

    def owner_of(self, producer: str) -> int:
        """Return the process that has the batches of a producer with a name."""
        return crc32(producer.encode()) % self.count

    def from_here(self) -> list[int]:
        """Return the numbers of all processes, this one first."""
        return [(self.index + each) % self.count for each in range(self.count)]

    def waits_s(self, kind: Kind, *, draining: bool) -> float:
        """Return how long this process leaves a new client to the others before it accepts it."""
        if draining:
            return DRAINING_WAITS_S
        numbers = self.counts.clients(kind)
        fewest = min((each for each in numbers if each != ENDED), default=0)
        return WAITS_S if numbers[self.index] > fewest else 0.0
