"""Tests for deferred messages, and for emptying channels and topics."""

from pathlib import Path

import pytest

from broker.state import MS, SECOND, TIMESTAMP, CountingLog, Fixture, disk_log, ids_in_flight, records
from trio_nsq.broker.state.checkpoint import first_needed


def test_deferred_publish_is_delivered_at_its_time() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.publish(b"a", defer_ms=1000)
    assert fixture.counts() == (0, 0, 1)
    assert fixture.channel().message_count == 1
    assert fixture.channel().next_due_ns == fixture.channel().next_deadline_ns == fixture.now_ns + SECOND
    assert subscriber.receive() == []
    fixture.channel().tick(fixture.now_ns + SECOND - 1)
    assert subscriber.receive() == []
    fixture.pass_ms(1000)
    assert fixture.counts() == (1, 0, 0)
    assert fixture.channel().next_due_ns is None
    assert [(m.body, m.attempts) for m in subscriber.receive()] == [(b"a", 1)]
    assert fixture.counts() == (0, 1, 0)


def test_deferred_messages_are_delivered_by_due_time() -> None:
    fixture = Fixture()
    for body, defer_ms in ((b"30", 30), (b"10", 10), (b"20 a", 20), (b"20 b", 20), (b"40", 40)):
        fixture.publish(body, defer_ms=defer_ms)
    subscriber = fixture.subscriber(ready=10)
    fixture.pass_ms(15)
    assert subscriber.receive_bodies() == [b"10"]
    fixture.pass_ms(100)
    assert subscriber.receive_bodies() == [b"20 a", b"20 b", b"30", b"40"]


def test_several_messages_with_one_due_time() -> None:
    fixture = Fixture()
    fixture.publish(b"a", b"b", b"c", defer_ms=10)
    subscriber = fixture.subscriber(ready=10)
    assert fixture.counts() == (0, 0, 3)
    fixture.pass_ms(10)
    assert subscriber.receive_bodies() == [b"a", b"b", b"c"]


def test_time_in_the_past_means_now() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.now_ns -= SECOND
    fixture.publish(b"a", defer_ms=1)
    fixture.now_ns += SECOND
    fixture.pass_ms(0)
    assert subscriber.receive_bodies() == [b"a"]


def test_new_messages_do_not_wait_for_deferred_ones() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.publish(b"a")
    fixture.publish(b"b", defer_ms=1000)
    fixture.publish(b"c")
    assert subscriber.receive_bodies() == [b"a", b"c"]
    fixture.pass_ms(1000)
    assert subscriber.receive_bodies() == [b"b"]


def test_each_channel_defers_separately() -> None:
    fixture = Fixture()
    one, two = fixture.subscriber("one", ready=10), fixture.subscriber("two", ready=10)
    fixture.publish(b"a", defer_ms=1000)
    fixture.pass_ms(1000)
    (message,) = one.receive()
    one.requeue(message, delay_ms=1000)
    assert fixture.counts("one") == (0, 0, 1)
    assert fixture.counts("two") == (1, 0, 0)
    assert [m.attempts for m in two.receive()] == [1]
    fixture.pass_ms(1000)
    assert [m.attempts for m in one.receive()] == [2]


def test_counts_while_the_cursor_is_behind() -> None:
    """Without consumers, the cursor stays, while deferred messages ahead of it become due."""
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.publish(b"b", defer_ms=1000)
    fixture.publish(b"c")
    fixture.publish(b"d", b"e", defer_ms=2000)
    assert fixture.counts() == (2, 0, 3)
    fixture.pass_ms(1000)
    assert fixture.counts() == (3, 0, 2)
    subscriber = fixture.subscriber(ready=1)
    (message,) = subscriber.receive()
    assert message.body == b"b"  # the deferred one was delivered, and the cursor is still before it
    assert fixture.counts() == (2, 1, 2)
    subscriber.finish([message])
    assert fixture.counts() == (2, 0, 2)
    subscriber.leave()
    fixture.pass_ms(1000)
    assert fixture.counts() == (4, 0, 0)
    assert sorted(fixture.drain()) == [b"a", b"c", b"d", b"e"]
    assert fixture.counts() == (0, 0, 0)


def test_deferred_message_finished_before_the_cursor_passes_it() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"fresh")
    fixture.publish(b"a", b"b", b"c", defer_ms=10)
    fixture.pass_ms(10)
    subscriber = fixture.subscriber(ready=3)
    received = subscriber.receive()
    assert fixture.counts() == (1, 3, 0)
    subscriber.requeue(received[0])
    subscriber.requeue(received[1], delay_ms=5)
    subscriber.finish(received[2:])
    assert fixture.counts() == (2, 0, 1)
    assert sorted(subscriber.receive_bodies()) == sorted([b"fresh", received[0].body])
    fixture.pass_ms(5)
    assert subscriber.receive_bodies() == [received[1].body]
    assert fixture.counts() == (0, 3, 0)


