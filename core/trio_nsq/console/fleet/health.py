"""The health of each broker and discovery service, and what is wrong with them. Pure, except for `ask_memory`.

The checks are those of `qcli nodes --check`, without its limits that a person chooses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...api.broker import unchecked_stats
from ...fleet.snapshot import BrokerState, Disk, Snapshot
from ...fleet.stats import number, text
from ...text.wording import count_of
from ..upstream.client import Results, Upstream

TIMEOUT_S = 1.0
LEAST_FREE_SHARE = 0.1
"""With less of its disk free, a broker is reported."""
_MAX_UNAVAILABLE = 100
_NO_TOPIC = "-"
"""A topic that no broker has, so that the answer has no topics."""
_MEMORY = unchecked_stats(_NO_TOPIC, _NO_TOPIC, memory=True)


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

    def show(_address: str, stats: Mapping[str, Any]) -> int | None:
        memory = stats.get("memory")
        return number(memory, "heap_in_use_bytes") or None if isinstance(memory, dict) else None

    return (await upstream.ask_all(snapshot.reachable, _MEMORY, timeout_s=TIMEOUT_S)).map(show)


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
    disk = broker.disk if details else None
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
    if missing := broker.missing_at(lookupds):
        yield f"It is not registered with {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}."
    members = broker.stats.get("cluster")
    if isinstance(members, dict) and (in_sync := number(members, "in_sync")) < (
        all_ := number(members, "members")
    ):
        yield f"Of its cluster {text(members, 'name')}, {in_sync} of {count_of(all_, 'member')} are in sync."
    if (archive := broker.archive) is not None and archive.problem:
        yield f"I{archive.problem[1:]}." if details else "Its archive is late."
    if disk is not None and disk.free_share < LEAST_FREE_SHARE:
        yield f"Its disk is almost full: {disk.free_share:.1%} is free."
