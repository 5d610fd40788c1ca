"""Tests for RDY and delivery."""

from pathlib import Path

import pytest

from broker.state import (
    FIRST_ID,
    MIB,
    SECOND,
    CountingLog,
    Fixture,
    Subscriber,
    UnreadableLog,
    damage,
    decode,
    disk_log,
    ids_in_flight,
)
from trio_nsq.broker.state.dispatcher import MAX_GRANT_BYTES
from trio_nsq.log import LogReadError


def test_rdy_is_zero_initially() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=0)
    fixture.publish(b"a")
    assert subscriber.receive() == []
    assert fixture.counts() == (1, 0, 0)


def test_rdy_limits_messages_in_flight_and_is_not_consumed() -> None:
    fixture = Fixture()
    fixture.publish_many(10, each=10)
    subscriber = fixture.subscriber(ready=3)
    first = subscriber.receive()
    assert [message.body for message in first] == [b"m0", b"m1", b"m2"]
    assert subscriber.receive() == []
    subscriber.finish(first[:2])
    assert subscriber.receive_bodies() == [b"m3", b"m4"]  # no new RDY was needed
    subscriber.requeue(first[2], delay_ms=1)
    assert subscriber.receive_bodies() == [b"m5"]
    assert fixture.counts() == (4, 3, 1)


def test_lowering_rdy_recalls_nothing() -> None:
    fixture = Fixture()
    fixture.publish_many(10)
    subscriber = fixture.subscriber(ready=5)
    received = subscriber.receive()
    subscriber.ready(2)
    assert fixture.counts() == (5, 5, 0)
    subscriber.finish(received[:3])  # two are left: the RDY count
    assert subscriber.receive() == []
    assert subscriber.finish(received[3:4]) == []
    assert len(subscriber.receive()) == 1
    subscriber.ready(0)
    subscriber.finish(received[4:])
    assert subscriber.receive() == []


def test_raising_rdy_delivers_the_difference() -> None:
    fixture = Fixture()
    fixture.publish_many(10)
    subscriber = fixture.subscriber(ready=2)
    assert len(subscriber.receive()) == 2
    subscriber.ready(7)
    assert len(subscriber.receive()) == 5


def test_blocked_consumer_gets_nothing_and_others_get_its_share() -> None:
    fixture = Fixture()
    slow, fast = fixture.subscriber(ready=10), fixture.subscriber(ready=4)
    slow.block(True)
    fixture.publish_many(10)
    assert len(fast.receive()) == 4
    assert ids_in_flight(slow.consumer) == []
    slow.block(False)
    assert len(slow.receive()) == 6


def test_answers_of_a_blocked_consumer_do_not_unblock_it() -> None:
    fixture = Fixture()
    fixture.publish_many(4)
    subscriber = fixture.subscriber(ready=2)
    received = subscriber.receive()
    subscriber.block(True)
    subscriber.finish(received[:1])
    subscriber.requeue(received[1])
    assert subscriber.receive() == []
    assert fixture.counts() == (3, 0, 0)


@pytest.mark.parametrize("consumers", [1, 2, 5])
def test_single_messages_go_to_ready_consumers_in_turn(consumers: int) -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(ready=100) for _ in range(consumers)]
    for index in range(4 * consumers):
        body = b"m%d" % index
        fixture.publish(body)
        (grant,) = fixture.channel().dispatcher.dispatch(fixture.now_ns)
        assert [message.body for message in decode(grant[1])] == [body]
    assert [len(subscriber.consumer.in_flight) for subscriber in subscribers] == [4] * consumers


def test_with_rdy_one_an_answering_consumer_goes_to_the_end_of_the_line() -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(ready=1) for _ in range(3)]
    fixture.publish_many(3)
    served = fixture.pump(fixture.channel())
    assert [consumer for consumer, _ in served] == [subscriber.consumer for subscriber in subscribers]
    second, first = served[1], served[0]
    fixture.publish(b"x", b"y")
    subscribers[1].finish(second[1])
    subscribers[0].finish(first[1])
    assert [consumer for consumer, _ in fixture.pump(fixture.channel())] == [second[0], first[0]]


