"""One document for several brokers: what they have together, and where they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...text.settings import SETTINGS
from .document import shown_value
from .model import Defined, DefinedTopic, Topics


@dataclass(frozen=True, slots=True)
class Together:
    """What several brokers have.

    Attributes:
        topics: The topics and channels of all brokers.
        differences: A sentence for each setting or pause that is not the same on all brokers with the topic or channel.
        lacking: A sentence for each topic or channel that some broker does not have.
    """

    topics: Topics
    differences: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


def together(brokers: Mapping[str, Topics]) -> Together:
    """Return what brokers, by address, have together."""
    topics: dict[str, DefinedTopic] = {}
    differences: list[str] = []
    lacking: list[str] = []

    def compare(kind: str, name: str, those: Mapping[str, Defined], places: Mapping[str, object]) -> Defined:
        differences.extend(_differences(kind, f'{kind} "{name}"', those))
        if without := [address for address in places if address not in those]:
            lacking.append(f'The {kind} "{name}" is not on {" and ".join(without)}.')
        return next(iter(those.values()))

    for name in sorted({name for each in brokers.values() for name in each}):
        having = {address: each[name] for address, each in brokers.items() if name in each}
        first = compare("topic", name, having, brokers)
        channels: dict[str, Defined] = {}
        for channel in sorted({channel for topic in having.values() for channel in topic.channels}):
            those = {a: topic.channels[channel] for a, topic in having.items() if channel in topic.channels}
            channels[channel] = compare("channel", f"{name}/{channel}", those, having)
        reasons = [topic.unavailable for topic in having.values() if topic.unavailable]
        topics[name] = DefinedTopic(first.settings, first.paused, channels, "; ".join(reasons))
    return Together(topics, differences, lacking)


def _differences(kind: str, name: str, those: Mapping[str, Defined]) -> Iterator[str]:
    for setting in SETTINGS[kind]:
        values = {
            address: str(shown_value(setting, defined.settings.get(setting.key)))
            for address, defined in those.items()
        }
        yield from _difference(f"{name}: {setting.name}", values)
    yield from _difference(
        f"{name}: paused", {address: str(bool(each.paused)).lower() for address, each in those.items()}
    )


def _difference(what: str, values: Mapping[str, str]) -> Iterator[str]:
    if len(set(values.values())) > 1:
        places = [f"{value or 'empty'} on {address}" for address, value in values.items()]
        yield f"{what} is {', '.join(places)}."
