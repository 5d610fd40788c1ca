"""Tests for announcements to a service: a model executes the commands as nsqlookupd does."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from soak import examples
from trio_nsq.lookup.announcements import Announcements
from trio_nsq.lookup.protocol import Register, Unregister


@dataclass(eq=False)
class Topic:
    channels: dict[str, object] = field(default_factory=dict)


def lines(announcements: Announcements, limit: int = 1000) -> list[str]:
    return [str(command) for command in announcements.take(limit)]


def connected(topics: dict[str, Topic]) -> Announcements:
    """Return announcements to a service that has received everything."""
    announcements = Announcements(topics)
    while announcements.pending:
        announcements.take(1000)
    return announcements


def test_everything_is_announced_first() -> None:
    announcements = Announcements({"a": Topic(), "b": Topic({"c": object(), "d#ephemeral": object()})})
    assert announcements.pending
    assert lines(announcements) == ["REGISTER a", "REGISTER b c", "REGISTER b d#ephemeral"]
    assert not announcements.pending


def test_created_and_deleted_topics_and_channels() -> None:
    topics: dict[str, Topic] = {}
    announcements = connected(topics)
    topics["t"] = Topic()
    announcements.changed("t")
    topics["t"].channels["c"] = object()
    announcements.changed("t", "c")
    assert lines(announcements) == ["REGISTER t", "REGISTER t c"]
    del topics["t"].channels["c"]
    announcements.changed("t", "c")
    assert lines(announcements) == ["UNREGISTER t c"]
    del topics["t"]
    announcements.changed("t")
    assert lines(announcements) == ["UNREGISTER t"]


def test_created_and_deleted_before_the_announcement() -> None:
    topics: dict[str, Topic] = {}
    announcements = connected(topics)
    announcements.changed("t")
    announcements.changed("t", "c")
    assert lines(announcements) == []


@pytest.mark.parametrize("telling_of", [("t", None), ("t", "c")])
def test_recreated_topic_is_registered_again(telling_of: tuple[str, str | None]) -> None:
    """So nsqlookupd removes a tombstone, and registers again what was deleted there in between."""
    topics = {"t": Topic({"c": object()})}
    announcements = connected(topics)
    topics["t"] = Topic({"c": object()})
    announcements.changed(*telling_of)
    announcements.changed("t", "c")
    assert lines(announcements) == ["UNREGISTER t c", "UNREGISTER t", "REGISTER t", "REGISTER t c"]


def test_recreated_channel_is_registered_again() -> None:
    topics = {"t": Topic({"c": object()})}
    announcements = connected(topics)
    topics["t"].channels["c"] = object()
    announcements.changed("t", "c")
    assert lines(announcements) == ["UNREGISTER t c", "REGISTER t c"]


def test_nothing_is_announced_twice() -> None:
    topics = {"t": Topic({"c": object()})}
    announcements = connected(topics)
    announcements.changed("t")
    announcements.changed("t", "c")
    assert lines(announcements) == []


def test_channel_deleted_during_the_first_announcements() -> None:
    topics = {"t": Topic({"c": object()})}
    announcements = Announcements(topics)
    del topics["t"].channels["c"]
    announcements.changed("t", "c")
    assert lines(announcements) == ["REGISTER t"]


def test_commands_are_limited_per_batch() -> None:
    announcements = Announcements({f"t{number}": Topic() for number in range(5)})
    assert [len(announcements.take(2)) for _ in range(4)] == [2, 2, 1, 0]


NAMES = st.sampled_from(["a", "b"])


class Registered(RuleBasedStateMachine):
    """After any sequence of events: if nothing is pending, the service's registrations match the broker."""

    @initialize()
    def start(self) -> None:
        self.topics: dict[str, Topic] = {}
        self.announcements = Announcements(self.topics)
        self.registered: dict[tuple[str, str | None], None] = {}

    @rule()
    def reconnect(self) -> None:
        self.registered.clear()
        self.announcements = Announcements(self.topics)

    @rule(topic=NAMES)
    def make_topic(self, topic: str) -> None:
        if topic not in self.topics:
            self.topics[topic] = Topic()
            self.announcements.changed(topic)

    @rule(topic=NAMES, channel=NAMES)
    def make_channel(self, topic: str, channel: str) -> None:
        self.make_topic(topic)
        if channel not in self.topics[topic].channels:
            self.topics[topic].channels[channel] = object()
            self.announcements.changed(topic, channel)

    @rule(topic=NAMES, channel=NAMES)
    def delete_channel(self, topic: str, channel: str) -> None:
        if topic in self.topics and self.topics[topic].channels.pop(channel, None) is not None:
            self.announcements.changed(topic, channel)

    @rule(topic=NAMES)
    def delete_topic(self, topic: str) -> None:
        if self.topics.pop(topic, None) is not None:
            self.announcements.changed(topic)

    @rule(limit=st.integers(1, 3))
    def tell(self, limit: int) -> None:
        for command in self.announcements.take(limit):
            topic, channel = command.topic, command.channel
            if isinstance(command, Register):
                assert (topic, channel) not in self.registered, "told twice"
                self.registered[topic, None] = None
                self.registered[topic, channel] = None
            else:
                assert isinstance(command, Unregister)
                del self.registered[topic, channel]
                # nsqlookupd would log a warning
                assert channel is not None or not any(known == topic for known, _ in self.registered)

    @invariant()
    def what_is_known_is_here(self) -> None:
        if not self.announcements.pending:
            here: set[tuple[str, str | None]] = {(topic, None) for topic in self.topics}
            here |= {(name, channel) for name, topic in self.topics.items() for channel in topic.channels}
            assert set(self.registered) == here


TestRegistered = Registered.TestCase
TestRegistered.settings = settings(max_examples=examples(150))