def test_channel_with_only_deferred_messages_needs_the_log() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    for _ in range(20):
        fixture.publish(b"x", defer_ms=1)
        fixture.pass_ms(1)
        subscriber.finish(subscriber.receive())
    snapshot = fixture.topic.snapshot()
    assert first_needed(snapshot) == 20
    assert snapshot["channels"][0]["holes"] == []


def test_deferred_publish_waits_for_the_first_channel() -> None:
    fixture = Fixture()
    fixture.publish(b"a", defer_ms=1000)
    fixture.publish(b"b")
    assert fixture.topic.depth == 1
    fixture.pass_ms(400)
    fixture.channel()
    assert fixture.counts() == (1, 0, 1)
    assert fixture.channel().next_due_ns == fixture.now_ns + 600 * MS  # counted from the publish
    fixture.pass_ms(600)
    assert sorted(fixture.drain()) == [b"a", b"b"]


def test_deferred_publish_over_a_pause_of_the_topic() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.topic.pause()
    fixture.publish(b"soon", defer_ms=10)
    fixture.publish(b"late", defer_ms=1000)
    fixture.publish(b"now")
    assert (fixture.topic.depth, fixture.counts()) == (1, (0, 0, 0))
    fixture.pass_ms(500)
    assert fixture.counts() == (0, 0, 0)
    fixture.topic.unpause()
    assert (fixture.topic.depth, fixture.counts()) == (0, (1, 0, 2))
    fixture.pass_ms(0)
    assert fixture.counts() == (2, 0, 1)
    assert sorted(fixture.drain()) == [b"now", b"soon"]
    fixture.pass_ms(500)
    assert fixture.drain() == [b"late"]


def test_deferred_publish_over_a_pause_of_the_channel() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.channel().paused = True
    fixture.publish(b"a", defer_ms=10)
    fixture.pass_ms(10)
    assert fixture.counts() == (1, 0, 0)
    assert subscriber.receive() == []
    fixture.channel().paused = False
    assert subscriber.receive_bodies() == [b"a"]


def test_later_channel_does_not_get_earlier_deferred_messages() -> None:
    fixture = Fixture()
    fixture.channel("early")
    fixture.publish(b"a", defer_ms=10)
    fixture.channel("late")
    assert (fixture.counts("early"), fixture.counts("late")) == ((0, 0, 1), (0, 0, 0))
    fixture.publish(b"b")
    fixture.pass_ms(10)
    assert fixture.drain("late") == [b"b"]


def test_deferred_messages_are_read_from_disk(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    fixture.channel()
    bodies = [f"deferred {index}".encode() for index in range(100)]
    for index, body in enumerate(bodies):
        fixture.publish(body, defer_ms=1 + index % 7)
        fixture.publish(b"fresh")
    assert fixture.counts() == (100, 0, 100)
    fixture.pass_ms(7)
    assert fixture.counts() == (200, 0, 0)
    assert sorted(fixture.drain()) == sorted([*bodies, *[b"fresh"] * 100])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("defer_ms", "is_read"), [(9_999, False), (10_001, True)])
def test_messages_deferred_for_a_short_time_stay_in_memory(count: int, defer_ms: int, is_read: bool) -> None:
    log = CountingLog(max_messages=1000)
    fixture = Fixture(log)
    fixture.channel()
    bodies = [f"deferred {index}".encode() for index in range(count)]
    record = records(bodies, first_id=fixture.ids.take(count), due_ns=TIMESTAMP + defer_ms * MS)
    log.append([record], sync=False)
    fixture.topic.accept([record])
    for _ in range(100):
        fixture.publish(b"fresh")
    fixture.channel().tick(TIMESTAMP + defer_ms * MS)
    assert sorted(fixture.drain()) == sorted([*bodies, *[b"fresh"] * 100])
    assert bool(log.reads) == is_read


# ---------------------------------------------------------------------- emptying a channel


def test_emptying_a_channel_drops_all_messages_and_keeps_its_counters() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=2, msg_timeout_ms=1000)
    fixture.publish_many(6)
    fixture.publish(b"deferred", defer_ms=1000)
    first, _second = subscriber.receive()
    subscriber.requeue(first)
    (third,) = subscriber.receive()
    fixture.pass_ms(900)
    subscriber.touch(third, max_msg_timeout_ms=1200)
    assert fixture.counts() == (4, 2, 1)
    channel = fixture.channel()
    channel.empty()
    assert fixture.counts() == (0, 0, 0)
    assert ids_in_flight(subscriber.consumer) == []
    assert channel.next_deadline_ns is None
    assert subscriber.finish([third]) == [(third.id, "ID not in flight")]
    assert (channel.message_count, channel.requeue_count) == (7, 1)
    fixture.pass_ms(1_000_000)
    assert (fixture.counts(), channel.timeout_count) == ((0, 0, 0), 0)
    assert subscriber.receive() == []
    fixture.publish(b"new", b"newer")  # its window is free again
    assert subscriber.receive_bodies() == [b"new", b"newer"]


