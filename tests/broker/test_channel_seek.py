"""Tests for seeking and peeking in a channel."""

from itertools import islice
from pathlib import Path

import pytest

from broker.state import MS, SECOND, TIMESTAMP, Fixture, damage, disk_log
from trio_nsq.broker.state.channel_messages import STATES, State
from trio_nsq.broker.state.checkpoint import first_needed
from trio_nsq.broker.state.seek import Seek, SeekResult
from trio_nsq.log import MemoryLog


def waiting(fixture: Fixture, name: str = "channel") -> list[tuple[State, int, int, int]]:
    """Return the next messages of a channel: state, sequence, attempts so far, due after milliseconds."""
    channel = fixture.topic.channels[name]
    return [
        (each.state, each.sequence, each.attempts, (each.due_ns - fixture.now_ns) // MS if each.due_ns else 0)
        for state in STATES
        for each in channel.messages.peek(state)
    ]


def seek(fixture: Fixture, sequence: int, name: str = "channel") -> SeekResult:
    """Move a channel, and check that the preview had the same effect."""
    channel = fixture.topic.channels[name]
    foretold = fixture.seek(sequence, name)
    assert channel.cursor >= foretold.to_sequence
    return foretold


@pytest.fixture
def fixture() -> Fixture:
    """Ten messages m0 to m9, one per record, and two channels."""
    fixture = Fixture()
    fixture.channel()
    fixture.channel("other")
    fixture.publish_many(10)
    return fixture


# ---------------------------------------------------------------------- peek


def test_peek_in_each_state(fixture: Fixture) -> None:
    subscriber = fixture.subscriber(ready=4)
    received = subscriber.receive()
    subscriber.requeue(received[2])
    subscriber.requeue(received[1])
    subscriber.requeue(received[0], 500)
    subscriber.ready(0)
    fixture.publish(b"soon", defer_ms=200)
    fixture.publish(b"last")
    assert waiting(fixture) == [
        ("requeued", 2, 1, 0),
        ("requeued", 1, 1, 0),
        *(("fresh", sequence, 0, 0) for sequence in range(4, 10)),
        ("fresh", 11, 0, 0),
        ("deferred", 10, 0, 200),
        ("deferred", 0, 1, 500),
    ]
    assert fixture.counts() == (9, 1, 2)


def test_peek_takes_nothing_and_is_lazy(fixture: Fixture) -> None:
    channel = fixture.topic.channels["channel"]
    assert [each.sequence for each in islice(channel.messages.peek("fresh"), 3)] == [0, 1, 2]
    assert fixture.drain() == [b"m%d" % number for number in range(10)]
    assert waiting(fixture) == []


def test_peek_skips_emptied_messages(fixture: Fixture) -> None:
    fixture.topic.pause()
    fixture.publish(b"lost")
    fixture.topic.empty()
    fixture.topic.unpause()
    fixture.publish(b"kept")
    assert [each.sequence for each in fixture.topic.channels["channel"].messages.peek("fresh")] == [
        *range(10),
        11,
    ]


# ---------------------------------------------------------------------- backwards


def test_seek_back_to_finished_messages(fixture: Fixture) -> None:
    assert fixture.drain() == [b"m%d" % number for number in range(10)]
    assert seek(fixture, 7) == SeekResult(10, 7, 3, 0, 0)
    assert fixture.counts() == (3, 0, 0)
    assert fixture.drain() == [b"m7", b"m8", b"m9"]


def test_other_channels_are_not_affected(fixture: Fixture) -> None:
    fixture.drain("channel")
    subscriber = fixture.subscriber("other", ready=4)
    received = subscriber.receive()
    seek(fixture, 0)
    assert fixture.counts("other") == (6, 4, 0)
    assert subscriber.finish(received) == []


def test_attempts_start_again(fixture: Fixture) -> None:
    subscriber = fixture.subscriber(ready=2)
    for _ in range(3):
        for message in subscriber.receive():
            subscriber.requeue(message)
    seek(fixture, 0)
    assert [(message.body, message.attempts) for message in subscriber.receive()] == [(b"m0", 1), (b"m1", 1)]


def test_messages_in_flight_cannot_be_finished_anymore(fixture: Fixture) -> None:
    subscriber = fixture.subscriber(ready=4)
    received = subscriber.receive()
    assert seek(fixture, 2) == SeekResult(4, 2, 0, 2, 4)
    subscriber.ready(0)
    assert subscriber.finish(received) == [(message.id, "ID not in flight") for message in received]
    assert fixture.counts() == (8, 0, 0)
    subscriber.ready(3)
    assert subscriber.receive_bodies() == [b"m2", b"m3", b"m4"]
    fixture.pass_ms(60_000)
    assert fixture.topic.channels["channel"].timeout_count == 3


def test_window_of_a_consumer_is_free_again(fixture: Fixture) -> None:
    subscriber = fixture.subscriber(ready=3)
    assert len(subscriber.receive()) == 3
    assert subscriber.receive() == []
    seek(fixture, 5)
    assert subscriber.receive_bodies() == [b"m5", b"m6", b"m7"]


def test_emptied_messages_are_delivered_again(fixture: Fixture) -> None:
    fixture.topic.channels["channel"].empty()
    assert seek(fixture, 8) == SeekResult(10, 8, 2, 0, 0)
    assert fixture.drain() == [b"m8", b"m9"]


def test_seek_into_the_middle_of_a_record() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a", b"b", b"c", b"d")
    fixture.drain()
    seek(fixture, 2)
    assert fixture.drain() == [b"c", b"d"]


def test_requeued_messages_are_delivered_once(fixture: Fixture) -> None:
    subscriber = fixture.subscriber(ready=6)
    for message in subscriber.receive()[:3]:
        subscriber.requeue(message)
    subscriber.leave()
    assert seek(fixture, 1) == SeekResult(6, 1, 0, 1, 0)
    assert fixture.drain() == [b"m%d" % number for number in range(1, 10)]


# ---------------------------------------------------------------------- forwards


def test_seek_forward(fixture: Fixture) -> None:
    assert seek(fixture, 6) == SeekResult(0, 6, 0, 6, 0)
    assert fixture.drain() == [b"m6", b"m7", b"m8", b"m9"]


def test_seek_to_the_end_and_beyond(fixture: Fixture) -> None:
    for sequence in (10, 11, 2**70):
        assert seek(fixture, sequence).to_sequence == 10
        assert waiting(fixture) == []
    fixture.publish(b"new")
    assert fixture.drain() == [b"new"]


def test_seek_stops_at_the_high_watermark(fixture: Fixture) -> None:
    fixture.topic.pause()
    fixture.publish(b"waits")
    assert seek(fixture, 11) == SeekResult(0, 10, 0, 10, 0)
    fixture.topic.unpause()
    assert fixture.drain() == [b"waits"]


def test_requeued_and_deferred_messages_are_skipped(fixture: Fixture) -> None:
    fixture.publish(b"later", defer_ms=1000)
    subscriber = fixture.subscriber(ready=4)
    received = subscriber.receive()
    subscriber.requeue(received[0])
    subscriber.requeue(received[1], 50)
    subscriber.ready(0)
    assert seek(fixture, 11) == SeekResult(4, 11, 0, 11, 2)
    fixture.pass_ms(5000)
    assert fixture.counts() == (0, 0, 0)


def test_dropped_holes_are_not_counted_twice(fixture: Fixture) -> None:
    fixture.topic.pause()
    fixture.publish_many(5)
    fixture.topic.empty()
    fixture.topic.unpause()
    fixture.publish_many(5)
    assert seek(fixture, 12) == SeekResult(0, 12, 3, 10, 0)  # three of the five emptied ones are delivered
    assert fixture.counts() == (8, 0, 0)


# ---------------------------------------------------------------------- deferred messages


@pytest.mark.parametrize("sequence", [0, 5, 10])
def test_message_deferred_by_its_publisher_waits_until_due(fixture: Fixture, sequence: int) -> None:
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"now")
    assert seek(fixture, sequence).skipped == sequence
    assert fixture.counts() == (11 - sequence, 0, 1)
    assert fixture.drain()[-1] == b"now"
    fixture.pass_ms(999)
    assert fixture.drain() == []
    fixture.pass_ms(1)
    assert fixture.drain() == [b"later"]


