"""The rows of tables of topics and channels: figures summed once per snapshot, for all viewers. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ...fleet.snapshot import Snapshot, TopicState
from ...fleet.stats import Queue


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic, and the sums over its channels.

    Attributes:
        depth: Messages that wait in the topic and in all its channels.
        in_rate, out_rate: Messages per second; None: unknown.
        oldest_age_ms: The highest of all channels; None: unknown, as on nsqd.
        idle_channels: Channels with messages and without a consumer.
    """

    name: str
    depth: int
    in_flight: int
    deferred: int
    in_rate: float | None
    out_rate: float | None
    oldest_age_ms: int | None
    messages: int
    channels: int
    clients: int
    idle_channels: int
    brokers: int
    paused: bool
    unavailable: str


@dataclass(frozen=True, slots=True)
class FleetSums:
    """The sums over all topics. Rates are None if they are unknown for each."""

    depth: int
    in_flight: int
    deferred: int
    in_rate: float | None
    out_rate: float | None
    oldest_age_ms: int | None
    messages: int
    topics: int
    channels: int
    clients: int


class Rows:
    """The rows of the newest snapshot. One for a console."""

    def __init__(self) -> None:
        self._version = -1
        self._topics: list[TopicRow] = []

    def topics(self, snapshot: Snapshot) -> list[TopicRow]:
        """Return a row for each topic, sorted by name. Treat the list as immutable."""
        if snapshot.version != self._version:
            self._topics = [row_of(topic) for topic in snapshot.topics.values()]
            self._version = snapshot.version
        return self._topics


def row_of(topic: TopicState) -> TopicRow:
    channels = (channel.sum for channel in topic.channels.values())
    return topic_row(topic.name, topic.sum, channels, len(topic.channels), len(topic.parts))


def topic_row(name: str, topic: Queue, queues: Iterable[Queue], channels: int, brokers: int = 1) -> TopicRow:
    in_flight, depth, deferred = 0, topic.depth, topic.deferred
    out_rate, oldest_age_ms = None, None
    clients = idle = 0
    for queue in queues:
        in_flight += queue.in_flight
        depth += queue.depth
        deferred += queue.deferred
        clients += queue.clients
        idle += bool(queue.depth and not queue.clients)
        if queue.out_rate is not None:
            out_rate = (out_rate or 0.0) + queue.out_rate
        if queue.oldest_age_ms is not None:
            oldest_age_ms = max(oldest_age_ms or 0, queue.oldest_age_ms)
    return TopicRow(
        name,
        depth,
        in_flight,
        deferred,
        topic.in_rate,
        out_rate,
        oldest_age_ms,
        topic.messages,
        channels,
        clients,
        idle,
        brokers,
        topic.paused,
        topic.unavailable,
    )


def sum_up(rows: Iterable[TopicRow]) -> FleetSums:
    found = list(rows)
    into = [row.in_rate for row in found if row.in_rate is not None]
    out = [row.out_rate for row in found if row.out_rate is not None]
    ages = [row.oldest_age_ms for row in found if row.oldest_age_ms is not None]
    return FleetSums(
        sum(row.depth for row in found),
        sum(row.in_flight for row in found),
        sum(row.deferred for row in found),
        math.fsum(into) if into else None,
        math.fsum(out) if out else None,
        max(ages, default=None),
        sum(row.messages for row in found),
        len(found),
        sum(row.channels for row in found),
        sum(row.clients for row in found),
    )