def test_batch_of_200_is_split_evenly_between_two_consumers() -> None:
    fixture = Fixture()
    one, other = fixture.subscriber(ready=200), fixture.subscriber(ready=200)
    fixture.publish_many(200, each=200)
    grants = fixture.channel().dispatcher.dispatch(fixture.now_ns)
    assert [(consumer, len(decode(payload))) for consumer, payload in grants] == [
        (one.consumer, 100),
        (other.consumer, 100),
    ]
    assert fixture.channel().dispatcher.dispatch(fixture.now_ns) == []


def test_rest_of_a_share_goes_to_other_consumers() -> None:
    fixture = Fixture()
    small, large = fixture.subscriber(ready=10), fixture.subscriber(ready=500)
    fixture.publish_many(200, each=50)
    fixture.pump(fixture.channel())
    assert (len(small.consumer.in_flight), len(large.consumer.in_flight)) == (10, 190)


def test_seven_messages_for_three_consumers() -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(ready=100) for _ in range(3)]
    fixture.publish_many(7, each=7)
    fixture.pump(fixture.channel())
    assert [len(subscriber.consumer.in_flight) for subscriber in subscribers] == [3, 3, 1]


def test_new_messages_are_delivered_in_publish_order() -> None:
    fixture = Fixture()
    bodies = fixture.publish_many(30, each=7)
    assert fixture.drain() == bodies


def test_grant_respects_the_byte_limit() -> None:
    fixture = Fixture()
    body = b"x" * 100_000
    fixture.publish(*[body] * 5)
    for _ in range(5):
        fixture.publish(body)
    subscriber = fixture.subscriber(ready=100)
    rounds = []
    while grants := fixture.channel().dispatcher.dispatch(fixture.now_ns):
        assert sum(len(payload) for _, payload in grants) <= MAX_GRANT_BYTES
        rounds.append(sum(len(decode(payload)) for _, payload in grants))
    assert rounds == [2, 2, 2, 2, 2]
    subscriber.leave()
    subscriber = fixture.subscriber(ready=100)  # the same for redeliveries
    for expected in rounds:
        grants = fixture.channel().dispatcher.dispatch(fixture.now_ns)
        assert sum(len(payload) for _, payload in grants) <= MAX_GRANT_BYTES
        assert sum(len(decode(payload)) for _, payload in grants) == expected
    assert fixture.channel().dispatcher.dispatch(fixture.now_ns) == []


def test_message_larger_than_a_grant_is_sent_alone() -> None:
    fixture = Fixture()
    fixture.publish(b"small", b"x" * MIB, b"y" * MIB, b"last")
    subscriber = fixture.subscriber(ready=100)
    sizes = []
    while grants := fixture.channel().dispatcher.dispatch(fixture.now_ns):
        sizes.append([len(message.body) for _, payload in grants for message in decode(payload)])
    assert sizes == [[5], [MIB], [MIB], [4]]
    subscriber.leave()
    again = fixture.subscriber(ready=100)
    assert [len(message.body) for message in again.receive()] == [MIB, MIB, 4, 5]


def test_channels_share_the_frames_of_a_batch() -> None:
    fixture = Fixture()
    channels = [fixture.channel(name) for name in ("a", "b", "c")]
    for channel in channels:
        Subscriber(fixture, channel, ready=100)
    fixture.publish_many(50, each=50)
    payloads = [payload for channel in channels for _, payload in channel.dispatcher.dispatch(fixture.now_ns)]
    assert all(isinstance(payload, memoryview) for payload in payloads)
    assert len({id(payload.obj) for payload in payloads if isinstance(payload, memoryview)}) == 1


def test_every_channel_gets_the_same_message_with_attempts_one() -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(name, ready=10) for name in ("one", "two")]
    fixture.publish(b"a", b"b")
    one, two = [subscriber.receive() for subscriber in subscribers]
    assert one == two
    assert [message.id for message in one] == [b"%016x" % (FIRST_ID + index) for index in range(2)]
    assert [message.attempts for message in one] == [1, 1]


