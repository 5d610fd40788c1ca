"""The command lines of `qcli bench`: all values as one object."""

import math
import os
from dataclasses import dataclass

from ...framework.params import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The parameters of a command; those that it does not have keep their default."""

    nsqd_tcp_addresses: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    lookupd_allowed_hosts: tuple[str, ...]
    duration_ms: int | None
    form: str
    keep: bool
    topic: str | None = None
    source: Source | None = None
    connections: int | None = None
    size: int = 200
    batch_size: int = 200
    pipeline: int = 1
    count: int | None = None
    backlog: int = 0
    max_in_flight: int = 2500
    rate: float = 0.0
    yes: bool = False

    @property
    def duration_s(self) -> float:
        """The maximum time; infinite if the number of messages is given, and no time."""
        return math.inf if self.duration_ms is None else self.duration_ms / 1000

    @property
    def connections_per_broker(self) -> int:
        """By default one for each processor, as NSQ's bench programs."""
        return self.connections or len(os.sched_getaffinity(0))
