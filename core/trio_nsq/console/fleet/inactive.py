"""Topics that discovery services know and no broker has: brokers that had them are gone, or they were created early."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...protocol.go_json import decode_object
from ..upstream.client import Upstream, UpstreamError
from .snapshot import Snapshot

_MAX_NAMES = 100_000


@dataclass(frozen=True, slots=True)
class Registered:
    """The topics without a broker, sorted, and why some services did not tell theirs."""

    topics: Sequence[str] = ()
    errors: Mapping[str, str] = field(default_factory=dict)


async def find_inactive(upstream: Upstream, lookupds: Iterable[str], snapshot: Snapshot) -> Registered:
    """Ask the services for topics that neither a broker of the snapshot has, nor one that is registered."""

    async def topics(address: str) -> list[str]:
        return _names((await upstream.request("GET", address, "/topics")).body, address, "topics")

    results = await upstream.on_all(lookupds, topics)
    known = {name for broker in snapshot.brokers.values() for name in broker.topics}
    known |= {topic for each in snapshot.lookupds.values() for node in each.nodes for topic in node.topics}
    found = {topic for names in results.values.values() for topic in names} - known
    return Registered(sorted(found), {address: error.reason for address, error in results.errors.items()})


async def find_channels(
    upstream: Upstream, lookupds: Iterable[str], topics: Iterable[str]
) -> dict[str, list[str]]:
    """Return the channels of topics at the services. Those that do not answer are left out."""
    found: dict[str, set[str]] = {topic: set() for topic in topics}

    async def ask(address: str) -> None:
        for topic, channels in found.items():
            answer = await upstream.request("GET", address, "/channels", {"topic": topic})
            channels.update(_names(answer.body, address, "channels"))

    await upstream.on_all(lookupds, ask)
    return {topic: sorted(channels) for topic, channels in found.items()}


def _names(body: bytes, address: str, key: str) -> list[str]:
    try:
        found = decode_object(body)
        if found.integer("status_code"):  # services before 1.0
            found = found.object("data")
        return [name for name in found.texts(key)[:_MAX_NAMES] if 0 < len(name) <= 64]
    except ValueError as exc:
        raise UpstreamError(address, f"its answer is not valid: {exc}") from None
