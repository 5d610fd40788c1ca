"""The state of a fleet at one time, summed over all brokers. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..api.answers import Cluster
from ..api.lookupd import Node
from ..protocol.address import format_address
from .archive import Archive
from .identity import BrokerIdentity
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
class Disk:
    """The disk of a broker's data folder.

    Attributes:
        used_bytes: The logs of all topics.
    """

    used_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def free_share(self) -> float:
        """The free share, 0 to 1."""
        return self.free_bytes / self.total_bytes


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
        cluster: The cluster that it leads; None: none, or it was not asked.
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
    cluster: Cluster | None = None

    @property
    def reachable(self) -> bool:
        """Whether it answered the last poll."""
        return not self.error and self.answered_at_s > 0

    @property
    def version(self) -> str:
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
        """Whether it refuses publishes until it is empty; if it does not tell, what the services know counts."""
        told = (self.info.get("draining"), self.stats.get("draining"))
        return True in told or (not self.info and any(node.draining for node in self.registrations.values()))

    @property
    def start_time_s(self) -> int:
        """Unix seconds; 0 if unknown."""
        return number(self.stats, "start_time")

    @property
    def disk(self) -> Disk | None:
        """The disk of its data folder; None: unknown, as on nsqd."""
        raw = self.stats.get("disk")
        if (
            not isinstance(raw, dict)
            or raw.get("free_bytes") is None
            or not (total := number(raw, "total_bytes"))
        ):
            return None
        return Disk(number(raw, "used_bytes"), min(number(raw, "free_bytes"), total), total)

    @property
    def archive(self) -> Archive | None:
        """Its archive; None: it has none."""
        return Archive.of(self.stats)

    @property
    def announced(self) -> str:
        """The HTTP address that it tells; empty if it tells none."""
        host, port = text(self.info, "broadcast_address"), number(self.info, "http_port")
        return format_address(host, port) if host and port else ""

    def missing_at(self, lookupds: Iterable[str]) -> list[str]:
        """Return the services where it is not registered, and should be: one that drains need not be."""
        return [] if self.draining else [each for each in lookupds if each not in self.registrations]

    def with_registrations_of(self, same: Self) -> Self:
        """Return this broker with what is known of another address of it."""
        registrations = {**self.registrations, **same.registrations}
        return replace(self, configured=self.configured or same.configured, registrations=registrations)


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

    @property
    def silent_brokers(self) -> dict[str, str]:
        """Why brokers of ours do not answer, by address: without those that are known to be an nsqd."""
        return {
            address: broker.error
            for address, broker in self.brokers.items()
            if broker.error and not broker.is_nsqd
        }

    def unanswered_depth(self, topic: str, channel: str = "") -> int:
        """Return the last known depth of a topic or channel on brokers that do not answer."""
        known = [
            broker.topics[topic]
            for broker in self.brokers.values()
            if broker.error and topic in broker.topics
        ]
        if channel:
            return sum(each.channels[channel].depth for each in known if channel in each.channels)
        return sum(each.depth for each in known)

    def unanswered_with(self, topic: str, channel: str = "") -> dict[str, str]:
        """Return the brokers that do not answer and may have a topic or channel, and the reasons.

        These are the brokers that had it when they last answered, and those that have never answered.
        """
        found = {}
        for address, broker in self.brokers.items():
            if broker.error:
                known = broker.topics.get(topic)
                if not broker.answered_at_s or (known and (not channel or channel in known.channels)):
                    found[address] = broker.error
        return found


def merged(states: Iterable[BrokerState]) -> dict[str, BrokerState]:
    """Return the brokers by address: one that has several addresses once, by the first of them."""
    found: dict[tuple[str, ...], BrokerState] = {}
    for state in states:
        identity: tuple[str, ...] = (state.reachable and BrokerIdentity.of(state.info)) or (state.address,)
        known = found.get(identity)
        found[identity] = state if known is None else known.with_registrations_of(state)
    # A broker may answer over HTTPS or a unix socket only, and be registered with an address that does not.
    silent = {state.address: key for key, state in found.items() if not (state.info or state.configured)}
    for identity, state in list(found.items()):
        if state.reachable and (same := silent.pop(state.announced, None)) is not None:
            found[identity] = state.with_registrations_of(found.pop(same))
    return {state.address: state for state in found.values()}


def combine(brokers: Mapping[str, BrokerState]) -> dict[str, TopicState]:
    """Return the topics of all brokers that answer, by name, sorted. It takes some microseconds for each channel."""
    parts: dict[str, dict[str, TopicStats]] = {}
    for address, broker in brokers.items():
        if broker.reachable:
            for name, topic in broker.topics.items():
                parts.setdefault(name, {})[address] = topic
    return {name: _topic(name, parts[name]) for name in sorted(parts)}


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
