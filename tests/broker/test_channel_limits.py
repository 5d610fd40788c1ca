"""Tests for dropped messages: by TTL, and by limits of messages and bytes."""

from pathlib import Path

import pytest

from broker.state import MS, TIMESTAMP, Fixture, Subscriber, disk_log
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.checkpoint import first_needed
from trio_nsq.log import DiskLog, Log, MemoryLog, RecordBatch
from trio_nsq.protocol import pack_messages

TTL_MS = 1000


def publish_at(fixture: Fixture, at_ms: int, *bodies: bytes, due_ms: int = 0) -> None:
    """Publish one record, at milliseconds after TIMESTAMP."""
    due_ns = TIMESTAMP + due_ms * MS if due_ms else 0
    record = RecordBatch(
        fixture.log.next_sequence,
        fixture.ids.take(len(bodies)),
        TIMESTAMP + at_ms * MS,
        due_ns,
        pack_messages(bodies),
    )
    fixture.log.append([record], sync=False)
    fixture.topic.accept([record])


def at(fixture: Fixture, ms: int) -> None:
    """Set the time to milliseconds after TIMESTAMP."""
    fixture.now_ns = TIMESTAMP + ms * MS
    fixture.pass_ms(0)


def fixture_with(log: Log | None = None, **settings: object) -> Fixture:
    fixture = Fixture(log)
    at(fixture, 0)
    fixture.topic.configure(settings)
    return fixture


def counts(channel: Channel) -> tuple[int, int, int]:
    return channel.depth, channel.messages.expired_count, channel.messages.dropped_count


# ---------------------------------------------------------------------- TTL


def test_message_older_than_the_ttl_is_not_delivered() -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    channel = fixture.channel()
    publish_at(fixture, 0, b"a", b"b")
    publish_at(fixture, 500, b"c")
    publish_at(fixture, 501, b"d")
    at(fixture, TTL_MS + 501)
    assert counts(channel) == (4, 0, 0)
    assert fixture.drain() == [b"d"]
    assert counts(channel) == (0, 3, 0)


def test_message_exactly_as_old_as_the_ttl_is_delivered() -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    fixture.channel()
    publish_at(fixture, 0, b"a")
    at(fixture, TTL_MS)
    assert fixture.drain() == [b"a"]


def test_old_part_of_a_batch_is_dropped() -> None:
    """Records that are read together are one batch."""
    fixture = fixture_with(MemoryLog(max_messages=10**6), ttl_ms=TTL_MS)
    channel = fixture.channel()
    for n in range(10):
        publish_at(fixture, 100 * n, b"%d" % n, b"%d again" % n)
    fixture.cache.forget_topic("topic")
    at(fixture, TTL_MS + 450)
    subscriber = fixture.subscriber(ready=3)
    assert subscriber.receive_bodies() == [b"5", b"5 again", b"6"]
    assert counts(channel) == (7, 10, 0)


def test_without_a_ttl_nothing_expires() -> None:
    fixture = fixture_with()
    fixture.channel()
    publish_at(fixture, 0, b"a")
    at(fixture, 10**9)
    assert fixture.drain() == [b"a"]


@pytest.mark.parametrize("delay_ms", [0, 10])
def test_old_message_is_dropped_at_a_requeue(delay_ms: int) -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    publish_at(fixture, 0, b"a")
    publish_at(fixture, 800, b"b")
    subscriber = fixture.subscriber(ready=10)
    for message in subscriber.receive():
        assert subscriber.requeue(message, delay_ms) is None
    at(fixture, TTL_MS + 100)
    assert subscriber.receive_bodies() == [b"b"]
    assert counts(subscriber.channel) == (0, 1, 0)


def test_old_message_is_dropped_at_a_timeout_and_can_be_finished_while_in_flight() -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    slow, quick = [fixture.subscriber(name, ready=1, msg_timeout_ms=2000) for name in ("slow", "quick")]
    publish_at(fixture, 0, b"a")
    slow.receive()
    (message,) = quick.receive()
    at(fixture, 1999)
    assert quick.finish([message]) == []
    at(fixture, 2000)
    assert slow.receive() == []
    assert counts(slow.channel) == (0, 1, 0)
    assert counts(quick.channel) == (0, 0, 0)


def test_deferred_message_expires_by_its_publish_time() -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    fixture.channel()
    publish_at(fixture, 0, b"too late", due_ms=1001)
    publish_at(fixture, 0, b"in time", due_ms=1000)
    at(fixture, 1000)
    subscriber = fixture.subscriber(ready=10)
    assert subscriber.receive_bodies() == [b"in time"]
    at(fixture, 1001)
    assert subscriber.receive() == []
    assert subscriber.channel.messages.expired_count == 1


