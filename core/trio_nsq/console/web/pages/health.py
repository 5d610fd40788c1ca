"""The health of brokers and discovery services: disks, memory, registrations, and what is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from ....fleet.snapshot import Snapshot
from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.health import LEAST_FREE_SHARE, BrokerHealth, ask_memory, health_of
from ..page import Page, Table, View

_COLUMNS = (
    "kind",
    "name",
    "broker",
    "ok",
    "problems",
    "disk_total_bytes",
    "disk_free_bytes",
    "logs_bytes",
    "memory_bytes",
    "started_at_s",
    "version",
    "answer_ms",
)


async def health(request: Request) -> View:
    """All brokers and discovery services."""
    viewer, console = viewer_of(request), console_of(request)
    snapshot = snapshot_of(request)
    memory = await console.shared.once(
        "memory", snapshot.version, partial(ask_memory, console.upstream, snapshot)
    )
    details = viewer.allows("read")
    brokers = health_of(snapshot, memory.values, details=details)
    unavailable = [
        (broker.state.address, topic, reason)
        for broker in brokers
        for topic, reason in broker.unavailable.items()
        if viewer.sees(topic)
    ]
    return View(
        "health.html",
        {
            "brokers": brokers,
            "problems": sum(bool(broker.problems) for broker in brokers)
            + sum(bool(lookupd.error) for lookupd in snapshot.lookupds.values()),
            "unavailable": unavailable,
            "least_free": LEAST_FREE_SHARE,
            "details": details,
        },
        table=Table("health", _COLUMNS, _records(snapshot, brokers, unavailable)),
    )


def _records(
    snapshot: Snapshot, brokers: Sequence[BrokerHealth], unavailable: Sequence[tuple[str, str, str]]
) -> Iterator[Mapping[str, Any]]:
    """Yield a record for each broker, discovery service and unavailable topic."""
    for each in sorted(brokers, key=lambda each: each.state.address):
        state, disk = each.state, each.disk
        yield {
            "kind": "broker",
            "name": state.address,
            "ok": not each.problems,
            "problems": " ".join(each.problems),
            "disk_total_bytes": None if disk is None else disk.total_bytes,
            "disk_free_bytes": None if disk is None else disk.free_bytes,
            "logs_bytes": None if disk is None else disk.used_bytes,
            "memory_bytes": each.memory_bytes,
            "started_at_s": state.start_time_s if state.reachable else None,
            "version": state.version or None,
            "answer_ms": round(state.latency_s * 1000) if state.reachable else None,
        }
    for lookupd in snapshot.lookupds.values():
        problem = f"It does not answer: {lookupd.error}." if lookupd.error else ""
        yield {
            "kind": "lookupd",
            "name": lookupd.address,
            "ok": not problem,
            "problems": problem,
            "version": lookupd.version or None,
        }
    for broker, topic, reason in unavailable:
        yield {"kind": "topic", "name": topic, "broker": broker, "ok": False, "problems": reason}


PAGES = [Page("/health", "health", health, live=True)]
