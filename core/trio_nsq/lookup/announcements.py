"""The commands for one discovery service: the difference between its state and the broker's. Pure.

There is no queue of events that could overflow: a comparison finds what is missing. Only changed names are compared, so
that one change among ten thousand channels is cheap.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from .protocol import Register, Unregister

Command: TypeAlias = Register | Unregister


class HasChannels(Protocol):
    """What discovery uses of a topic."""

    @property
    def channels(self) -> Mapping[str, object]:
        """Its channels by name."""


@dataclass(slots=True)
class _Known:
    """A topic that the service knows. It keeps objects, not names: a topic that is created again is another object."""

    topic: HasChannels
    channels: dict[str, object] = field(default_factory=dict)


class Announcements:
    """What one service knows over one connection, at first nothing, of the broker's topics (never changed here)."""

    def __init__(self, topics: Mapping[str, HasChannels]) -> None:
        self._topics = topics
        self._known: dict[str, _Known] = {}
        # Names to compare, in the order in which something happened to them; the channel is None for a topic.
        self._changed: dict[tuple[str, str | None], None] = {}
        for name, topic in topics.items():
            # As nsqd: registering a channel registers its topic, too.
            for channel in topic.channels or (None,):
                self.changed(name, channel)

    def changed(self, topic: str, channel: str | None = None) -> None:
        """Mark a channel, or a topic if the channel is None, as created or deleted."""
        self._changed[topic, channel] = None

    @property
    def pending(self) -> bool:
        """Whether there may be commands to send."""
        return bool(self._changed)

    def take(self, limit: int) -> list[Command]:
        """Return the next commands, about `limit` of them.

        They are taken to succeed: if one fails, the connection has to end.
        """
        commands: list[Command] = []
        while self._changed and len(commands) < limit:
            name = next(iter(self._changed))
            del self._changed[name]
            topic, channel = name
            if channel is None:
                self._compare_topic(topic, commands)
            else:
                self._compare_channel(topic, channel, commands)
        return commands

    def _compare_topic(self, name: str, commands: list[Command]) -> None:
        topic = self._topics.get(name)
        known = self._known.get(name)
        if known is not None and known.topic is not topic:
            # Its channels first: nsqlookupd would drop them with it, but with a warning for each.
            commands += [Unregister(name, channel) for channel in known.channels]
            commands.append(Unregister(name))
            del self._known[name]
            known = None
        if topic is not None and known is None:
            commands.append(Register(name))
            self._known[name] = _Known(topic)

    def _compare_channel(self, topic_name: str, name: str, commands: list[Command]) -> None:
        topic = self._topics.get(topic_name)
        known = self._known.get(topic_name)
        channel = topic.channels.get(name) if topic is not None else None
        if known is None and topic is not None and channel is not None:
            known = self._known[topic_name] = _Known(topic)  # REGISTER of the channel includes it
        elif known is None or known.topic is not topic:
            self._compare_topic(topic_name, commands)
            known = self._known.get(topic_name)
        if known is not None and name in known.channels and known.channels[name] is not channel:
            commands.append(Unregister(topic_name, name))
            del known.channels[name]
        if known is not None and channel is not None and name not in known.channels:
            commands.append(Register(topic_name, name))
            known.channels[name] = channel