def test_gigabytes_of_expired_messages_are_not_read(tmp_path: Path) -> None:
    log = disk_log(tmp_path / "log", segment_bytes=10**6)
    fixture = Fixture(log, mem_queue_size=1, cache_bytes=0)
    fixture.topic.configure({"ttl_ms": TTL_MS})
    channel = fixture.channel()
    for n in range(2000):
        publish_at(fixture, n, b"%4d" % n * 500)
    read: list[int] = []
    fixture.topic.log = Counting(log, read)  # type: ignore[assignment]
    at(fixture, TTL_MS + 1990)
    assert [body[:4] for body in fixture.drain()] == [b"%4d" % n for n in range(1990, 2000)]
    assert channel.messages.expired_count == 1990
    assert sum(read) < 200
    log.close()


class Counting:
    """A log that counts the records that it returns."""

    def __init__(self, log: DiskLog, read: list[int]) -> None:
        self._log = log
        self._counts = read

    def read(self, sequence: int, *args: int) -> list[RecordBatch]:
        found = self._log.read(sequence, *args)
        self._counts.append(len(found))
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


def test_expired_messages_are_dropped_everywhere() -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    ahead, behind = fixture.channel("ahead"), fixture.channel("behind")
    publish_at(fixture, 0, b"a", b"b")
    publish_at(fixture, 0, b"deferred", due_ms=5000)
    fixture.drain("ahead")
    fixture.topic.pause()
    publish_at(fixture, 10, b"c", b"d")
    publish_at(fixture, 20, b"e")
    fixture.topic.limits.expire_before(fixture.topic.store.first_since(TIMESTAMP + 20 * MS))
    assert (counts(ahead), counts(behind)) == ((0, 0, 0), (0, 2, 0))
    assert (fixture.topic.depth, fixture.topic.limits.expired_count) == (1, 2)
    fixture.topic.unpause()
    assert fixture.drain("ahead") == fixture.drain("behind") == [b"e"]


def test_drops_at_once_are_limited_and_continue_later() -> None:
    fixture = fixture_with(ttl_ms=TTL_MS)
    channel = fixture.channel()
    for n in range(1000):
        publish_at(fixture, 0, b"%d" % n)
    subscriber = fixture.subscriber(ready=1000)
    for message in subscriber.receive():
        subscriber.requeue(message)
    subscriber.leave()
    at(fixture, 5000)
    fixture.subscriber()
    dropped: list[int] = []
    while not dropped or channel.dispatcher.budget_exhausted:
        before = channel.messages.expired_count
        assert channel.dispatcher.dispatch(fixture.now_ns) == []
        dropped.append(channel.messages.expired_count - before)
    assert dropped == [256, 256, 256, 232]
    assert counts(channel) == (0, 1000, 0)


def test_many_records_to_skip_take_several_turns() -> None:
    fixture = fixture_with()
    fixture.channel("other")
    channel = fixture.channel()
    for n in range(600):
        fixture.publish(b"%d" % n, only="other")
    fixture.publish(b"for both")
    fixture.drain()
    fixture.seek(0)
    fixture.subscriber()
    turns = 0
    while not (grants := channel.dispatcher.dispatch(fixture.now_ns)):
        assert channel.dispatcher.budget_exhausted
        turns += 1
    assert turns == 600 // 256
    assert len(grants) == 1
    assert not channel.dispatcher.budget_exhausted


# ---------------------------------------------------------------------- limits


def test_full_topic_names_the_reason_of_the_refusal() -> None:
    fixture = fixture_with(max_messages=3)
    topic = fixture.topic
    fixture.publish(b"a", b"b")
    assert topic.limits.why_full(1, 10) == ""
    assert topic.limits.why_full(2, 10) == (
        "topic topic is full: 2 messages wait, 2 more are too many: max_messages is 3"
    )
    assert topic.limits.why_full(1, 10, coming_messages=1) == (
        "topic topic is full: 3 messages wait, 1 more are too many: max_messages is 3"
    )
    assert topic.limits.why_full(4, 10) == "topic topic cannot take 4 messages at once: max_messages is 3"
    fixture.publish(b"c")
    subscriber = fixture.subscriber(ready=1)
    fixture.channel("later")
    assert topic.limits.why_full(1, 10) == (
        "topic topic is full: 3 messages wait, 1 more are too many: max_messages is 3"
    )
    subscriber.receive()
    assert topic.limits.why_full(1, 10) == ""  # messages in flight do not count
    topic.pause()
    fixture.publish(b"d")
    assert topic.limits.why_full(1, 10)


def test_largest_channel_counts() -> None:
    fixture = fixture_with(max_messages=2)
    fixture.channel("idle")
    fixture.publish(b"a", b"b")
    assert fixture.topic.limits.why_full(1, 10)
    fixture.drain("idle")
    assert not fixture.topic.limits.why_full(1, 10)


@pytest.mark.parametrize("on_disk", [False, True])
def test_topic_with_too_many_bytes_refuses(tmp_path: Path, on_disk: bool) -> None:
    log: Log = disk_log(tmp_path / "log") if on_disk else MemoryLog(max_messages=10**6)
    fixture = fixture_with(log, max_bytes=5000)
    fixture.channel()
    assert fixture.topic.limits.why_full(1, 5000) == ""
    assert fixture.topic.limits.why_full(1, 5001)
    for _ in range(20):
        fixture.publish(b"x" * 200)
    assert fixture.topic.limits.why_full(1, 300)
    assert "max_bytes is 5000" in fixture.topic.limits.why_full(1, 300)
    fixture.drain()
    assert fixture.topic.limits.why_full(1, 5000) == ""


