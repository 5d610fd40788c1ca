"""What is left on a broker that drains, from its statistics. Does no IO."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trio_nsq.api.answers import Stats, TopicStats

_EPHEMERAL = "#ephemeral"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Row:
    """The messages of a channel, or those of a topic that no channel has (`channel` None).

    Attributes:
        depth: Ready, or on the way to a dead-letter topic.
        clients: Connected consumers.
    """

    topic: str
    channel: str | None
    depth: int
    in_flight: int = 0
    deferred: int = 0
    clients: int = 0

    @property
    def messages(self) -> int:
        return self.depth + self.in_flight + self.deferred

    @property
    def name(self) -> str:
        return self.topic if self.channel is None else f"{self.topic}/{self.channel}"

    @property
    def is_ephemeral(self) -> bool:
        """Whether its messages are only in memory: they cannot be moved."""
        return self.topic.endswith(_EPHEMERAL) or (self.channel or "").endswith(_EPHEMERAL)


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left on a broker.

    Attributes:
        rows: Channels and topics with messages.
        unavailable: Topics whose messages cannot be counted.
    """

    rows: tuple[Row, ...]
    unavailable: tuple[str, ...] = ()

    @classmethod
    def of(cls, stats: Stats) -> "Remaining":
        """Read the broker's `/stats`."""
        topics = stats["topics"]
        found = [row for topic in topics for row in _rows(topic) if row.messages]
        unavailable = [topic["topic_name"] for topic in topics if topic.get("unavailable")]
        return cls(tuple(found), tuple(unavailable))

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.rows)

    @property
    def durable(self) -> "Remaining":
        """What can be moved to another broker."""
        return Remaining(tuple(row for row in self.rows if not row.is_ephemeral), self.unavailable)

    @property
    def topics(self) -> list[str]:
        return list(dict.fromkeys(row.topic for row in self.rows))

    @property
    def stuck(self) -> list[Row]:
        """The channels without consumers, and the topics without channels, largest first."""
        return sorted((row for row in self.rows if not row.clients), key=lambda row: -row.messages)


def _rows(topic: TopicStats) -> Iterator[Row]:
    name = topic["topic_name"]
    yield Row(name, None, topic["depth"], deferred=topic.get("deferred_count", 0))
    for channel in topic["channels"]:
        yield Row(
            name,
            channel["channel_name"],
            channel["depth"],
            channel["in_flight_count"],
            channel["deferred_count"],
            channel["client_count"],
        )


def named(rows: Iterable[Row]) -> str:
    """Return the first rows with their numbers, for a line."""
    every = list(rows)
    shown = [f"{row.name} ({row.messages:,})" for row in every[:_SHOWN]]
    more = len(every) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