def test_also_if_the_channel_had_passed_it(fixture: Fixture) -> None:
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"now")
    fixture.drain()
    assert seek(fixture, 9) == SeekResult(12, 9, 2, 0, 0)
    assert fixture.drain() == [b"m9", b"now"]
    fixture.pass_ms(1000)
    assert fixture.drain() == [b"later"]


def test_due_message_is_delivered_in_order(fixture: Fixture) -> None:
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"now")
    fixture.drain()
    fixture.pass_ms(1000)
    fixture.drain()
    seek(fixture, 9)
    assert fixture.drain() == [b"m9", b"later", b"now"]


def test_due_message_is_ready_without_a_tick(fixture: Fixture) -> None:
    """It was due before the channel got it: the topic was paused."""
    fixture.drain()
    fixture.topic.pause()
    fixture.publish(b"later", defer_ms=10)
    fixture.now_ns += 10 * MS
    fixture.topic.unpause()
    assert fixture.counts() == (0, 0, 1)
    seek(fixture, 10)
    assert fixture.counts() == (1, 0, 0)
    assert fixture.drain() == [b"later"]


def test_message_deferred_by_a_consumer_is_delivered_at_once(fixture: Fixture) -> None:
    subscriber = fixture.subscriber(ready=1)
    (message,) = subscriber.receive()
    subscriber.requeue(message, 60_000)
    subscriber.leave()
    seek(fixture, 0)
    assert fixture.counts() == (10, 0, 0)
    assert fixture.drain()[0] == b"m0"


