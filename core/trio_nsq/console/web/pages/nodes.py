"""The brokers and discovery services, and the page of a broker."""

from dataclasses import dataclass, replace

from starlette.requests import Request

from ....fleet.snapshot import BrokerState, Snapshot
from ...access.viewer import Viewer, viewer_of
from ...console import snapshot_of
from ...fleet.clusters import cluster_name
from ...fleet.rows import TopicRow, topic_row
from ..listing import Column, listing
from ..page import NotFound, Page, View
from .topics import COLUMNS


@dataclass(frozen=True, slots=True)
class BrokerRow:
    """A broker. `out_of_date`: it has an older version than another broker of its kind."""

    state: BrokerState
    out_of_date: bool
    tombstones: tuple[str, ...]

    @property
    def cluster(self) -> str:
        """The cluster that it is a member of; empty: none."""
        return cluster_name(self.state)

    @property
    def in_rate(self) -> float | None:
        """Messages published per second, on all topics."""
        rates = [each.queue.in_rate for each in self.state.topics.values() if each.queue.in_rate is not None]
        return sum(rates) if rates and self.state.reachable else None

    @property
    def depth(self) -> int:
        """Messages that wait, in topics and channels."""
        topics = self.state.topics.values()
        return sum(each.queue.depth + sum(queue.depth for queue in each.channels.values()) for each in topics)


_BROKERS: dict[str, Column[BrokerRow]] = {
    "name": Column(lambda row: row.state.address, descending=False),
    "version": Column(lambda row: row.state.version, descending=False),
    "topics": Column(lambda row: len(row.state.topics)),
    "depth": Column(lambda row: row.depth),
    "in": Column(lambda row: row.in_rate),
    "latency": Column(lambda row: row.state.latency_s),
    "started": Column(lambda row: row.state.start_time_s or None),
}
_TOPICS: dict[str, Column[TopicRow]] = {**COLUMNS, "clients": Column(lambda row: row.clients)}


def broker_rows(snapshot: Snapshot, viewer: Viewer) -> list[BrokerRow]:
    """Return a row for each broker, with the topics that the viewer sees."""
    newest: dict[bool, tuple[int, ...]] = {}
    for broker in snapshot.brokers.values():
        newest[broker.is_nsqd] = max(newest.get(broker.is_nsqd, ()), _version(broker.version))
    return [
        BrokerRow(
            _visible(broker, viewer),
            bool(broker.version) and _version(broker.version) < newest[broker.is_nsqd],
            tuple(
                sorted(
                    {
                        topic
                        for node in broker.registrations.values()
                        for topic in node.tombstones
                        if viewer.sees(topic)
                    }
                )
            ),
        )
        for broker in snapshot.brokers.values()
    ]


def _visible(broker: BrokerState, viewer: Viewer) -> BrokerState:
    """Return what a viewer may know of a broker: the reason of its health can name any topic, and a path."""
    if viewer.allows("read"):
        return broker
    topics = {name: topic for name, topic in broker.topics.items() if viewer.sees(name)}
    stats = {**broker.stats, "health": broker.health.partition(" - ")[0]}
    return replace(broker, topics=topics, stats=stats)


async def nodes(request: Request) -> View:
    """All brokers and discovery services."""
    snapshot = snapshot_of(request)
    brokers = listing(
        request,
        "nodes",
        broker_rows(snapshot, viewer_of(request)),
        _BROKERS,
        name=lambda row: f"{row.state.address} {row.state.hostname}",
        default="name",
    )
    return View("nodes.html", {"listing": brokers})


async def node(request: Request) -> View:
    """One broker, by its HTTP address; also by the address under which it is registered, as in nsqadmin."""
    viewer, name = viewer_of(request), request.path_params["node"]
    row = next(
        (row for row in broker_rows(snapshot_of(request), viewer) if _is_called(row.state, name)), None
    )
    if row is None:
        raise NotFound(f"There is no broker {name}. It may have left the fleet.")
    state = row.state
    topics = [
        topic_row(name, topic.queue, topic.channels.values(), len(topic.channels))
        for name, topic in state.topics.items()
        if viewer.sees(name)
    ]
    return View(
        "node.html",
        {
            "row": row,
            "state": state,
            "clients": sum(
                queue.clients for topic in state.topics.values() for queue in topic.channels.values()
            ),
            "messages": sum(topic.queue.messages for topic in state.topics.values()),
            "listing": listing(request, "node", topics, _TOPICS, name=lambda each: each.name, default="name"),
        },
    )


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: `1.2.0-alpha` is (1, 2, 0)."""
    numbers = []
    for part in text.split("-")[0].split(".")[:4]:
        if not (part.isascii() and part.isdigit() and len(part) < 9):
            break
        numbers.append(int(part))
    return tuple(numbers)


def _is_called(broker: BrokerState, name: str) -> bool:
    return broker.address == name or any(node.http_address == name for node in broker.registrations.values())


PAGES = [
    Page("/nodes", "nodes", nodes, live=True),
    Page("/nodes/{node}", "node", node, live=True),
]
