"""What makes a broker as a document says: which changes, their effects, and the requests, in order."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import groupby
from typing import Any, Literal

from ...api import broker as api
from ...api.request import Procedure, Request, ask
from .. import dead_letters
from ..changes import Change, removed_by
from ..stats import TopicStats, parse_topics
from .model import (
    Defined,
    DefinedTopic,
    DefinitionsError,
    Topics,
    cycles_of,
    dead_letter_topics,
    dead_letter_topics_of,
)

Verb = Literal["create", "set", "pause", "unpause", "delete"]
_NOTHING = DefinedTopic()


@dataclass(frozen=True, slots=True)
class DefinitionChange:
    """A change of one topic, or of the channel if there is one.

    Attributes:
        settings: The new values by the broker's keys, None for the default; for `set`.
        before: The values of these settings that are set now; None: the default.
        messages: How many messages it deletes or drops.
        turn: Of new dead-letter topics: the number of its round. Another order could make a cycle meanwhile.
    """

    verb: Verb
    topic: str
    channel: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    messages: int = 0
    turn: int = 0

    @property
    def kind(self) -> str:
        """`topic` or `channel`."""
        return "channel" if self.channel else "topic"

    @property
    def name(self) -> str:
        """`TOPIC` or `TOPIC/CHANNEL`."""
        return f"{self.topic}/{self.channel}" if self.channel else self.topic

    def request(self) -> Request[Any]:
        channel = self.channel or None
        if self.verb == "set":
            return api.settings(self.topic, channel, self.settings)
        return api.act(self.verb, self.topic, channel)

    def trial(self, *, left_out: Container[str] = ()) -> Request[Any]:
        """Return a request that only tells the effect of the new settings, without those `left_out`."""
        settings = {key: value for key, value in self.settings.items() if key not in left_out}
        return api.settings(self.topic, self.channel or None, settings, dry_run=True)


def changes_to(wanted: Topics, found: Topics, *, delete: bool = False) -> list[DefinitionChange]:
    """Return the changes that make a broker, which has `found`, as `wanted`; empty: it is so already.

    Topics are created first, then channels; channels get their settings after all topics. No step makes a cycle of
    dead-letter topics: a topic gets its own ones after those have theirs, and unwanted channels with one go first.

    Args:
        delete: Delete the topics and channels that are not wanted. Dead-letter topics of wanted channels stay.

    Raises:
        DefinitionsError: The broker cannot use one of the topics, or the dead letters of a topic would end up in it.
    """
    problems = [
        f'topic "{name}" cannot be used: {found[name].unavailable}.'
        for name in wanted
        if name in found and found[name].unavailable
    ]
    kept = _kept(wanted, found) if delete else found
    merged = _merged(wanted, kept)
    problems = problems or cycles_of(merged)
    if problems:
        raise DefinitionsError(problems)
    turns = _turns(merged)
    pairs = [
        (DefinitionChange("create", name), topic, found.get(name)) for name, topic in sorted(wanted.items())
    ]
    channels = [
        (DefinitionChange("create", each.topic, name), channel, (before or _NOTHING).channels.get(name))
        for each, topic, before in pairs
        for name, channel in sorted(topic.channels.items())
    ]
    every = [*pairs, *channels]
    sets = [
        replace(change, turn=turns[change.topic]) if "dead_letter_topic" in change.settings else change
        for each in channels
        for change in _set(*each)
    ]
    deletions = list(_deletions(kept, found)) if delete else []
    first: list[DefinitionChange] = []
    if any(each.settings.get("dead_letter_topic") for each in sets):
        first = [each for each in deletions if _frees(each, found)]
    return [
        *(create for create, _, before in every if before is None),
        *(change for each in pairs for change in _set(*each)),
        *first,
        *sorted(sets, key=lambda each: each.turn),
        *(change for each in every for change in _pause(*each)),
        *(change for change in deletions if change not in first),
    ]


def _turns(topics: Topics) -> Mapping[str, int]:
    """Return for each topic how many others follow in its longest chain of dead-letter topics. There are no cycles."""
    following = {name: dead_letter_topics_of(topic) for name, topic in topics.items()}
    turns: dict[str, int] = {}
    for name in TopologicalSorter(following).static_order():
        turns[name] = max((turns[to] + 1 for to in following.get(name, ())), default=0)
    return turns


def _frees(change: DefinitionChange, found: Topics) -> bool:
    """Whether a channel has a dead-letter topic that it loses by a change."""
    if change.verb == "set":
        return bool(change.before.get("dead_letter_topic"))
    channel = found[change.topic].channels.get(change.channel) if change.verb == "delete" else None
    return channel is not None and bool(channel.settings.get("dead_letter_topic"))


def _set(create: DefinitionChange, wanted: Defined, found: Defined | None) -> Iterator[DefinitionChange]:
    now = found.settings if found is not None else {}
    new = {key: value for key, value in wanted.settings.items() if value != now.get(key)}
    if new:
        yield replace(create, verb="set", settings=new, before={key: now.get(key) for key in new})


def _pause(create: DefinitionChange, wanted: Defined, found: Defined | None) -> Iterator[DefinitionChange]:
    is_paused = found is not None and bool(found.paused)
    if wanted.paused is not None and wanted.paused != is_paused:
        yield replace(create, verb="pause" if wanted.paused else "unpause")


def _kept(wanted: Topics, found: Topics) -> Topics:
    """Return what of a broker is wanted, what wanted channels need for dead letters, and what cannot be deleted."""
    wanted_here = {
        name: _only(topic, wanted[name].channels) for name, topic in found.items() if name in wanted
    }
    needed = dead_letter_topics(_merged(wanted, wanted_here))
    kept: dict[str, DefinedTopic] = {}
    for name, topic in found.items():
        if name in wanted or name in needed or topic.unavailable:
            names = wanted[name].channels.keys() if name in wanted else set[str]()
            kept[name] = _only(topic, names | {dead_letters.CHANNEL} if name in needed else names)
    return kept


def _only(topic: DefinedTopic, names: Container[str]) -> DefinedTopic:
    return replace(topic, channels={name: each for name, each in topic.channels.items() if name in names})


def _deletions(kept: Topics, found: Topics) -> Iterator[DefinitionChange]:
    for name, topic in sorted(found.items()):
        if name not in kept:
            yield DefinitionChange("delete", name)
            continue
        for channel in sorted(topic.channels.keys() - kept[name].channels.keys()):
            yield DefinitionChange("delete", name, channel)


def _merged(wanted: Topics, found: Topics) -> Topics:
    """Return what a broker has after the changes, without deletions."""
    merged = dict(found)
    for name, topic in wanted.items():
        before = found.get(name, _NOTHING)
        channels = dict(before.channels)
        for channel, defined in topic.channels.items():
            settings = channels.get(channel, _NOTHING).settings
            channels[channel] = Defined({**settings, **defined.settings})
        merged[name] = DefinedTopic(channels=channels)
    return merged


def rounds(changes: list[DefinitionChange]) -> list[list[int]]:
    """Return the places of changes that a broker can make at the same time, one round after the other."""
    places = groupby(range(len(changes)), lambda place: _step(changes[place]))
    return [list(group) for _, group in places]


def _step(change: DefinitionChange) -> tuple[str, ...]:
    if change.verb == "delete":
        return (change.verb,)
    return change.verb.removeprefix("un"), change.kind, str(change.turn)


# ---------------------------------------------------------------------- requests


def effects_of(changes: list[DefinitionChange], found: Topics) -> Procedure[list[DefinitionChange]]:
    """Return the changes with the messages that they delete or drop. The broker checks the new settings that it can.

    Settings of what does not exist yet cannot be checked by it, and drop nothing. Nor can new dead-letter topics while
    other channels have old ones that they lose: together they may be a cycle.
    """
    stats: Mapping[str, TopicStats] | None = None
    freeing = [each for each in changes if _frees(each, found)]
    counted = []
    for change in changes:
        topic = found.get(change.topic)
        exists = topic is not None and (not change.channel or change.channel in topic.channels)
        if change.verb == "set" and exists:
            others = change.settings.get("dead_letter_topic") and freeing not in ([], [change])
            answer = yield from ask(change.trial(left_out=("dead_letter_topic",) if others else ()))
            change = replace(change, messages=answer.get("dropped", 0))
        elif change.verb == "delete":
            if stats is None:
                stats = parse_topics((yield from ask(api.stats())))
            change = replace(change, messages=_removed(change, stats))
        counted.append(change)
    return counted


def _removed(change: DefinitionChange, stats: Mapping[str, TopicStats]) -> int:
    topic = stats.get(change.topic)
    removed = removed_by(Change("delete", change.topic, change.channel), topic) if topic is not None else None
    return removed.messages if removed is not None else 0