def test_settings_of_zero_are_no_limit() -> None:
    fixture = fixture_with()
    fixture.publish_many(1000)
    assert not fixture.topic.may_refuse
    assert fixture.topic.limits.why_full(10**6, 10**9) == ""
    fixture.topic.limits.make_room()
    assert fixture.topic.depth == 1000


def test_oldest_messages_are_dropped() -> None:
    fixture = fixture_with(max_messages=3, when_full="drop-oldest")
    ahead, behind = fixture.channel("ahead"), fixture.channel("behind")
    fixture.publish(b"a", b"b")
    fixture.drain("ahead")
    fixture.publish(b"c", b"d")
    assert fixture.topic.limits.why_full(100, 10**9) == ""
    fixture.topic.limits.make_room()
    assert (counts(ahead), counts(behind)) == ((2, 0, 0), (3, 0, 1))
    assert (fixture.drain("ahead"), fixture.drain("behind")) == ([b"c", b"d"], [b"b", b"c", b"d"])


def test_requeued_messages_are_dropped_first_and_messages_in_flight_stay() -> None:
    fixture = fixture_with(max_messages=2, when_full="drop-oldest")
    fixture.publish(b"a", b"b", b"c")
    subscriber = fixture.subscriber(ready=3)
    messages = subscriber.receive()
    assert [message.body for message in messages] == [b"a", b"b", b"c"]
    subscriber.ready(0)
    assert subscriber.requeue(messages[0]) is None
    fixture.publish(b"d", b"e", b"f")
    fixture.topic.limits.make_room()
    assert counts(subscriber.channel) == (2, 0, 2)
    assert subscriber.channel.in_flight_count == 2
    assert subscriber.finish(messages[1:]) == []
    assert fixture.drain() == [b"e", b"f"]


def test_deferred_messages_are_not_dropped() -> None:
    fixture = fixture_with(max_messages=2, when_full="drop-oldest")
    channel = fixture.channel()
    fixture.publish(b"a")
    fixture.publish(b"later", defer_ms=10)
    fixture.publish(b"b", b"c")
    fixture.publish(b"later still", defer_ms=20)
    fixture.publish(b"d")
    fixture.topic.limits.make_room()
    assert counts(channel) == (2, 0, 2)
    assert channel.deferred_count == 2
    assert fixture.drain() == [b"c", b"d"]
    fixture.pass_ms(20)
    assert fixture.drain() == [b"later", b"later still"]


@pytest.mark.parametrize("has_channel", [False, True])
def test_topic_without_channels_drops_the_oldest(has_channel: bool) -> None:
    fixture = fixture_with(max_messages=2, when_full="drop-oldest")
    if has_channel:
        fixture.channel()
        fixture.topic.pause()
    fixture.publish(b"a")
    fixture.publish(b"later", defer_ms=10)
    fixture.publish(b"b", b"c", b"d")
    fixture.topic.limits.make_room()
    assert (fixture.topic.depth, fixture.topic.limits.dropped_count) == (2, 2)
    fixture.publish(b"e")
    fixture.topic.limits.make_room()
    assert (fixture.topic.depth, fixture.topic.limits.dropped_count) == (2, 3)
    fixture = fixture.restarted(fixture.topic.snapshot())
    assert first_needed(fixture.topic.snapshot()) == 1  # the deferred one
    assert fixture.topic.depth == 2
    channel = fixture.channel()
    fixture.topic.unpause()
    assert (channel.depth, channel.deferred_count) == (2, 1)
    assert fixture.drain() == [b"d", b"e"]
    fixture.pass_ms(10)
    assert fixture.drain() == [b"later"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_oldest_bytes_are_dropped(tmp_path: Path, on_disk: bool) -> None:
    log: Log = disk_log(tmp_path / "log", segment_bytes=2000) if on_disk else MemoryLog(max_messages=10**6)
    fixture = fixture_with(log, max_bytes=5000, when_full="drop-oldest")
    channel = fixture.channel()
    for n in range(40):
        fixture.publish(b"%2d" % n * 120)
        fixture.topic.limits.make_room()
        assert log.bytes_from(channel.cursor) <= 5000
    assert 12 <= channel.depth <= 16
    assert channel.depth + channel.messages.dropped_count == 40
    assert [body[:2] for body in fixture.drain()] == [
        b"%2d" % n for n in range(channel.messages.dropped_count, 40)
    ]


def test_fast_consumer_loses_nothing(tmp_path: Path) -> None:
    fixture = fixture_with(max_messages=1, when_full="drop-oldest")
    subscriber = Subscriber(fixture, fixture.channel(), ready=100)
    fixture.publish(b"a", b"b", b"c")
    assert subscriber.receive_bodies() == [b"a", b"b", b"c"]
    fixture.topic.limits.make_room()
    assert counts(subscriber.channel) == (0, 0, 0)