def test_each_channel_counts_attempts_separately() -> None:
    fixture = Fixture()
    one, two = fixture.subscriber("one", ready=10), fixture.subscriber("two", ready=10)
    fixture.publish(b"a")
    (message,) = one.receive()
    one.requeue(message)
    (again,) = one.receive()
    (other,) = two.receive()
    assert (again.attempts, other.attempts) == (2, 1)
    assert again.id == other.id == message.id


# ---------------------------------------------------------------------- pause


def test_paused_channel_delivers_nothing() -> None:
    fixture = Fixture()
    fixture.publish_many(6, each=2)
    subscriber = fixture.subscriber(ready=3, msg_timeout_ms=1000)
    first, second, third = subscriber.receive()
    channel = fixture.channel()
    channel.paused = True
    subscriber.finish([first])
    subscriber.requeue(second)
    fixture.pass_ms(1000)
    fixture.publish(b"late")
    assert channel.timeout_count == 1
    assert subscriber.receive() == []
    assert fixture.counts() == (6, 0, 0)
    channel.paused = False
    received = subscriber.receive()
    assert len(received) == 3
    assert {message.body for message in received} <= {second.body, third.body, b"m3", b"m4", b"m5", b"late"}


# ---------------------------------------------------------------------- requeued and new messages


def test_requeued_and_new_messages_alternate() -> None:
    fixture = Fixture()
    fixture.publish_many(4, prefix="old")
    gone = fixture.subscriber(ready=4)
    gone.receive()
    gone.leave()
    fixture.publish_many(4, prefix="new")
    subscriber = fixture.subscriber(ready=1)
    kinds = []
    for _ in range(8):
        (message,) = subscriber.receive()
        subscriber.finish([message])
        kinds.append(message.body[:3])
    assert kinds in ([b"old", b"new"] * 4, [b"new", b"old"] * 4)


def test_endless_requeues_do_not_starve_new_messages() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish_many(10)
    seen = set()
    for _ in range(40):
        (message,) = subscriber.receive()
        seen.add(message.body)
        if message.body == b"m0":
            subscriber.requeue(message)
        else:
            subscriber.finish([message])
    assert len(seen) == 10


def test_endless_new_messages_do_not_starve_a_requeued_one() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(b"requeued")
    (message,) = subscriber.receive()
    fixture.publish(b"fresh")
    fixture.publish(b"fresh")
    subscriber.requeue(message)
    bodies = []
    for _ in range(3):
        (message,) = subscriber.receive()
        subscriber.finish([message])
        fixture.publish(b"fresh")
        bodies.append(message.body)
    assert b"requeued" in bodies[:2]


@pytest.mark.parametrize("others", [1, 2, 3, 4])
def test_message_requeued_by_one_client_goes_to_others_too(others: int) -> None:
    """Clients take turns, and there are always new messages."""
    fixture = Fixture()
    failing, *good = [fixture.subscriber(ready=1) for _ in range(1 + others)]
    fixture.publish_many(20)
    delivered = dict(fixture.pump(fixture.channel()))
    attempts = set()
    for _ in range(50):
        for subscriber in (failing, *good):
            (message,) = delivered.pop(subscriber.consumer)
            attempts.add(message.attempts)
            if subscriber is failing:
                assert subscriber.requeue(message) is None
            else:
                assert subscriber.finish([message]) == []
            fixture.publish(b"fresh")
            delivered.update(fixture.pump(fixture.channel()))
    assert max(attempts) <= 3


def test_repeated_dispatch_delivers_requeued_and_new_messages() -> None:
    fixture = Fixture()
    fixture.publish_many(50, each=10)
    gone = fixture.subscriber(ready=20)
    gone.receive()
    gone.leave()
    assert sorted(fixture.drain()) == sorted(f"m{index}".encode() for index in range(50))
    assert fixture.counts() == (0, 0, 0)


# ---------------------------------------------------------------------- reads from disk


def test_messages_that_are_not_in_memory_are_read(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=3, cache_bytes=2000)
    bodies = fixture.publish_many(300, each=3)
    assert len(list((tmp_path / "log").iterdir())) > 1
    assert fixture.drain() == bodies


