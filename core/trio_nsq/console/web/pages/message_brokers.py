"""Which brokers pages about messages ask."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from ....fleet.snapshot import Snapshot
from ...console import console_of, snapshot_of, take_snapshot, upstream_of
from ...messages.reading import TopicLog
from ...upstream.client import UpstreamError
from ..page import NotFound
from .topic import missing


@dataclass(frozen=True, slots=True)
class TopicBrokers:
    """The brokers of a topic or channel.

    Attributes:
        ours: Those that can read messages, by HTTP address.
        nsqds: Those that cannot: NSQ's own.
        draining: Those of both that refuse publishes.
        errors: Why others are not asked.
        selected: The one that the viewer selected; empty: all.
    """

    ours: list[str] = field(default_factory=list)
    nsqds: list[str] = field(default_factory=list)
    draining: list[str] = field(default_factory=list)
    errors: Mapping[str, str] = field(default_factory=dict)
    selected: str = ""

    @property
    def publishable(self) -> list[str]:
        """All of them, and last those that refuse publishes."""
        return sorted([*self.ours, *self.nsqds], key=self.draining.__contains__)

    @property
    def asked(self) -> list[str]:
        """Those that are asked now."""
        return [address for address in self.ours if self.selected in ("", address)]

    @property
    def missing(self) -> Mapping[str, str]:
        """Why those are not asked that should be: `errors` without the brokers that the viewer left out."""
        return {address: why for address, why in self.errors.items() if self.selected in ("", address)}


async def brokers_of(request: Request, topic: str, channel: str = "", selected: str = "") -> TopicBrokers:
    """Return the brokers of a topic, or of a channel of it. Raises NotFound."""
    found = _brokers_of(snapshot_of(request), topic, channel, selected)
    if not found.ours and not found.nsqds:  # it may be new
        await console_of(request).watcher.refresh()
        found = _brokers_of(take_snapshot(request), topic, channel, selected)
    if not found.ours and not found.nsqds and not found.errors:
        raise missing(request, topic, channel)
    if selected and selected not in (*found.ours, *found.nsqds, *found.errors):
        raise NotFound(f"Topic {topic} is not on a broker {selected}.")
    return found


def _brokers_of(snapshot: Snapshot, topic: str, channel: str, selected: str) -> TopicBrokers:
    ours: list[str] = []
    nsqds: list[str] = []
    draining: list[str] = []
    errors: dict[str, str] = {}
    for address, broker in snapshot.brokers.items():
        if not broker.reachable:
            errors[address] = broker.error or "not asked yet"
            continue
        stats = broker.topics.get(topic)
        if stats is None or (channel and channel not in stats.channels):
            continue
        (nsqds if broker.is_nsqd else ours).append(address)
        if broker.draining:
            draining.append(address)
    return TopicBrokers(ours, nsqds, draining, errors, selected)


async def log_of(request: Request, topic: str) -> tuple[TopicLog, TopicBrokers]:
    """Return the log that a request names, and the topic's brokers. Raises NotFound."""
    address = request.query_params.get("broker", "")
    brokers = await brokers_of(request, topic, selected=address)
    if not address and len(brokers.ours) == 1:
        address = brokers.ours[0]
    if address in brokers.errors:
        raise UpstreamError(address, brokers.errors[address])
    if address not in brokers.ours:
        raise NotFound(
            f"{address} is an nsqd: it keeps no log, so it cannot show messages."
            if address in brokers.nsqds
            else f"Topic {topic} is on several brokers: the address of the page must name one, as ?broker=HOST:PORT."
        )
    return TopicLog(upstream_of(request), address, topic), brokers


def is_sequence(text: str) -> bool:
    """Whether a text is a sequence that a log can have."""
    return text.isascii() and text.isdigit() and len(text) < 19