@pytest.mark.parametrize("name", ["topic", "topic#ephemeral"])
def test_deferred_message_from_before_the_channel_waits(name: str) -> None:
    """The channel is created after the publish, and seeks to before it."""
    fixture = Fixture(name=name)
    fixture.channel("first")
    fixture.publish(b"a")
    fixture.publish(b"later", b"later still", defer_ms=1000)
    fixture.publish(b"b")
    fixture.channel("second")
    assert fixture.counts("second") == (0, 0, 0)
    assert seek(fixture, 0, "second") == SeekResult(4, 0, 4, 0, 0)
    assert fixture.counts("second") == (4, 0, 0)
    assert fixture.drain("second") == [b"a", b"b"]
    assert fixture.counts("second") == (0, 0, 2)
    assert fixture.topic.channels["second"].next_due_ns == fixture.now_ns + 1000 * MS
    fixture.pass_ms(1000)
    assert fixture.drain("second") == [b"later", b"later still"]


def test_seek_into_the_middle_of_deferred_messages() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a", b"b", b"c", b"d", defer_ms=1000)
    fixture.topic.channels["channel"].empty()
    seek(fixture, 2)
    assert fixture.drain() == []
    fixture.pass_ms(1000)
    assert fixture.drain() == [b"c", b"d"]


@pytest.mark.parametrize("gone", [False, True])
def test_messages_withdrawn_before_and_after_a_seek_are_distinguished(fixture: Fixture, gone: bool) -> None:
    channel = fixture.topic.channels["channel"]
    before = channel.withdraw([4])
    seek(fixture, 0)
    after = channel.withdraw([4])
    if gone:
        assert channel.dispose(before) == 0
    else:
        channel.put_back(before)
    assert fixture.counts() == (10, 0, 0)
    channel.put_back(after)
    assert sorted(fixture.drain()) == [b"m%d" % number for number in range(10)]


