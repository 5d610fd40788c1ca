"""Asks discovery services which brokers there are."""

from collections.abc import Iterable, Mapping
from functools import partial

from ...lookup.answers import Node, ProducerAddress, parse_lookup, parse_nodes
from ...protocol.go_json import decode_object
from .client import Results, Upstream, UpstreamError

MAX_LISTED = 1000
"""Brokers that are taken from one service: any client may register some."""
_MAX_NAMES = 100_000


async def nodes_at(upstream: Upstream, lookupd: str) -> list[Node]:
    """Return the brokers that a discovery service lists. Raises UpstreamError."""
    answer = await upstream.request("GET", lookupd, "/nodes")
    try:
        return list(parse_nodes(answer.body))[:MAX_LISTED]
    except ValueError as exc:
        raise _invalid(lookupd, exc) from exc


async def ask_nodes(upstream: Upstream, lookupds: Iterable[str]) -> Results[list[Node]]:
    """Return the brokers that each discovery service lists."""
    return await upstream.on_all(lookupds, partial(nodes_at, upstream))


async def ask_lookup(
    upstream: Upstream, lookupds: Iterable[str], topic: str
) -> Results[list[ProducerAddress]]:
    """Return the brokers that each discovery service lists for a topic; a service may not know the topic."""

    async def ask(address: str) -> list[ProducerAddress]:
        answer = await upstream.request("GET", address, "/lookup", {"topic": topic})
        try:
            return list(parse_lookup(answer.body))[:MAX_LISTED]
        except ValueError as exc:
            raise _invalid(address, exc) from exc

    return await upstream.on_all(lookupds, ask)


async def names_at(
    upstream: Upstream, lookupd: str, path: str, params: Mapping[str, str], key: str
) -> list[str]:
    """Return the names in an answer to `/topics` or `/channels`. Raises UpstreamError."""
    answer = await upstream.request("GET", lookupd, path, params)
    try:
        found = decode_object(answer.body)
        if found.integer("status_code"):  # services before 1.0
            found = found.object("data")
        return [name for name in found.texts(key)[:_MAX_NAMES] if 0 < len(name) <= 64]
    except ValueError as exc:
        raise _invalid(lookupd, exc) from exc


async def ask_names(
    upstream: Upstream, lookupds: Iterable[str], path: str, params: Mapping[str, str], key: str
) -> Results[list[str]]:
    """Return the names in the answers of discovery services to `/topics` or `/channels`."""

    async def ask(lookupd: str) -> list[str]:
        return await names_at(upstream, lookupd, path, params, key)

    return await upstream.on_all(lookupds, ask)


def _invalid(address: str, exc: ValueError) -> UpstreamError:
    return UpstreamError(address, f"its answer is not valid: {exc}")
