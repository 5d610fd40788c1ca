"""The health of brokers and discovery services: disks, memory, registrations, and what is wrong."""

from functools import partial

from starlette.requests import Request

from ...access.viewer import viewer_of
from ...console import console_of, snapshot_of
from ...fleet.health import LEAST_FREE_SHARE, ask_memory, health_of
from ..page import Page, View


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
    )


PAGES = [Page("/health", "health", health, live=True)]
