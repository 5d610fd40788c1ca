"""The registry of producers with their topics and channels. No IO; time is a parameter, in monotonic seconds.

The registry adds a topic or channel when a producer registers it or when it is created over HTTP. It removes one when
it is deleted; an ephemeral one also when its last producer disconnects. Others stay, so that the topic of a new broker
gets all its channels. If there are too many, a new one replaces the one that has had no producer for the longest time.

Of the leaders of a cluster, queries return the one with the highest epoch: the earlier ones are hidden until it was not
seen for the inactive timeout. Their registrations stay, so that they reappear then. Only producers of one identity are
members of the same cluster: another identity cannot hide them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...protocol import NSQError, is_ephemeral
from ...protocol.address import format_address
from ..hosts import normal_host
from ..protocol import PeerInfo

MAX_CLUSTERS = 10_000
"""The clusters whose leaders are known. A new one replaces the one whose leader was not seen for the longest time."""


class TooMany(NSQError):
    """A producer has reached its limit of registrations, or all names that the registry may have have a producer."""


class AddressTaken(NSQError):
    """An active producer of another identity has the address."""


@dataclass(eq=False, slots=True)
class Producer:
    """A connected broker. Only the registry changes it.

    Attributes:
        remote_address: The broker's end of the connection, `host:port`.
        info: The data of its IDENTIFY.
        owner: The name of its identity; None without authentication.
        last_seen: The time of its last PING or IDENTIFY.
        channels: The registered names: channels by topic.
        registrations: The number of its topics and channels.
    """

    remote_address: str
    info: PeerInfo
    last_seen: float
    owner: str | None = None
    channels: dict[str, set[str]] = field(default_factory=dict)
    registrations: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """The address for clients, comparable."""
        return normal_host(self.info.broadcast_address), self.info.tcp_port

    @property
    def cluster(self) -> tuple[str | None, str]:
        """The cluster that it leads, comparable; only if it leads one."""
        assert self.info.cluster is not None
        return self.owner, self.info.cluster.name

    @property
    def epoch(self) -> int:
        """The epoch of its leadership; 0: it leads no cluster."""
        return self.info.cluster.epoch if self.info.cluster is not None else 0

    def is_node(self, name: str) -> bool:
        """Whether `host:port` in a tombstone request is this producer; an IPv6 host with or without brackets."""
        host, port = self.info.broadcast_address, self.info.http_port
        return name in (format_address(host, port), f"{host}:{port}")


class _Topic:
    """The producers of one topic and of its channels."""

    def __init__(self) -> None:
        self.producers: dict[Producer, float | None] = {}  # with the time of each tombstone, or None
        self.channels: dict[str, set[Producer]] = {}  # subsets of `producers`


class Registry:
    """The state of a discovery service.

    Args:
        inactive_timeout_s: Queries omit a producer that was not seen for longer.
        tombstone_lifetime_s: How long `lookup` omits a producer with a tombstone.
        max_registrations: The limit of topics and channels per producer.
        max_topics, max_channels: The limits of all topics, and of the channels of all topics together.

    Attributes:
        on_names_changed: Called when a topic or channel is added or deleted, except for ephemeral ones.
    """

    def __init__(
        self,
        *,
        inactive_timeout_s: float,
        tombstone_lifetime_s: float,
        max_registrations: int,
        max_topics: int,
        max_channels: int,
    ) -> None:
        self.on_names_changed: Callable[[], None] = lambda: None
        self._inactive_timeout_s = inactive_timeout_s
        self._tombstone_lifetime_s = tombstone_lifetime_s
        self._max_registrations = max_registrations
        self._max_topics = max_topics
        self._max_channels = max_channels
        self._channel_count = 0
        # Those without a producer, in the order in which they lost their last one.
        self._unused_topics: dict[str, None] = {}
        self._unused_channels: dict[tuple[str, str], None] = {}
        self._topics: dict[str, _Topic] = {}
        self._producers: dict[Producer, None] = {}
        self._by_place: dict[tuple[str, int], dict[Producer, None]] = {}
        # The latest leader of each cluster: its epoch, and when it was seen last; in the order of these times.
        self._leaders: dict[tuple[str | None, str], tuple[int, float]] = {}

    # ------------------------------------------------------------------ from producers

    def identify(self, remote_address: str, info: PeerInfo, now: float, owner: str | None = None) -> Producer:
        """Add a producer that has connected.

        Args:
            owner: The name of its identity; None without authentication.

        Raises:
            AddressTaken: An active producer of another identity has the same address, to which consumers would connect.
        """
        producer = Producer(remote_address, info, now, owner)
        others = self._by_place.get(producer.place, {})
        if any(other.owner != owner and self._is_active(other, now) for other in others):
            raise AddressTaken(f"{format_address(*producer.place)} is registered by another identity")
        self._by_place.setdefault(producer.place, {})[producer] = None
        self._producers[producer] = None
        self._lead(producer, now)
        return producer

    def ping(self, producer: Producer, now: float) -> None:
        """Record that a producer is alive."""
        producer.last_seen = now
        self._lead(producer, now)

    def _lead(self, producer: Producer, now: float) -> None:
        """Record that the leader of a cluster is alive, unless there is a later one."""
        if not producer.epoch or self.is_outdated(producer, now):
            return
        self._leaders.pop(producer.cluster, None)
        self._leaders[producer.cluster] = producer.epoch, now
        if len(self._leaders) > MAX_CLUSTERS:
            del self._leaders[next(iter(self._leaders))]

    def is_outdated(self, producer: Producer, now: float) -> bool:
        """Whether a later leader of the same cluster was seen lately, so that queries omit this producer."""
        if not producer.epoch or (latest := self._leaders.get(producer.cluster)) is None:
            return False
        epoch, last_seen = latest
        return producer.epoch < epoch and now - last_seen <= self._inactive_timeout_s

    def outdated_by(self, producer: Producer) -> list[Producer]:
        """Return the earlier leaders of a producer's cluster that are still connected."""
        return [
            other
            for other in self._producers
            if 0 < other.epoch < producer.epoch and other.cluster == producer.cluster
        ]

    def register(self, producer: Producer, topic: str, channel: str | None = None) -> bool:
        """Register a producer's topic, or a channel and its topic. Return whether it is new. Raises TooMany."""
        own = producer.channels.get(topic)
        if own is not None and (channel is None or channel in own):
            return False
        new = (own is None) + (channel is not None)
        if producer.registrations + new > self._max_registrations:
            raise TooMany(f"REGISTER exceeds the limit of {self._max_registrations} topics and channels")
        if own is None:
            self._make_topic(topic).producers[producer] = None
            self._unused_topics.pop(topic, None)
            own = producer.channels[topic] = set()
            producer.registrations += 1
        if channel is not None:
            self._make_channel(topic, channel).add(producer)
            self._unused_channels.pop((topic, channel), None)
            own.add(channel)
            producer.registrations += 1
        return True

    def unregister(self, producer: Producer, topic: str, channel: str | None = None) -> bool:
        """Remove a producer's channel, or its topic with all channels. Return whether it was registered."""
        own = producer.channels.get(topic)
        if own is None or (channel is not None and channel not in own):
            return False
        for name in [channel] if channel is not None else [*own]:
            own.remove(name)
            producer.registrations -= 1
            channels = self._topics[topic].channels
            channels[name].remove(producer)
            if not channels[name]:
                if is_ephemeral(name):
                    self._drop_channel(topic, name)
                else:
                    self._unused_channels[topic, name] = None
        if channel is None:
            del producer.channels[topic]
            producer.registrations -= 1
            producers = self._topics[topic].producers
            del producers[producer]
            if not producers:
                if is_ephemeral(topic):
                    self._drop_topic(topic)
                else:
                    self._unused_topics[topic] = None
        return True

    def disconnect(self, producer: Producer) -> None:
        """Remove a producer whose connection has ended."""
        for topic in [*producer.channels]:
            self.unregister(producer, topic)
        del self._producers[producer]
        same_place = self._by_place[producer.place]
        del same_place[producer]
        if not same_place:
            del self._by_place[producer.place]

    # ------------------------------------------------------------------ from administrators

    def create(self, topic: str, channel: str | None = None) -> None:
        """Create a topic, or a channel and its topic. Raises TooMany."""
        self._make_topic(topic)
        if channel is not None:
            self._make_channel(topic, channel)

    def delete_topic(self, topic: str) -> bool:
        """Delete a topic with its channels, until a producer registers it again. Return whether it existed."""
        entry = self._topics.get(topic)
        if entry is None:
            return False
        self._drop_topic(topic)
        for producer in entry.producers:
            producer.registrations -= 1 + len(producer.channels.pop(topic))
        self._names_changed(topic)
        return True

    def delete_channel(self, topic: str, channel: str) -> bool:
        """Delete a channel, until a producer registers it again. Return whether it existed."""
        entry = self._topics.get(topic)
        if entry is None or channel not in entry.channels:
            return False
        for producer in self._drop_channel(topic, channel):
            producer.channels[topic].remove(channel)
            producer.registrations -= 1
        self._names_changed(topic, channel)
        return True

    def tombstone(self, topic: str, node: str, now: float) -> bool:
        """Hide a topic's producer from consumers, which would recreate the topic while it is being deleted there.

        Args:
            node: The producer, `broadcast_address:http_port`.

        Returns:
            Whether the topic has this producer.
        """
        entry = self._topics.get(topic)
        found = [producer for producer in entry.producers if producer.is_node(node)] if entry else []
        for producer in found:
            assert entry is not None
            entry.producers[producer] = now
        return bool(found)

    # ------------------------------------------------------------------ queries

    @property
    def most_names(self) -> int:
        """How many topics there are, with the channels of one of them at most."""
        return len(self._topics) + self._channel_count

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return sorted(self._topics)

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels, sorted; empty if the topic is unknown."""
        entry = self._topics.get(topic)
        return sorted(entry.channels) if entry is not None else []

    def lookup(self, topic: str, now: float) -> list[Producer] | None:
        """Return the active producers of a topic without a tombstone; None if the topic is unknown."""
        entry = self._topics.get(topic)
        if entry is None:
            return None
        return [
            producer
            for producer, tombstoned_at in entry.producers.items()
            if self._is_active(producer, now) and not self._is_tombstoned(tombstoned_at, now)
        ]

    def nodes(self, now: float) -> Iterator[tuple[Producer, dict[str, bool]]]:
        """Yield each active producer with its topics, and whether it has a tombstone there.

        The registry may change in between.
        """
        for producer in [*self._producers]:
            if producer in self._producers and self._is_active(producer, now):
                yield (
                    producer,
                    {
                        topic: self._is_tombstoned(self._topics[topic].producers[producer], now)
                        for topic in sorted(producer.channels)
                    },
                )

    def registrations(self) -> Iterator[tuple[str, Producer, float | None]]:
        """Yield all registrations, in nsqlookupd's form. The registry may change in between.

        Yields:
            `client::`, `topic:NAME:` or `channel:TOPIC:NAME`; a producer; the time of its tombstone, expired or not, or
            None.
        """
        for producer in [*self._producers]:
            yield "client::", producer, None
        for topic in [*self._topics]:  # only names: callers take their time, and many may do so at once
            if (entry := self._topics.get(topic)) is None:
                continue
            for producer, tombstoned_at in [*entry.producers.items()]:
                yield f"topic:{topic}:", producer, tombstoned_at
            for channel in [*entry.channels]:
                for producer in [*entry.channels.get(channel, ())]:
                    yield f"channel:{topic}:{channel}", producer, None

    def durable_names(self) -> dict[str, list[str]]:
        """Return the topics and channels that are saved: those that are not ephemeral."""
        return {
            topic: [name for name in entry.channels if not is_ephemeral(name)]
            for topic, entry in self._topics.items()
            if not is_ephemeral(topic)
        }

    def load(self, names: Mapping[str, list[str]]) -> None:
        """Create the topics and channels that `durable_names` returned; the last ones if they are too many."""
        for topic, channels in names.items():
            self.create(topic)
            for channel in channels:
                self.create(topic, channel)

    # ------------------------------------------------------------------

    def _make_topic(self, name: str) -> _Topic:
        topic = self._topics.get(name)
        if topic is None:
            if len(self._topics) >= self._max_topics:
                if not self._unused_topics:
                    raise TooMany(f"there are {self._max_topics} topics, as many as --max-topics allows")
                unused = next(iter(self._unused_topics))
                self._drop_topic(unused)
                self._names_changed(unused)
            topic = self._topics[name] = _Topic()
            self._unused_topics[name] = None
            self._names_changed(name)
        return topic

    def _make_channel(self, topic: str, name: str) -> set[Producer]:
        channels = self._topics[topic].channels
        if name not in channels:
            if self._channel_count >= self._max_channels:
                if not self._unused_channels:
                    raise TooMany(
                        f"there are {self._max_channels} channels, as many as --max-channels allows"
                    )
                unused = next(iter(self._unused_channels))
                self._drop_channel(*unused)
                self._names_changed(*unused)
            channels[name] = set()
            self._channel_count += 1
            self._unused_channels[topic, name] = None
            self._names_changed(topic, name)
        return channels[name]

    def _drop_topic(self, name: str) -> None:
        entry = self._topics[name]
        for channel in [*entry.channels]:
            self._drop_channel(name, channel)
        del self._topics[name]
        self._unused_topics.pop(name, None)

    def _drop_channel(self, topic: str, name: str) -> set[Producer]:
        self._unused_channels.pop((topic, name), None)
        self._channel_count -= 1
        return self._topics[topic].channels.pop(name)

    def _names_changed(self, *names: str) -> None:
        if not any(map(is_ephemeral, names)):
            self.on_names_changed()

    def _is_active(self, producer: Producer, now: float) -> bool:
        return now - producer.last_seen <= self._inactive_timeout_s and not self.is_outdated(producer, now)

    def _is_tombstoned(self, tombstoned_at: float | None, now: float) -> bool:
        return tombstoned_at is not None and now - tombstoned_at < self._tombstone_lifetime_s
