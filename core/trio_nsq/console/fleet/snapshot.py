"""The state of a fleet at one time, summed over all brokers. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...lookup.answers import Node
from .stats import Queue, TopicStats, number, text, total


@dataclass(frozen=True, slots=True)
class LookupdState:
    """A discovery service.

    Attributes:
        error: Why it does not answer; empty if it does.
        nodes: The brokers that are registered there.
    """

    address: str
    error: str = ""
    version: str = ""
    nodes: Sequence[Node] = ()


@dataclass(frozen=True, slots=True)
class BrokerState:
    """A broker. What it told last is kept while it does not answer, but counts in no sum.

    Attributes:
        address: Its HTTP address, by which requests reach it.
        configured: Whether its address was given; otherwise a discovery service lists it.
        error: Why it does not answer; empty if it does.
        is_nsqd: Whether it is NSQ's own broker, which can neither read, seek, nor the like.
        answered_at_s: Unix seconds of the last answer; 0: never.
        latency_s: The duration of the last answered poll.
        info, stats: Its last answers to `/info` and `/stats`, untrusted; empty without one. `stats` lacks its topics.
        topics: By name.
        registrations: By the address of each service where it is registered.
    """

    address: str
    configured: bool = True
    error: str = ""
    is_nsqd: bool = False
    answered_at_s: float = 0.0
    latency_s: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    topics: Mapping[str, TopicStats] = field(default_factory=dict)
    registrations: Mapping[str, Node] = field(default_factory=dict)

    @property
    def reachable(self) -> bool:
        """Whether it answered the last poll."""
        return not self.error and self.answered_at_s > 0

    @property
    def version(self) -> str:
        """Its version; empty if unknown."""
        return text(self.info, "version") or text(self.stats, "version")

    @property
    def hostname(self) -> str:
        """The name of its machine; empty if unknown."""
        return text(self.info, "hostname")

    @property
    def health(self) -> str:
        """`OK`, or the reason why it is not healthy."""
        return text(self.stats, "health") or "OK"

    @property
    def draining(self) -> bool:
        """Whether it refuses publishes until it is empty."""
        return self.info.get("draining") is True or self.stats.get("draining") is True

    @property
    def start_time_s(self) -> int:
        """Unix seconds; 0 if unknown."""
        return number(self.stats, "start_time")


@dataclass(frozen=True, slots=True)
class ChannelState:
    """A channel: the sum, and the parts by broker."""

    name: str
    sum: Queue
    parts: Mapping[str, Queue]


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic: the sum, the parts by broker, and its channels by name, sorted."""

    name: str
    sum: Queue
    parts: Mapping[str, Queue]
    channels: Mapping[str, ChannelState]

    @property
    def depth(self) -> int:
        """Messages that wait in the topic and in all its channels: each copy counts."""
        return self.sum.depth + sum(channel.sum.depth for channel in self.channels.values())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one time.

    Attributes:
        version: Grows with each snapshot; 0: no server was asked yet.
        taken_at_s: Unix seconds.
        brokers: By address: first those that were given, in their order.
        topics: By name, sorted; brokers that do not answer are left out.
    """

    version: int = 0
    taken_at_s: float = 0.0
    brokers: Mapping[str, BrokerState] = field(default_factory=dict)
    lookupds: Mapping[str, LookupdState] = field(default_factory=dict)
    topics: Mapping[str, TopicState] = field(default_factory=dict)

    @property
    def reachable(self) -> list[str]:
        """The addresses of the brokers that answer."""
        return [address for address, broker in self.brokers.items() if broker.reachable]

    @property
    def errors(self) -> dict[str, str]:
        """Why brokers and services do not answer, by address."""
        servers: list[BrokerState | LookupdState] = [*self.brokers.values(), *self.lookupds.values()]
        return {each.address: each.error for each in servers if each.error}


def combine(brokers: Mapping[str, BrokerState]) -> Iterator[TopicState]:
    """Yield the topics of all brokers that answer, sorted by name. It takes long, so the caller may pause between."""
    parts: dict[str, dict[str, TopicStats]] = {}
    for address, broker in brokers.items():
        if broker.reachable:
            for name, topic in broker.topics.items():
                parts.setdefault(name, {})[address] = topic
    for name in sorted(parts):
        yield _topic(name, parts[name])


def _topic(name: str, parts: Mapping[str, TopicStats]) -> TopicState:
    by_channel: dict[str, dict[str, Queue]] = {}
    for address, topic in parts.items():
        for channel, queue in topic.channels.items():
            by_channel.setdefault(channel, {})[address] = queue
    channels = {
        channel: ChannelState(channel, total([*by_channel[channel].values()]), by_channel[channel])
        for channel in sorted(by_channel)
    }
    queues = {address: topic.queue for address, topic in parts.items()}
    return TopicState(name, total([*queues.values()]), queues, channels)