def test_concurrent_changes_while_a_seek_is_prepared() -> None:
    """The preparation has small steps, and any operation may happen in between."""
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish_many(5000, each=1000)
    subscriber = fixture.subscriber(ready=2000)
    received = subscriber.receive()
    for number in range(3000):
        fixture.publish(b"later%d" % number, defer_ms=1000 + number % 7 * 1000)
    for message in received[:500]:
        subscriber.requeue(message, 60_000)
    assert subscriber.finish(received[500:600]) == []
    seek = Seek(channel, 300, fixture.now_ns)
    late: list[bytes] = []
    for number, _ in enumerate(seek.prepare()):
        late.append(b"late%d" % number)
        fixture.publish(late[-1], defer_ms=20 + number % 5 * 1000)
        late.append(b"now%d" % number)
        fixture.publish(late[-1])
        subscriber.requeue(received[1500 + number], 70_000)
        subscriber.finish(received[600 + number : 601 + number])
        channel.cancel([5000 + number, 6500 + number])
        fixture.pass_ms(500)
        subscriber.receive()
    assert len(late) > 10
    seek.move(channel)
    subscriber.leave()
    assert fixture.counts()[1] == 0
    bodies = fixture.drain()
    while channel.next_due_ns is not None:
        fixture.pass_ms(1000)
        bodies += fixture.drain()
    expected = [b"m%d" % n for n in range(300, 5000)] + [b"later%d" % n for n in range(3000)] + late
    assert sorted(bodies) == sorted(expected)
    assert fixture.counts() == (0, 0, 0)


def test_message_deferred_while_a_seek_is_prepared_does_not_count_as_ready() -> None:
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish_many(3)
    fixture.drain()
    seek = Seek(channel, 0, fixture.now_ns)
    for _ in seek.prepare():
        pass
    fixture.publish(b"late", defer_ms=1000)
    seek.move(channel)
    assert fixture.counts() == (3, 0, 1)
    assert fixture.drain() == [b"m0", b"m1", b"m2"]
    fixture.pass_ms(1000)
    assert fixture.drain() == [b"late"]


def test_abandoned_seek_changes_nothing(fixture: Fixture) -> None:
    fixture.publish(b"later", defer_ms=1000)
    channel = fixture.topic.channels["channel"]
    seek = Seek(channel, 7, fixture.now_ns)
    for _ in seek.prepare():
        pass
    seek.close()
    assert fixture.counts() == (10, 0, 1)
    assert fixture.drain() == [b"m%d" % number for number in range(10)]


@pytest.mark.parametrize("restart", [False, True])
def test_undistributed_deferred_messages_of_a_paused_topic_are_delivered_once(restart: bool) -> None:
    """Also if the high watermark is past them, because the messages around them expired."""
    fixture = Fixture()
    fixture.channel()
    fixture.publish_many(2)
    fixture.drain()
    fixture.topic.pause()
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"expired")
    fixture.topic.limits.expire_before(4)
    move = fixture.seek(0)
    assert (move.delivered_again, move.skipped) == (3, 0)
    if restart:
        fixture = fixture.restarted(fixture.topic.snapshot())
    assert fixture.drain() == [b"m0", b"m1", b"expired"]
    fixture.topic.unpause()
    assert fixture.drain() == []
    fixture.pass_ms(1000)
    assert fixture.drain() == [b"later"]
    assert fixture.counts() == (0, 0, 0)


# ---------------------------------------------------------------------- restarts, damage, memory


def test_seek_survives_a_restart(fixture: Fixture) -> None:
    fixture.publish(b"later", defer_ms=1000)
    fixture.drain()
    seek(fixture, 8)
    other = fixture.restarted(fixture.topic.snapshot())
    assert other.counts() == (2, 0, 1)
    assert other.drain() == [b"m8", b"m9"]
    other.pass_ms(1000)
    assert other.drain() == [b"later"]


