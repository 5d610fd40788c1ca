"""Tests for definitions: the document, the changes that a broker needs, and differences of brokers. Without brokers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.definitions import documents
from soak import examples
from trio_nsq.fleet.definitions.changes import DefinitionChange, changes_to, rounds
from trio_nsq.fleet.definitions.differences import together
from trio_nsq.fleet.definitions.document import matching, to_text
from trio_nsq.fleet.definitions.model import (
    Defined,
    DefinedTopic,
    DefinitionsError,
    Topics,
    cycles_of,
    of_broker,
)
from trio_nsq.fleet.definitions.parsing import from_text, parse


def wanted(**topics: Any) -> Topics:
    """Return what a document with these topics wants."""
    return parse({"version": 1, "topics": topics})


def described(changes: list[DefinitionChange]) -> list[str]:
    """Return each change in a line."""
    return [
        " ".join([each.verb, each.name, *(f"{k}={v}" for k, v in each.settings.items())]) for each in changes
    ]


def applied(found: Topics, changes: list[DefinitionChange]) -> Topics:
    """Return what a naive broker has after changes."""
    topics = dict(found)
    for change in changes:
        if change.verb == "delete" and not change.channel:
            del topics[change.topic]
            continue
        topic = topics.get(change.topic, DefinedTopic())
        channels = dict(topic.channels)
        target: Defined = channels.get(change.channel, Defined()) if change.channel else topic
        if change.verb == "set":
            values = {**target.settings, **change.settings}
            target = replace(target, settings={k: v for k, v in values.items() if v is not None})
        elif change.verb in ("pause", "unpause"):
            target = replace(target, paused=change.verb == "pause")
        if not change.channel:
            assert isinstance(target, DefinedTopic)
            topics[change.topic] = target
            continue
        if change.verb == "delete":
            del channels[change.channel]
        else:
            channels[change.channel] = target
        topics[change.topic] = replace(topics[change.topic], channels=channels)
    return topics


@settings(max_examples=examples(100), deadline=None)
@given(documents(), documents())
def test_after_the_changes_there_is_nothing_to_change(
    document: Mapping[str, Any], before: Mapping[str, Any]
) -> None:
    found = applied({}, changes_to(parse(before), {}))
    for delete in (False, True):
        changes = changes_to(parse(document), found, delete=delete)
        after = applied(found, changes)
        assert changes_to(parse(document), after, delete=delete) == []
        assert changes_to(from_text(to_text(after)), after, delete=True) == []
        if delete:
            assert changes_to(from_text(to_text(after)), {}) == changes_to(
                parse(json.loads(to_text(after))), {}
            )
            assert to_text(applied({}, changes_to(from_text(to_text(after)), {}))) == to_text(after)


@settings(max_examples=examples(50), deadline=None)
@given(documents())
def test_a_document_on_an_empty_broker_is_exported_again(document: Mapping[str, Any]) -> None:
    found = applied({}, changes_to(parse(document), {}))
    assert from_text(to_text(found)) == {
        name: replace(
            topic,
            settings={k: v for k, v in topic.settings.items() if v is not None},
            paused=topic.paused or None,
            channels={
                channel: Defined(
                    {k: v for k, v in each.settings.items() if v is not None}, each.paused or None
                )
                for channel, each in topic.channels.items()
            },
        )
        for name, topic in parse(document).items()
    }


def test_what_is_not_named_stays() -> None:
    found = {
        "t": DefinedTopic({"ttl_ms": 5}, True, {"c": Defined({"max_attempts": 3}, True)}),
        "u": DefinedTopic(),
    }
    assert changes_to(wanted(t={"channels": {"c": {}}}), found) == []
    assert described(changes_to(wanted(t={"settings": {"ttl": "default"}}), found)) == ["set t ttl_ms=None"]
    assert described(changes_to(wanted(t={"paused": False}), found)) == ["unpause t"]
    assert described(changes_to(wanted(t={}), found, delete=True)) == ["delete t/c", "delete u"]


def test_topics_are_created_before_channels_get_settings() -> None:
    to_u = {"channels": {"c": {"settings": {"dead_letter_topic": "u"}, "paused": True}}}
    assert described(changes_to(wanted(t={**to_u, "settings": {"ttl": "1s"}}, u={"paused": False}), {})) == [
        "create t",
        "create u",
        "create t/c",
        "set t ttl_ms=1000",
        "set t/c dead_letter_topic=u",
        "pause t/c",
    ]


def test_dead_letter_topics_that_change_places_make_no_cycle() -> None:
    """First a's dead letters went to b, then b's to a: at no time both."""

    def channel(to: str) -> dict[str, Any]:
        return {"channels": {"c": {"settings": {"dead_letter_topic": to}}}}

    found = applied({}, changes_to(wanted(a=channel(""), b=channel("a")), {}))
    assert described(changes_to(wanted(a=channel("b"), b=channel("")), found)) == [
        "set b/c dead_letter_topic=",
        "set a/c dead_letter_topic=b",
    ]
    with pytest.raises(DefinitionsError, match='topic "a": its dead letters end up in it again'):
        changes_to(wanted(a=channel("b")), found)
    for cycle in ({"a": channel("b"), "b": channel("a")}, {"a": channel("a")}):
        with pytest.raises(DefinitionsError, match="end up in it again"):
            wanted(**cycle)


_CHAINS: st.SearchStrategy[Topics] = st.permutations("abcd").flatmap(
    lambda names: st.tuples(
        *(
            st.dictionaries(st.sampled_from("xy"), st.sampled_from(["", *names[place + 1 :]]))
            for place in range(len(names))
        )
    ).map(
        lambda channels: wanted(
            **{
                name: {
                    "channels": {each: {"settings": {"dead_letter_topic": to}} for each, to in its.items()}
                }
                for name, its in zip(names, channels, strict=True)
            }
        )
    )
)
"""Topics whose channels have dead-letter topics, without a cycle."""


@settings(max_examples=examples(60), deadline=None)
@given(_CHAINS, _CHAINS, st.booleans(), st.randoms(use_true_random=False))
def test_no_step_makes_a_cycle(before: Topics, after: Topics, delete: bool, rng: Random) -> None:
    """A broker makes the changes of a round in any order, and refuses each that makes a cycle."""
    found = applied({}, changes_to(before, {}))
    try:
        changes = changes_to(after, found, delete=delete)
    except DefinitionsError:
        assert not delete  # channels that stay make a cycle with those of the document
        return
    for places in rounds(changes):
        for place in rng.sample(places, len(places)):
            found = applied(found, [changes[place]])
            assert cycles_of(found) == []


def test_dead_letter_topics_are_not_deleted() -> None:
    channels = {"c": {"settings": {"dead_letter_topic": "dead"}}}
    dead = DefinedTopic(channels={"dead-letters": Defined(), "other": Defined()})
    found = {
        "dead": dead,
        "t": DefinedTopic(channels={"c": Defined()}),
        "damaged": DefinedTopic(unavailable="bad"),
    }
    changes = changes_to(wanted(t={"channels": channels}), found, delete=True)
    assert described(changes) == ["set t/c dead_letter_topic=dead", "delete dead/other"]
    with pytest.raises(DefinitionsError, match='topic "damaged" cannot be used: bad'):
        changes_to(wanted(damaged={}), found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "The document is not JSON: Expecting property name"),
        ("[]", "The document: this is not a JSON object."),
        ("[" * 100_000, "The document has too many levels."),
        ("\ud800", "The document is not JSON"),
        ("{}", 'The document has no "version". Add "version": 1.'),
        ('{"version": 1}', 'The document has no "topics".'),
        ('{"version": true, "topics": {}}', "The version of the document is true"),
        ('{"version": 2, "topics": {}}', "The version of the document is 2"),
        ('{"version": 1, "topic": {}}', "The document: 'topic' is unknown; there are version, topics."),
        ('{"version": 1, "topics": {"t": {}, "t": {}}}', "The document has 't' twice in one object."),
    ],
)
def test_documents_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(DefinitionsError) as refused:
        from_text(text.encode("utf-8", "surrogatepass"))
    assert problem in str(refused.value)


def test_document_in_another_encoding() -> None:
    with pytest.raises(DefinitionsError, match="The document is not UTF-8 text"):
        from_text('{"version": "é"}'.encode("latin-1"))


@pytest.mark.parametrize(
    ("topic", "problem"),
    [
        ({"t é": {}}, 'topic "t é": a name has 1 to 64 of the characters'),
        ({"t#ephemeral": {}}, 'topic "t#ephemeral" is ephemeral'),
        ({"t": []}, 'topic "t": this is not a JSON object.'),
        (
            {"t": {"retention": 1}},
            "topic \"t\": 'retention' is unknown; there are settings, paused, channels.",
        ),
        ({"t": {"paused": 1}}, 'topic "t": paused is 1; it must be true or false.'),
        (
            {"t": {"settings": {"ttl_ms": 1}}},
            "settings of topic \"t\": 'ttl_ms' is unknown; there are retention_time,",
        ),
        ({"t": {"settings": {"ttl": "1"}}}, "topic \"t\": ttl: '1' has no unit: write 1s for seconds"),
        ({"t": {"settings": {"ttl": True}}}, 'topic "t": ttl: true is neither text nor an integer.'),
        (
            {"t": {"settings": {"ttl": "forever"}}},
            'topic "t": ttl_ms is -1; it must be a whole number, 0 or more.',
        ),
        (
            {"t": {"settings": {"when_full": "x"}}},
            "topic \"t\": when_full is 'x'; it must be reject or drop-oldest.",
        ),
        ({"t": {"channels": {"": {}}}}, 'channel "t/": a name has'),
        ({"t": {"channels": {"c": {"channels": {}}}}}, "channel \"t/c\": 'channels' is unknown"),
        (
            {"t": {"channels": {"c": {"settings": {"order_by": "x"}}}}},
            "channel \"t/c\": order_by is 'x'; it must be",
        ),
        (
            {"t": {"channels": {"c": {"settings": {"max_attempts": 65536}}}}},
            "max_attempts is 65536; the maximum is",
        ),
    ],
)
def test_bad_topics_are_refused_with_all_problems(topic: dict[str, Any], problem: str) -> None:
    with pytest.raises(DefinitionsError) as refused:
        parse({"version": 1, "topics": {"a b": {}, **topic}})
    first, second = refused.value.problems
    assert first.startswith('topic "a b"')
    assert problem in second


def test_brokers_together() -> None:
    one = {"t": DefinedTopic({"ttl_ms": 1000}, False, {"c": Defined(), "d": Defined({"max_attempts": 1})})}
    two = {"t": DefinedTopic({"ttl_ms": 1000}, False, {"c": Defined()}), "u": DefinedTopic()}
    both = together({"one:1": one, "two:1": two})
    assert matching(both.topics, ["[a-t]"]) == one
    assert sorted(both.topics) == ["t", "u"]
    assert both.lacking == [
        'The channel "t/d" is not on two:1.',
        'The topic "u" is not on one:1.',
    ]
    assert both.differences == []
    other = {"t": DefinedTopic({}, False, {"c": Defined({"dead_letter_topic": ""}, True)})}
    assert together({"one:1": one, "two:1": two, "three:1": other}).differences == [
        'topic "t": ttl is 1s on one:1, 1s on two:1, default on three:1.',
        'channel "t/c": dead_letter_topic is default on one:1, default on two:1, empty on three:1.',
        'channel "t/c": paused is false on one:1, false on two:1, true on three:1.',
    ]


def test_settings_of_newer_brokers_are_not_lost() -> None:
    newer = {"topic_name": "t", "paused": False, "settings": {"shape": 1}, "channels": []}
    found = of_broker({"topics": [newer]})  # type: ignore[list-item]
    assert changes_to(wanted(t={}), found) == []
    with pytest.raises(
        DefinitionsError, match='topic "t" has the setting shape, which this version does not know'
    ):
        to_text(found)
