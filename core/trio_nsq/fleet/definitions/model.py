"""What is defined on a broker, or wanted there: topics, channels and their settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...api.answers import ChannelDefinition, Definitions, Stats, TopicDefinition, settings_fields
from ...api.fields import only
from ...protocol.names import is_ephemeral


@dataclass(frozen=True, slots=True)
class Defined:
    """A topic or channel.

    Attributes:
        settings: Values by the broker's keys. Of a broker: those that are set. Wanted: None stands for the default.
        paused: None: the document does not say it.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    paused: bool | None = None


@dataclass(frozen=True, slots=True)
class DefinedTopic(Defined):
    """A topic with its channels by name.

    Attributes:
        unavailable: Why a broker cannot use it; empty: it can.
    """

    channels: Mapping[str, Defined] = field(default_factory=dict)
    unavailable: str = ""


Topics = Mapping[str, DefinedTopic]
"""By name."""


class DefinitionsError(ValueError):
    """Definitions cannot be used. `problems` has a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


def of_broker(answer: Definitions) -> Topics:
    """Return what a broker has, from its `/definitions`. Raises ValueError: a setting has another type."""
    return {topic["topic_name"]: _topic(topic) for topic in answer["topics"]}


def _topic(topic: TopicDefinition) -> DefinedTopic:
    channels = {channel["channel_name"]: _channel(channel) for channel in topic["channels"]}
    settings = _settings("topic", topic["settings"])
    return DefinedTopic(settings, topic["paused"], channels, topic.get("unavailable") or "")


def _channel(channel: ChannelDefinition) -> Defined:
    return Defined(_settings("channel", channel["settings"]), channel["paused"])


def _settings(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check the settings that this version knows, and keep the others."""
    fields = [each._replace(needed=False) for each in settings_fields(kind)]
    return {**settings, **only(dict(settings), fields)}


def of_stats(stats: Stats) -> Topics:
    """Return the topics and channels of a broker without settings, an nsqd, from its `/stats`."""
    return {
        topic["topic_name"]: DefinedTopic(
            paused=topic["paused"],
            channels={
                channel["channel_name"]: Defined(paused=channel["paused"])
                for channel in topic["channels"]
                if not is_ephemeral(channel["channel_name"])
            },
        )
        for topic in stats["topics"]
        if not is_ephemeral(topic["topic_name"])
    }


# ---------------------------------------------------------------------- dead letters


def dead_letter_topics(topics: Topics) -> set[str]:
    """Return the topics that channels have as their dead-letter topics."""
    return {to for topic in topics.values() for to in dead_letter_topics_of(topic)}


def dead_letter_topics_of(topic: DefinedTopic) -> set[str]:
    """As `dead_letter_topics`, of one topic."""
    return {to for each in topic.channels.values() if (to := each.settings.get("dead_letter_topic"))}


def cycles_of(topics: Topics) -> list[str]:
    """Return a sentence for each topic whose dead letters end up in it again: a broker refuses that."""
    ways = {name: dead_letter_topics_of(topic) for name, topic in topics.items()}
    following = {name: to for name, to in ways.items() if to}
    return [
        f'topic "{topic}": its dead letters end up in it again.'
        for topic in following
        if topic in _reached(topic, following)
    ]


def _reached(start: str, following: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    pending = list(following[start])
    while pending:
        if (name := pending.pop()) not in reached:
            reached.add(name)
            pending += following.get(name, ())
    return reached