def test_messages_after_the_seek_are_kept(fixture: Fixture) -> None:
    for name in ("channel", "other"):
        fixture.drain(name)
    assert first_needed(fixture.topic.snapshot()) == 10
    seek(fixture, 3)
    assert first_needed(fixture.topic.snapshot()) == 3


def test_damage_is_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    fixture = Fixture(disk_log(folder), cache_bytes=0)
    fixture.channel()
    fixture.publish_many(6)
    fixture.drain()
    fixture.log.close()
    damage(folder, b"m3")
    other = fixture.restarted(fixture.topic.snapshot(), disk_log(folder))
    seek(other, 2)
    assert other.drain() == [b"m2", b"m4", b"m5"]
    other.log.close()


def test_deferred_message_in_memory_survives_a_full_memory_after_a_seek() -> None:
    fixture = Fixture(MemoryLog(max_messages=3), name="topic#ephemeral")
    channel = fixture.channel()
    fixture.publish(b"later", defer_ms=60_000)
    assert channel.cancel([0]) == [0]
    seek(fixture, 0)
    subscriber = fixture.subscriber(ready=10)
    assert subscriber.receive_bodies() == []
    fixture.publish_many(5)
    assert fixture.log.first_sequence > 0
    subscriber.finish(subscriber.receive())
    fixture.cache.forget_topic("topic#ephemeral")
    fixture.pass_ms(60_000)
    assert subscriber.receive_bodies() == [b"later"]


def test_topic_in_memory() -> None:
    fixture = Fixture(MemoryLog(max_messages=4), name="topic#ephemeral")
    fixture.channel()
    fixture.publish_many(10)
    fixture.drain()
    assert fixture.log.first_sequence == 6
    seek(fixture, 6)
    assert fixture.drain() == [b"m6", b"m7", b"m8", b"m9"]


def test_seek_to_the_beginning_keeps_older_undelivered_messages() -> None:
    """They are no longer in the log, but the channel has not delivered them."""
    fixture = Fixture(MemoryLog(max_messages=4), name="topic#ephemeral")
    fixture.channel()
    subscriber = fixture.subscriber(ready=3)
    fixture.publish(b"requeued")
    fixture.publish(b"deferred")
    fixture.publish(b"in flight")
    fixture.publish(b"later", defer_ms=300)
    received = subscriber.receive()
    subscriber.requeue(received[1], 200)
    subscriber.ready(1)
    subscriber.requeue(received[0])
    fixture.publish_many(10)
    assert fixture.log.first_sequence == 10
    assert seek(fixture, 10) == SeekResult(10, 10, 0, 0, 1)
    subscriber.leave()
    assert sorted(fixture.drain()) == [b"in flight", b"m6", b"m7", b"m8", b"m9", b"requeued"]
    fixture.pass_ms(300)
    assert fixture.drain() == [b"deferred", b"later"]
    assert seek(fixture, 11).skipped == 0


def test_seek_further_on_skips_them() -> None:
    fixture = Fixture(MemoryLog(max_messages=4), name="topic#ephemeral")
    fixture.channel()
    fixture.publish(b"later", defer_ms=300)
    fixture.publish_many(10)
    assert seek(fixture, 8) == SeekResult(7, 8, 0, 2, 0)
    fixture.pass_ms(300)
    assert fixture.drain() == [b"m7", b"m8", b"m9"]


def test_paused_channel_can_seek(fixture: Fixture) -> None:
    channel = fixture.topic.channels["channel"]
    channel.paused = True
    subscriber = fixture.subscriber(ready=100)
    seek(fixture, 8)
    assert subscriber.receive() == []
    channel.paused = False
    assert subscriber.receive_bodies() == [b"m8", b"m9"]


def test_messages_older_than_the_ttl_are_not_delivered_again() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish_many(5)
    fixture.drain()
    fixture.topic.configure({"ttl_ms": 1000})
    fixture.now_ns = TIMESTAMP + 2 * SECOND
    seek(fixture, 0)
    assert fixture.drain() == []
    assert fixture.topic.channels["channel"].messages.expired_count == 5