def test_emptying_a_channel_frees_the_window_of_its_consumers() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(b"a")
    subscriber.receive()
    fixture.channel().empty()
    fixture.publish(b"b")
    assert subscriber.receive_bodies() == [b"b"]


def test_emptying_a_channel_does_not_affect_others() -> None:
    fixture = Fixture()
    fixture.channel("emptied")
    fixture.channel("kept")
    fixture.publish(b"a")
    fixture.topic.pause()
    fixture.publish(b"waiting")
    fixture.channel("emptied").empty()
    assert (fixture.counts("emptied"), fixture.counts("kept"), fixture.topic.depth) == (
        (0, 0, 0),
        (1, 0, 0),
        1,
    )
    fixture.topic.unpause()
    assert fixture.drain("emptied") == [b"waiting"]
    assert fixture.drain("kept") == [b"a", b"waiting"]


def test_emptying_a_channel_whose_cursor_is_behind_deferred_messages() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.publish(b"b", defer_ms=10)
    fixture.publish(b"c")
    fixture.channel().empty()
    assert fixture.counts() == (0, 0, 0)
    fixture.publish(b"d")
    assert fixture.counts() == (1, 0, 0)
    fixture.pass_ms(10)
    assert fixture.drain() == [b"d"]


# ---------------------------------------------------------------------- emptying a topic


def test_emptying_a_topic_drops_only_its_waiting_messages() -> None:
    fixture = Fixture()
    fixture.publish(b"a")
    fixture.publish(b"deferred", defer_ms=10)
    assert fixture.topic.depth == 1
    fixture.topic.empty()
    assert fixture.topic.depth == 0
    fixture.publish(b"b")
    fixture.pass_ms(10)
    assert fixture.topic.depth == 1
    fixture.channel()
    assert (fixture.topic.depth, fixture.counts()) == (0, (1, 0, 0))
    assert fixture.drain() == [b"b"]


def test_emptying_a_topic_does_not_affect_its_channels() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(b"in flight", b"ready")
    fixture.publish(b"deferred", defer_ms=10)
    subscriber.receive()
    fixture.topic.empty()
    assert fixture.counts() == (1, 1, 1)
    fixture.publish(b"more")
    assert fixture.counts() == (2, 1, 1)


@pytest.mark.parametrize("waiting", [b"mid", b""])
@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_emptied_messages_of_a_paused_topic_are_never_delivered(
    tmp_path: Path, lags: bool, waiting: bytes, on_disk: bool
) -> None:
    """On disk, emptied and other messages are read as one batch."""
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0) if on_disk else Fixture()
    fixture.channel()
    fixture.publish(b"before")
    if not lags:
        assert fixture.drain() == [b"before"]
    before = [b"before"] if lags else []
    fixture.topic.pause()
    fixture.publish(b"gone 1")
    fixture.publish(b"gone, deferred", defer_ms=10)
    assert (fixture.topic.depth, fixture.counts()[0]) == (1, len(before))
    fixture.topic.empty()
    assert (fixture.topic.depth, fixture.counts()) == (0, (len(before), 0, 0))
    if waiting:
        fixture.publish(waiting)
        fixture.publish(b"kept, deferred", defer_ms=10)
        assert (fixture.topic.depth, fixture.counts()) == (1, (len(before), 0, 0))
        fixture.topic.unpause()
        fixture.topic.pause()
        assert (fixture.topic.depth, fixture.counts()) == (0, (len(before) + 1, 0, 1))
    fixture.publish(b"gone 2")
    fixture.topic.empty()
    fixture.topic.empty()
    fixture.publish(b"after")
    fixture.topic.unpause()
    kept = [*before, *([waiting] if waiting else []), b"after"]
    assert (fixture.topic.depth, fixture.counts()) == (0, (len(kept), 0, 1 if waiting else 0))
    assert fixture.drain() == kept
    assert fixture.counts()[0] == 0
    fixture.pass_ms(10)
    assert fixture.drain() == ([b"kept, deferred"] if waiting else [])
    assert fixture.counts() == (0, 0, 0)


def test_each_channel_skips_an_emptied_range_separately() -> None:
    fixture = Fixture()
    fixture.channel("slow")
    fixture.channel("fast")
    fixture.publish(b"a")
    assert fixture.drain("fast") == [b"a"]
    fixture.topic.pause()
    fixture.publish(b"gone")
    fixture.topic.empty()
    fixture.topic.unpause()
    fixture.publish(b"b")
    assert (fixture.counts("slow")[0], fixture.counts("fast")[0]) == (2, 1)
    assert fixture.drain("fast") == [b"b"]
    assert fixture.drain("slow") == [b"a", b"b"]


def test_repeated_emptying_uses_no_memory() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.topic.pause()
    for _ in range(100):
        fixture.topic.empty()
        fixture.publish(b"gone")
    fixture.topic.empty()
    assert fixture.topic.snapshot()["channels"][0]["holes"] == [[1, 101]]
    assert fixture.counts() == (1, 0, 0)
