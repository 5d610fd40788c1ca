"""The commands for one discovery service: the difference between its state and the broker's. Pure.

A comparison of the states replaces a queue of events, which could overflow. Only changed names are compared, so one
change among ten thousand channels is cheap.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from .protocol import Register, Unregister

Command: TypeAlias = Register | Unregister


class HasChannels(Protocol):
    """A topic, as discovery uses it."""

    @property
    def channels(self) -> Mapping[str, object]:
        """The channels of the topic by name."""


@dataclass(slots=True)
class _Known:
    """A topic that the service knows. It holds objects, not names: a recreated topic is another object."""

    topic: HasChannels
    channels: dict[str, object] = field(default_factory=dict)


class Announcements:
    """The state of one service over one connection, initially empty, compared with the broker's topics."""

    def __init__(self, topics: Mapping[str, HasChannels]) -> None:
        self._topics = topics
        self._known: dict[str, _Known] = {}
        # Names to compare, in the order of the changes; the channel is None for a topic.
        self._changed: dict[tuple[str, str | None], None] = {}
        for name, topic in topics.items():
            # Registering a channel also registers its topic, as in nsqd.
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

        They count as successful: if one fails, the caller must end the connection.
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
            # Channels first: otherwise nsqlookupd removes them with the topic and logs a warning for each.
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
