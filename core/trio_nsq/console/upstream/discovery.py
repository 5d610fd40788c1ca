"""Asks discovery services which brokers there are."""

from collections.abc import Iterable, Sequence

from ...lookup.answers import Node, ProducerAddress, parse_lookup, parse_nodes
from .client import Results, Upstream, UpstreamError

_MAX_LISTED = 1000
"""Brokers that are taken from one service: any client may register some."""


async def ask_nodes(upstream: Upstream, lookupds: Iterable[str]) -> Results[list[Node]]:
    """Return the brokers that each discovery service lists."""

    async def ask(address: str) -> list[Node]:
        answer = await upstream.request("GET", address, "/nodes")
        try:
            return list(parse_nodes(answer.body))[:_MAX_LISTED]
        except ValueError as exc:
            raise _invalid(address, exc) from exc

    return await upstream.on_all(lookupds, ask)


async def ask_lookup(
    upstream: Upstream, lookupds: Iterable[str], topic: str
) -> Results[list[ProducerAddress]]:
    """Return the brokers that each discovery service lists for a topic; a service may not know the topic."""

    async def ask(address: str) -> list[ProducerAddress]:
        answer = await upstream.request("GET", address, "/lookup", {"topic": topic})
        try:
            return list(parse_lookup(answer.body))[:_MAX_LISTED]
        except ValueError as exc:
            raise _invalid(address, exc) from exc

    return await upstream.on_all(lookupds, ask)


async def ask_names(
    upstream: Upstream, lookupds: Iterable[str], path: str, params: dict[str, str], key: str
) -> Results[Sequence[str]]:
    """Return the names in the answers to `/topics` or `/channels`."""

    async def ask(address: str) -> Sequence[str]:
        answer = await upstream.json("GET", address, path, params)
        found = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(found, list | None) or not all(isinstance(name, str) for name in found or ()):
            raise _invalid(address, ValueError(f"it has no {key}"))
        return found or ()

    return await upstream.on_all(lookupds, ask)


def _invalid(address: str, exc: ValueError) -> UpstreamError:
    return UpstreamError(address, f"its answer is not valid: {exc}")
