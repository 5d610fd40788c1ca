"""Topics that discovery services know and no broker has: brokers that had them are gone, or they were created early."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...api import lookupd
from ...fleet.snapshot import Snapshot
from ..upstream.client import Upstream
from ..upstream.discovery import ask_names, usable


@dataclass(frozen=True, slots=True)
class Registered:
    """The topics without a broker, sorted, and why some services did not tell theirs."""

    topics: Sequence[str] = ()
    errors: Mapping[str, str] = field(default_factory=dict)


async def find_inactive(upstream: Upstream, lookupds: Iterable[str], snapshot: Snapshot) -> Registered:
    """Ask the services for topics that neither a broker of the snapshot has, nor one that is registered."""
    results = await ask_names(upstream, lookupds, lookupd.topics())
    known = {name for broker in snapshot.brokers.values() for name in broker.topics}
    known |= {topic for each in snapshot.lookupds.values() for node in each.nodes for topic in node.topics}
    found = {topic for names in results.values.values() for topic in names} - known
    return Registered(sorted(found), {error.address: error.reason for error in results.errors.values()})


async def find_channels(
    upstream: Upstream, lookupds: Iterable[str], topics: Iterable[str]
) -> dict[str, list[str]]:
    """Return the channels of topics at the services. Those that do not answer are left out."""
    found: dict[str, set[str]] = {topic: set() for topic in topics}

    async def ask(address: str) -> None:
        for topic, channels in found.items():
            channels.update(usable(await upstream.ask(address, lookupd.channels(topic))))

    await upstream.on_all(lookupds, ask)
    return {topic: sorted(channels) for topic, channels in found.items()}
