"""What a destructive action removes, counted on each broker. Pure, but for `poll`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from ..fleet.stats import TopicStats, parse_topics
from ..upstream.client import Upstream, UpstreamError

_MORE_MESSAGES = 100
"""So many more messages than were shown are no surprise on a topic in use."""


@dataclass(frozen=True, slots=True)
class Count:
    """Messages, channels and consumers of a topic or channel on one broker, or on all."""

    messages: int = 0
    channels: int = 0
    clients: int = 0

    def __add__(self, other: Self) -> "Count":
        return Count(
            self.messages + other.messages, self.channels + other.channels, self.clients + other.clients
        )

    def is_surprise_after(self, shown: "Count") -> bool:
        """Whether so much more is there than when it was shown that a person should look again."""
        return is_surprise(self.messages, shown.messages) or self.channels > shown.channels


def is_surprise(now: int, shown: int) -> bool:
    """Whether there are grossly more messages than were shown: more than double, and not just a few."""
    return now > 2 * shown + _MORE_MESSAGES


@dataclass(frozen=True, slots=True)
class Impact:
    """What an action removes.

    Attributes:
        parts: The counts of the brokers that have the topic or channel, by address.
        errors: Why others cannot be asked.
    """

    parts: Mapping[str, Count] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> Count:
        """The sum over all brokers that answered."""
        return sum(self.parts.values(), Count())


def count_of_topic(topic: TopicStats) -> Count:
    """Return what goes when a topic is deleted. Each channel's copy of a message counts."""
    channels = topic.channels.values()
    return Count(
        topic.queue.depth + topic.queue.deferred + sum(each.waiting for each in channels),
        len(topic.channels),
        sum(each.clients for each in channels),
    )


def count_of_own_queue(topic: TopicStats) -> Count:
    """Return what goes when a topic is emptied: its channels keep their messages."""
    return Count(topic.queue.depth + topic.queue.deferred)


def count_of_channel(topic: TopicStats, channel: str) -> Count | None:
    """Return what goes when a channel is emptied or deleted; None: there is no such channel."""
    queue = topic.channels.get(channel)
    return Count(queue.waiting, 0, queue.clients) if queue is not None else None


async def poll(
    upstream: Upstream, addresses: list[str], token: str | None, topic: str, channel: str, *, own_queue: bool
) -> Impact:
    """Ask brokers what an action would remove now.

    Args:
        own_queue: Without a channel: the topic is emptied, not deleted.
    """
    params = {"format": "json", "topic": topic, "include_clients": "false", "include_mem": "false"}
    if channel:
        params["channel"] = channel

    async def ask(address: str) -> Count | None:
        answer = await upstream.json("GET", address, "/stats", params, token=token)
        try:
            found = parse_topics(answer).get(topic)
        except ValueError as exc:
            raise UpstreamError(address, str(exc)) from exc
        if found is None:
            return None
        if channel:
            return count_of_channel(found, channel)
        return count_of_own_queue(found) if own_queue else count_of_topic(found)

    results = await upstream.on_all(addresses, ask)
    parts = {address: count for address, count in results.values.items() if count is not None}
    return Impact(parts, {address: error.reason for address, error in results.errors.items()})