def test_reads_are_large() -> None:
    log = CountingLog(max_messages=10_000)
    fixture = Fixture(log, mem_queue_size=0, cache_bytes=0)
    bodies = fixture.publish_many(3000)
    assert fixture.drain() == bodies
    assert log.reads <= 3


def test_what_the_only_channel_has_read_does_not_fill_the_cache() -> None:
    fixture = Fixture(CountingLog(max_messages=10_000), mem_queue_size=0)
    fixture.channel("first")
    for _ in range(100):
        fixture.publish(*[b"x" * 50_000] * 2)
    assert len(fixture.drain("first")) == 200
    assert 3 * MIB < fixture.cache.size_bytes <= 4 * MIB


def test_what_one_of_several_channels_has_read_is_in_the_cache_for_the_others() -> None:
    log = CountingLog(max_messages=10_000)
    fixture = Fixture(log, mem_queue_size=0)
    for name in ("first", "second"):
        fixture.channel(name)
    for _ in range(100):
        fixture.publish(*[b"x" * 50_000] * 2)
    assert len(fixture.drain("first")) == 200
    reads = log.reads
    assert len(fixture.drain("second")) == 200
    assert log.reads == reads


def test_delivery_continues_within_a_merged_batch(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    bodies = fixture.publish_many(20)
    subscriber = fixture.subscriber(ready=3)
    first = subscriber.receive()
    fixture.cache.forget_topic("topic")
    subscriber.leave()
    assert [message.body for message in first] == bodies[:3]
    assert sorted(fixture.drain()) == sorted(bodies)


def test_backend_depth_counts_messages_to_read_from_disk(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=10)
    channel = fixture.channel()
    fixture.publish_many(10)
    assert (channel.depth, channel.backend_depth) == (10, 0)
    fixture.publish_many(15)
    assert (channel.depth, channel.backend_depth) == (25, 15)
    subscriber = fixture.subscriber(ready=20)
    subscriber.receive()
    assert (channel.depth, channel.backend_depth) == (5, 0)
    fixture.publish(b"deferred", defer_ms=1000)
    assert (channel.depth, channel.backend_depth) == (5, 0)


def test_backend_depth_includes_messages_evicted_from_the_cache() -> None:
    fixture = Fixture(cache_bytes=3000)
    channel = fixture.channel()
    fixture.publish_many(100)
    held = sum((fixture.topic.name, sequence) in fixture.cache for sequence in range(100))
    assert 0 < held < 30
    assert (channel.depth, channel.backend_depth) == (100, 100 - held)


def test_backend_depth_is_at_most_the_depth() -> None:
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish_many(3)
    for number in range(10):
        fixture.publish(b"deferred%d" % number, defer_ms=1000)
    fixture.cache.forget_topic("topic")
    assert (channel.depth, channel.deferred_count, channel.backend_depth) == (3, 10, 3)


@pytest.mark.parametrize("damaged", [0, 4, 5, 9])
def test_damaged_record_is_skipped_and_depth_ends_at_zero(tmp_path: Path, damaged: int) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    bodies = fixture.publish_many(20, each=2, prefix="body-")
    fixture.cache.forget_topic("topic")
    damage(tmp_path / "log", b"body-%d" % (2 * damaged))
    left = bodies[: 2 * damaged] + bodies[2 * damaged + 2 :]
    assert fixture.drain() == left
    assert fixture.counts() == (0, 0, 0)
    fixture.publish(b"next")
    assert fixture.counts() == (1, 0, 0)
    assert fixture.drain() == [b"next"]


@pytest.mark.parametrize(("deferred", "emptied"), [(0, 0), (3, 0), (0, 3), (1, 2), (3, 1)])
def test_depth_is_right_after_damage_with_deferred_and_emptied_messages(
    tmp_path: Path, deferred: int, emptied: int
) -> None:
    fixture = Fixture(disk_log(tmp_path / "log", segment_bytes=1 << 20), mem_queue_size=0, cache_bytes=0)
    fixture.channel()
    fixture.publish(b"first")
    damaged = fixture.publish_many(1, prefix="damaged-a")
    for index in range(deferred):
        damaged.append(b"deferred-%d" % index)
        fixture.publish(damaged[-1], defer_ms=1000)
    fixture.topic.pause()
    damaged += fixture.publish_many(emptied, prefix="emptied-")
    fixture.topic.empty()
    fixture.topic.unpause()
    damaged += fixture.publish_many(1, prefix="damaged-b")
    fixture.cache.forget_topic("topic")
    for body in damaged:
        damage(tmp_path / "log", body)
    assert fixture.counts() == (3, 0, deferred)
    assert fixture.drain() == [b"first"]
    assert fixture.counts() == (0, 0, deferred)
    fixture.publish(b"last")
    assert fixture.counts() == (1, 0, deferred)
    assert fixture.drain() == [b"last"]
    fixture.pass_ms(1000)
    assert fixture.drain() == []  # their bodies are lost
    assert fixture.counts() == (0, 0, 0)


def test_damage_across_the_high_watermark_ends_there(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    fixture.channel()
    fixture.publish_many(2, prefix="damaged-")
    fixture.topic.pause()
    fixture.publish_many(2, prefix="later-")
    fixture.cache.forget_topic("topic")
    for body in (b"damaged-0", b"damaged-1", b"later-0"):
        damage(tmp_path / "log", body)
    assert fixture.drain() == []
    assert (fixture.counts(), fixture.topic.depth) == ((0, 0, 0), 2)
    fixture.topic.unpause()
    assert fixture.counts() == (2, 0, 0)
    assert fixture.drain() == [b"later-1"]
    assert fixture.counts() == (0, 0, 0)


def test_merged_batch_is_delivered_up_to_the_high_watermark(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    fixture.channel()
    before = fixture.publish_many(3, prefix="before-")
    fixture.topic.pause()
    during = fixture.publish_many(3, prefix="during-")
    fixture.cache.forget_topic("topic")
    assert fixture.drain() == before
    fixture.topic.unpause()
    assert fixture.drain() == during


def test_damage_before_the_end_does_not_delay_requeued_messages(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    fixture.publish(b"requeued")
    subscriber = fixture.subscriber(ready=10)
    (message,) = subscriber.receive()
    subscriber.requeue(message)
    assert subscriber.receive_bodies() == [b"requeued"]  # so that new messages are next
    fixture.publish(b"damaged")
    fixture.cache.forget_topic("topic")
    damage(tmp_path / "log", b"damaged")
    subscriber.requeue(message)
    assert subscriber.receive_bodies() == [b"requeued"]
    subscriber.requeue(message)
    assert subscriber.receive_bodies() == [b"requeued"]
    assert fixture.counts() == (0, 1, 0)


def test_damaged_requeued_message_is_dropped_and_others_are_delivered(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=0, cache_bytes=0)
    fixture.publish_many(6, each=2, prefix="body-")
    gone = fixture.subscriber(ready=4)
    gone.receive()
    fixture = fixture.restarted(fixture.topic.snapshot(), disk_log(tmp_path / "log"))
    damage(tmp_path / "log", b"body-1")
    assert fixture.counts() == (6, 0, 0)
    assert sorted(fixture.drain()) == [b"body-2", b"body-3", b"body-4", b"body-5"]
    assert fixture.counts() == (0, 0, 0)


# ---------------------------------------------------------------------- failing reads


def test_failed_read_loses_nothing() -> None:
    log = UnreadableLog(max_messages=1000)
    fixture = Fixture(log, mem_queue_size=0, cache_bytes=0)
    bodies = fixture.publish_many(6, each=2)
    subscriber = fixture.subscriber(ready=100)
    fixture.cache.forget_topic("topic")
    log.fails = True
    for _ in range(3):
        with pytest.raises(LogReadError):
            fixture.channel().dispatcher.dispatch(fixture.now_ns)
        assert fixture.counts() == (6, 0, 0)
    log.fails = False
    assert subscriber.receive_bodies() == bodies


def test_messages_granted_before_a_failed_read_are_sent() -> None:
    log = UnreadableLog(max_messages=1000)
    fixture = Fixture(log, mem_queue_size=16)  # batches are not merged
    fixture.publish(b"cached")
    fixture.publish(b"not cached")
    one, other = fixture.subscriber(ready=100), fixture.subscriber(ready=100)
    fixture.cache.discard(("topic", 1))
    log.fails = True
    (grant,) = fixture.channel().dispatcher.dispatch(fixture.now_ns)
    assert grant[0] is one.consumer
    assert [message.body for message in decode(grant[1])] == [b"cached"]
    assert fixture.counts() == (1, 1, 0)
    with pytest.raises(LogReadError):
        fixture.channel().dispatcher.dispatch(fixture.now_ns)
    log.fails = False
    assert other.receive_bodies() == [b"not cached"]


def test_failed_read_within_a_grant_keeps_its_beginning() -> None:
    log = UnreadableLog(max_messages=1000)
    fixture = Fixture(log, mem_queue_size=16)  # batches are not merged
    fixture.publish(b"a")
    fixture.publish(b"b")
    subscriber = fixture.subscriber(ready=100)
    fixture.cache.discard(("topic", 1))
    log.fails = True
    (grant,) = fixture.channel().dispatcher.dispatch(fixture.now_ns)
    assert [message.body for message in decode(grant[1])] == [b"a"]
    assert len(subscriber.consumer.in_flight) == 1


def test_requeued_messages_survive_a_failed_read() -> None:
    log = UnreadableLog(max_messages=1000)
    fixture = Fixture(log, mem_queue_size=16)  # batches are not merged
    bodies = [b"a", b"b", b"c", b"d"]
    for body in bodies:
        fixture.publish(body)
    gone = fixture.subscriber(ready=4)
    gone.receive()
    gone.leave()
    fixture.cache.discard(("topic", 1))
    fixture.cache.discard(("topic", 2))
    log.fails = True
    subscriber = fixture.subscriber(ready=10)
    granted = []
    for _ in range(4):
        try:
            grants = fixture.channel().dispatcher.dispatch(fixture.now_ns)
        except LogReadError:
            continue
        granted += [message.body for _, payload in grants for message in decode(payload)]
    assert granted == [b"d", b"a"]  # an unreadable message does not delay the others
    assert fixture.counts() == (2, 2, 0)
    log.fails = False
    assert sorted(subscriber.receive_bodies()) == [b"b", b"c"]


def test_unreadable_requeued_message_does_not_delay_new_ones() -> None:
    log = UnreadableLog(max_messages=1000)
    fixture = Fixture(log)
    fixture.publish(b"requeued")
    gone = fixture.subscriber(ready=1)
    gone.receive()
    gone.leave()
    fixture.cache.discard(("topic", 0))
    log.fails = True
    fixture.subscriber(ready=10)
    for _ in range(3):
        fixture.publish(b"fresh")
        (grant,) = fixture.channel().dispatcher.dispatch(fixture.now_ns)
        assert [message.body for message in decode(grant[1])] == [b"fresh"]
    with pytest.raises(LogReadError):
        fixture.channel().dispatcher.dispatch(fixture.now_ns)


# ---------------------------------------------------------------------- disconnects


def test_disconnected_consumer_is_sent_nothing() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    subscriber.leave()
    subscriber.leave()
    subscriber.ready(100)
    subscriber.block(False)
    fixture.publish(b"a")
    assert subscriber.receive() == []
    assert fixture.counts() == (1, 0, 0)


def test_counts_since_the_start() -> None:
    fixture = Fixture()
    one, other = fixture.subscriber(ready=2), fixture.subscriber(ready=2)
    fixture.publish_many(3)
    fixture.publish(b"deferred", defer_ms=10)
    channel = fixture.channel()
    assert channel.message_count == 4
    delivered = fixture.pump(channel)
    first = [message for consumer, received in delivered if consumer is one.consumer for message in received]
    one.requeue(first[0])
    one.finish(first[1:])
    assert (channel.message_count, channel.requeue_count) == (4, 1)
    consumers = [one.consumer, other.consumer]
    assert sum(consumer.message_count for consumer in consumers) == 3
    assert (one.consumer.finish_count, one.consumer.requeue_count) == (len(first) - 1, 1)
    assert fixture.now_ns == 5 * SECOND
