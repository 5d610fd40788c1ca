"""Tests that a change of settings drops as many messages as its preview says."""

from collections.abc import Callable

import pytest

from broker.state import MS, SECOND, Fixture
from trio_nsq.broker.state.channel_messages import ChannelMessages
from trio_nsq.broker.state.topic_limits import TopicLimits
from trio_nsq.log import RecordBatch
from trio_nsq.protocol import pack_messages

PAST_MS = 20


def publish(fixture: Fixture, *bodies: bytes, defer_ms: int = 0) -> None:
    """Publish one record now."""
    due_ns = fixture.now_ns + defer_ms * MS if defer_ms else 0
    first_id = fixture.ids.take(len(bodies))
    record = RecordBatch(fixture.log.next_sequence, first_id, fixture.now_ns, due_ns, pack_messages(bodies))
    fixture.log.append([record], sync=False)
    fixture.topic.accept([record])


def messages(fixture: Fixture) -> None:
    """Two channels at different positions, with requeued, in-flight and deferred messages."""
    fixture.channel("behind")
    ahead = fixture.subscriber("ahead", ready=3)
    publish(fixture, b"a", b"b", b"c")
    taken = ahead.receive()
    ahead.ready(0)
    ahead.requeue(taken[0])
    fixture.pass_ms(PAST_MS)
    publish(fixture, b"later", defer_ms=1000)
    publish(fixture, b"d", b"e")
    publish(fixture, b"f")


def paused(fixture: Fixture) -> None:
    """Messages that no channel has yet, one of them deferred."""
    fixture.channel("behind")
    publish(fixture, b"a")
    fixture.topic.pause()
    publish(fixture, b"b", b"c")
    publish(fixture, b"later", defer_ms=1000)
    fixture.pass_ms(PAST_MS)
    publish(fixture, b"d", b"e", b"f")


def no_channel(fixture: Fixture) -> None:
    """A topic without channels."""
    publish(fixture, b"1", b"2", b"3", b"4", b"5")
    fixture.pass_ms(PAST_MS)
    publish(fixture, b"new")


def dropped(fixture: Fixture) -> int:
    """Return how many messages were dropped so far, for a limit or for their age."""
    everywhere: list[TopicLimits | ChannelMessages] = [
        fixture.topic.limits,
        *[channel.messages for channel in fixture.topic.channels.values()],
    ]
    return sum(each.dropped_count + each.expired_count for each in everywhere)


@pytest.mark.parametrize("prepare", [messages, paused, no_channel])
@pytest.mark.parametrize(
    "changes",
    [
        {"max_messages": 2, "when_full": "drop-oldest"},
        {"max_messages": 1, "when_full": "drop-oldest"},
        {"max_bytes": 60, "when_full": "drop-oldest"},
        {"max_bytes": 1, "when_full": "drop-oldest"},
        {"max_messages": 1000, "max_bytes": 10**6, "when_full": "drop-oldest"},
        {"max_messages": 1},
        {"retention_time_ms": 1, "retention_bytes": 1},
        {"ttl_ms": PAST_MS // 2},
        {"ttl_ms": 1_000_000},
    ],
    ids=str,
)
def test_preview_equals_the_effect(prepare: Callable[[Fixture], None], changes: dict[str, object]) -> None:
    fixture = Fixture()
    fixture.now_ns = 1_700_000_000 * SECOND
    prepare(fixture)
    topic = fixture.topic
    settings = topic.settings_with(changes)
    expired_before = topic.store.first_since(fixture.now_ns - settings.ttl_ms * MS) if settings.ttl_ms else 0
    foreseen = topic.limits.would_drop(settings, expired_before)
    assert (dropped(fixture), topic.settings_with({})) == (0, topic.settings)
    topic.configure(changes)
    topic.limits.make_room()
    if expired_before:
        topic.limits.expire_before(expired_before)
        for name in list(topic.channels):
            fixture.drain(name)  # requeued messages are checked when they are to be delivered
    assert foreseen == dropped(fixture)


def test_messages_dropped_anyway_do_not_count() -> None:
    fixture = Fixture()
    fixture.topic.configure({"max_messages": 2, "when_full": "drop-oldest"})
    fixture.channel()
    fixture.publish_many(5)  # make_room is called a moment later
    assert fixture.topic.limits.would_drop(fixture.topic.settings_with({"retention_time_ms": 5}), 0) == 0
    assert fixture.topic.limits.would_drop(fixture.topic.settings_with({"max_messages": 1}), 0) == 4
