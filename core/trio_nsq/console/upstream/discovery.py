"""Asks discovery services which brokers there are."""

from collections.abc import Iterable, Sequence

from ...api import lookupd
from ...api.lookupd import Node, ProducerAddress
from ...api.request import Request
from .client import Results, Upstream

MAX_LISTED = 1000
"""Brokers that are taken from one service: any client may register some."""
_MAX_NAMES = 100_000


async def ask_nodes(upstream: Upstream, lookupds: Iterable[str]) -> Results[list[Node]]:
    """Return the brokers that each discovery service lists."""
    return (await upstream.ask_all(lookupds, lookupd.nodes())).map(lambda _, found: found[:MAX_LISTED])


async def ask_lookup(
    upstream: Upstream, lookupds: Iterable[str], topic: str
) -> Results[list[ProducerAddress]]:
    """Return the brokers that each discovery service lists for a topic; a service may not know the topic."""
    return (await upstream.ask_all(lookupds, lookupd.lookup(topic))).map(lambda _, found: found[:MAX_LISTED])


async def ask_names(
    upstream: Upstream, lookupds: Iterable[str], request: Request[list[str]]
) -> Results[list[str]]:
    """Return the names that each discovery service answers to `lookupd.topics` or `lookupd.channels`."""
    return (await upstream.ask_all(lookupds, request)).map(lambda _, names: usable(names))


def usable(names: Sequence[str]) -> list[str]:
    """Return the names that topics and channels can have, up to a limit."""
    return [name for name in names[:_MAX_NAMES] if 0 < len(name) <= 64]
