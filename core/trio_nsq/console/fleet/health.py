"""The health of each broker and discovery service, and what is wrong with them. Pure, except for `ask_memory`.

The checks are those of `qcli nodes --check`, without its limits that a person chooses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..upstream.client import Results, Upstream
from .snapshot import BrokerState, Snapshot
from .stats import number

TIMEOUT_S = 1.0
LEAST_FREE_SHARE = 0.1
"""With less of its disk free, a broker is reported."""
_MAX_UNAVAILABLE = 100
_NO_TOPIC = "-"
"""A topic that no broker has, so that the answer has no topics."""
_MEMORY = {"format": "json", "topic": _NO_TOPIC, "channel": _NO_TOPIC, "include_clients": "false"}


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a broker's data folder.

    Attributes:
        used_bytes: The logs of all topics.
        others_bytes: Everything else on the disk.
    """

    used_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def others_bytes(self) -> int:
        """Everything on the disk that is not in the broker's logs."""
        return max(0, self.total_bytes - self.free_bytes - self.used_bytes)

    @property
    def free_share(self) -> float:
        """The free share, 0 to 1."""
        return self.free_bytes / self.total_bytes


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """The health of a broker.

    Attributes:
        problems: What is wrong, in words; empty: nothing.
        disk: None: unknown, as on nsqd.
        memory_bytes: Of its process; None: unknown.
        unavailable: Topics whose files cannot be used, with the reasons.
    """

    state: BrokerState
    problems: tuple[str, ...]
    disk: Disk | None
    memory_bytes: int | None
    unavailable: Mapping[str, str]


async def ask_memory(upstream: Upstream, snapshot: Snapshot) -> Results[int | None]:
    """Ask the brokers that answer for the memory of their processes, in bytes; None: unknown."""

    async def ask(address: str) -> int | None:
        stats = await upstream.json("GET", address, "/stats", _MEMORY, timeout_s=TIMEOUT_S)
        memory = stats.get("memory") if isinstance(stats, dict) else None
        return number(memory, "heap_in_use_bytes") or None if isinstance(memory, dict) else None

    return await upstream.on_all(snapshot.reachable, ask)


def health_of(
    snapshot: Snapshot, memory: Mapping[str, int | None], *, details: bool = True
) -> list[BrokerHealth]:
    """Return the health of each broker, those with problems first.

    Args:
        memory: By address.
        details: Tell disks and reasons, which can name topics and paths. Brokers tell them to those that may read all.
    """
    answering = [address for address, lookupd in snapshot.lookupds.items() if not lookupd.error]
    found = [
        _of_broker(broker, answering, memory.get(broker.address), details)
        for broker in snapshot.brokers.values()
    ]
    return sorted(found, key=lambda each: not each.problems)


def _of_broker(
    broker: BrokerState, lookupds: list[str], memory_bytes: int | None, details: bool
) -> BrokerHealth:
    disk = _disk(broker.stats.get("disk")) if details else None
    reasons = {
        name: topic.queue.unavailable for name, topic in broker.topics.items() if topic.queue.unavailable
    }
    unavailable = dict(sorted(reasons.items())[:_MAX_UNAVAILABLE])
    return BrokerHealth(
        broker, tuple(_problems(broker, lookupds, disk, details)), disk, memory_bytes, unavailable
    )


def _problems(broker: BrokerState, lookupds: list[str], disk: Disk | None, details: bool) -> Iterator[str]:
    if not broker.reachable:
        yield f"It does not answer: {broker.error or 'it was not asked yet'}."
        return
    if broker.health != "OK":
        yield f"It reports: {broker.health.removeprefix('NOK - ')}." if details else "It reports a problem."
    missing = [address for address in lookupds if address not in broker.registrations]
    if missing and not broker.draining:
        yield f"It is not registered with {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}."
    if disk is not None and disk.free_share < LEAST_FREE_SHARE:
        yield f"Its disk is almost full: {disk.free_share:.1%} is free."


def _disk(raw: Any) -> Disk | None:
    if not isinstance(raw, dict):
        return None
    total = number(raw, "total_bytes")
    if not total or raw.get("free_bytes") is None:
        return None
    return Disk(number(raw, "used_bytes"), min(number(raw, "free_bytes"), total), total)
