"""Tests for topics and their channels."""

from dataclasses import replace
from pathlib import Path

import pytest

from broker.state import CountingLog, Fixture, Received, disk_log
from trio_nsq.log import MemoryLog
from trio_nsq.log.record_metadata import metadata_with_headers


def test_messages_wait_in_the_topic_until_it_has_a_channel() -> None:
    fixture = Fixture()
    fixture.publish(b"a", b"bc")
    assert (fixture.topic.depth, fixture.topic.message_count, fixture.topic.message_bytes) == (2, 2, 3)
    channel = fixture.channel()
    assert (fixture.topic.depth, channel.depth, channel.message_count) == (0, 2, 2)
    assert fixture.drain() == [b"a", b"bc"]


def test_first_channel_gets_the_backlog_and_later_ones_only_new_messages() -> None:
    fixture = Fixture()
    fixture.publish(b"before")
    fixture.channel("first")
    fixture.channel("second")
    fixture.publish(b"after")
    assert (fixture.counts("first"), fixture.counts("second")) == ((2, 0, 0), (1, 0, 0))
    assert fixture.drain("first") == [b"before", b"after"]
    assert fixture.drain("second") == [b"after"]


def test_existing_channel_is_returned_unchanged() -> None:
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish(b"a")
    assert fixture.channel() is channel
    assert fixture.counts() == (1, 0, 0)


def test_messages_wait_again_after_the_last_channel_is_deleted() -> None:
    fixture = Fixture()
    fixture.publish(b"a")
    fixture.topic.remove_channel(fixture.channel("first"))
    assert fixture.topic.depth == 0
    fixture.publish(b"b")
    assert fixture.topic.depth == 1
    assert fixture.drain("second") == [b"b"]


def test_paused_topic_keeps_published_messages() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"before")
    fixture.topic.pause()
    fixture.publish(b"during")
    assert (fixture.topic.depth, fixture.counts()) == (1, (1, 0, 0))
    assert fixture.drain() == [b"before"]  # the channel itself continues
    fixture.topic.pause()
    fixture.topic.unpause()
    assert (fixture.topic.depth, fixture.counts()) == (0, (1, 0, 0))
    fixture.topic.unpause()
    assert fixture.drain() == [b"during"]


def test_channel_created_during_a_pause_gets_waiting_messages() -> None:
    fixture = Fixture()
    fixture.channel("early")
    fixture.topic.pause()
    fixture.publish(b"during")
    fixture.channel("late")
    assert (fixture.counts("early"), fixture.counts("late")) == ((0, 0, 0), (0, 0, 0))
    fixture.topic.unpause()
    assert fixture.drain("early") == [b"during"]
    assert fixture.drain("late") == [b"during"]


def test_first_channel_of_a_paused_topic_gets_the_backlog_after_the_pause() -> None:
    fixture = Fixture()
    fixture.publish(b"a")
    fixture.topic.pause()
    fixture.channel()
    assert (fixture.topic.depth, fixture.counts()) == (1, (0, 0, 0))
    fixture.topic.unpause()
    assert fixture.drain() == [b"a"]


def test_deleted_channel_drops_its_messages_and_disconnects_its_clients() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber("gone", ready=1)
    kept = fixture.subscriber("kept", ready=1)
    fixture.publish(b"a", b"b")
    fixture.publish(b"c", defer_ms=10)
    (message,) = subscriber.receive()
    channel = fixture.channel("gone")
    fixture.topic.remove_channel(channel)
    fixture.topic.remove_channel(channel)
    assert (subscriber.closed, kept.closed) == (True, False)
    assert list(fixture.topic.channels) == ["kept"]
    assert subscriber.finish([message]) == [(message.id, "ID not in flight")]
    assert (channel.depth, channel.in_flight_count, channel.deferred_count) == (0, 0, 0)
    subscriber.ready(10)
    assert subscriber.receive() == []
    assert fixture.drain("gone") == []  # a new one with this name
    fixture.publish(b"d")
    assert fixture.drain("gone") == [b"d"]
    assert kept.receive_bodies() == [b"a"]


def test_old_channel_cannot_delete_its_successor() -> None:
    fixture = Fixture()
    old = fixture.channel()
    fixture.topic.remove_channel(old)
    new = fixture.channel()
    fixture.topic.remove_channel(old)
    assert fixture.topic.channels == {"channel": new}


def test_closed_topic_disconnects_every_client_and_clears_its_cache() -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(name, ready=0) for name in ("one", "two", "two")]
    fixture.publish(b"a")
    assert len(fixture.cache) == 1
    fixture.topic.close()
    assert all(subscriber.closed for subscriber in subscribers)
    assert fixture.topic.channels == {}
    assert len(fixture.cache) == 0


# ---------------------------------------------------------------------- cache


def test_newest_messages_stay_decoded() -> None:
    fixture = Fixture(mem_queue_size=10)
    fixture.publish_many(9, each=3)
    assert [("topic", base) in fixture.cache for base in (0, 3, 6)] == [True, True, True]
    assert (fixture.topic.depth, fixture.topic.backend_depth, fixture.topic.store.cached_from) == (9, 0, 0)
    fixture.publish(b"x", b"y")
    assert [("topic", base) in fixture.cache for base in (0, 3, 6, 9)] == [False, True, True, True]
    assert (fixture.topic.depth, fixture.topic.backend_depth, fixture.topic.store.cached_from) == (11, 3, 3)


def batches(fixture: Fixture) -> list[int]:
    """Return the lengths of the batches in memory."""
    found: list[int] = []
    while sum(found) < fixture.topic.log.next_sequence:
        (batch,) = fixture.topic.store.fetch(sum(found))
        found.append(len(batch))
    return found


def test_single_publishes_are_delivered_together() -> None:
    fixture = Fixture()
    one, other = fixture.subscriber("one", ready=600), fixture.subscriber("other", ready=5)
    bodies = fixture.publish_many(300)
    assert batches(fixture) == [256, 44]
    assert one.receive_bodies() == bodies
    assert other.receive_bodies() == bodies[:5]
    more = fixture.publish_many(3, prefix="n")  # a delivered batch does not grow
    assert batches(fixture) == [256, 44, 3]
    assert one.receive_bodies() == more


def test_batches_do_not_grow_if_little_is_kept() -> None:
    fixture = Fixture(mem_queue_size=40)
    fixture.publish_many(5)
    assert batches(fixture) == [2, 2, 1]


def test_batch_evicted_from_the_cache_does_not_grow() -> None:
    fixture = Fixture()
    fixture.publish(b"a")
    fixture.cache.discard(("topic", 0))
    fixture.publish(b"b")
    assert ("topic", 1) in fixture.cache
    assert fixture.topic.store.cached_from == 1
    assert fixture.drain() == [b"a", b"b"]


@pytest.mark.parametrize("how", ["sample", "new channel"])
def test_channel_that_begins_within_a_batch_does_not_read_the_log(how: str) -> None:
    log = CountingLog(max_messages=1000)
    fixture = Fixture(log)
    if how == "sample":
        passes_over = fixture.subscriber("passes over", ready=1000)
        passes_over.consumer.sample = lambda: False
        for number in range(50):
            fixture.publish(b"%d" % number)
            assert passes_over.receive() == []
        assert passes_over.channel.cursor == 50
    else:
        fixture.subscriber("other", ready=0)
        fixture.publish_many(10)
        late = fixture.subscriber("late", ready=1000)
        bodies = fixture.publish_many(40, prefix="n")
        assert batches(fixture) == [50]
        assert late.receive_bodies() == bodies
    assert log.reads == 0


def test_cache_counts_the_growth_of_batches() -> None:
    fixture = Fixture(cache_bytes=16 * 1000)
    fixture.publish_many(100)
    (size_bytes, count) = fixture.cache.by_topic()["topic"]
    assert fixture.cache.size_bytes == size_bytes
    assert count == -(-100 // (1000 // (size_bytes // 100)))


@pytest.mark.parametrize("mem_queue_size", [0, 1])
def test_newest_record_stays_decoded_even_if_it_is_larger(mem_queue_size: int) -> None:
    fixture = Fixture(mem_queue_size=mem_queue_size)
    for base in (0, 5, 10):
        fixture.publish(*[b"x"] * 5)
        assert fixture.topic.store.cached_from == base
        assert len(fixture.cache) == 1


def test_empty_topic_has_nothing_in_the_cache() -> None:
    topic = Fixture().topic
    assert (topic.depth, topic.backend_depth, topic.store.cached_from) == (0, 0, 0)


def test_only_the_cache_keeps_batches_of_all_topics() -> None:
    """mem_queue_size counts messages, which may be large; the cache's limit in bytes must hold nevertheless."""
    import gc

    from trio_nsq.broker.state.batch import Batch

    others = [each for each in gc.get_objects() if isinstance(each, Batch)]  # of other tests
    fixture = Fixture(disk := MemoryLog(max_messages=10), cache_bytes=100_000, mem_queue_size=10_000)
    for _ in range(50):
        fixture.publish(b"x" * 10_000)
    gc.collect()
    known = set(map(id, others))
    alive = [each for each in gc.get_objects() if isinstance(each, Batch) and id(each) not in known]
    assert sum(batch.size_bytes for batch in alive) <= 100_000
    assert (fixture.topic.store.cached_from, fixture.topic.backend_depth) == (41, 41 - disk.first_sequence)


def test_redelivery_uses_batches_in_memory() -> None:
    log = CountingLog(max_messages=10_000)
    fixture = Fixture(log)
    fixture.publish_many(1000, each=20)
    subscriber = fixture.subscriber(ready=1000)
    received = subscriber.receive()
    assert len(received) == 1000
    for message in received[::7]:
        subscriber.requeue(message)
    again = subscriber.receive()
    assert [(m.id, m.body) for m in again] == [(m.id, m.body) for m in received[::7]]
    assert log.reads == 0


@pytest.mark.parametrize("each", [1, 20])
def test_redelivery_from_disk_reads_consecutive_messages_together(each: int) -> None:
    log = CountingLog(max_messages=10_000)
    fixture = Fixture(log, mem_queue_size=0, cache_bytes=0)
    bodies = fixture.publish_many(2000, each=each)
    gone = fixture.subscriber(ready=2000)
    assert gone.receive_bodies() == bodies
    gone.leave()
    log.reads = 0
    # The message that the client got first comes last: see `Channel.remove`.
    assert fixture.subscriber(ready=2000).receive_bodies() == [*bodies[1:], bodies[0]]
    assert log.reads <= 20


def test_scattered_redelivery_from_disk_reads_each_position_once() -> None:
    log = CountingLog(max_messages=10_000)
    fixture = Fixture(log, mem_queue_size=0)
    fixture.publish_many(2000, each=20)
    fixture.cache.forget_topic("topic")
    subscriber = fixture.subscriber(ready=2000)
    received = subscriber.receive()
    log.reads = 0
    for message in received[::100] + received[50::100] + received[20::100]:
        subscriber.requeue(message)
    assert len(subscriber.receive()) == 60
    assert log.reads <= 10


def test_redelivery_has_the_right_message_if_batches_overlap(tmp_path: Path) -> None:
    """Batches of different lengths may begin at one sequence: as published, and merged as read."""
    fixture = Fixture(disk_log(tmp_path / "log"), mem_queue_size=5)
    bodies = fixture.publish_many(40)
    early = fixture.subscriber(ready=40)
    received = early.receive()
    assert [message.body for message in received] == bodies
    for message in reversed(received):
        early.requeue(message)
    assert [(m.id, m.body) for m in early.receive()] == [(m.id, m.body) for m in reversed(received)]


def test_message_that_left_the_log_is_held_by_no_batch() -> None:
    fixture = Fixture(MemoryLog(max_messages=3), mem_queue_size=0, cache_bytes=0)
    fixture.publish_many(10)
    assert fixture.topic.store.batch_holding(2) is None
    held = fixture.topic.store.batch_holding(8)
    assert held is not None
    assert held.base_sequence <= 8 < held.next_sequence
    assert fixture.topic.store.batch_holding(10) is None


# ---------------------------------------------------------------------- during a commit


def test_stored_messages_count_only_after_they_are_accepted() -> None:
    """With --sync=always a thread appends to the log; channels may be created, paused or emptied meanwhile."""
    fixture = Fixture()
    fixture.publish(b"a")
    stored = fixture.store(b"b", b"c", defer_ms=1000)
    assert fixture.topic.depth == 1
    fixture.channel("early")
    assert fixture.counts("early") == (1, 0, 0)
    snapshot = fixture.topic.snapshot()
    assert (snapshot["end"], snapshot["distribution_point"]) == (1, 1)
    fixture.topic.accept(stored)
    assert fixture.counts("early") == (1, 0, 2)
    assert fixture.drain("early") == [b"a"]
    fixture.pass_ms(1000)
    assert fixture.drain("early") == [b"b", b"c"]
    restored = fixture.restarted(snapshot)
    assert restored.counts("early") == (1, 0, 2)


def test_stored_message_is_not_delivered_before_it_is_accepted() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.cache.forget_topic("topic")
    stored = fixture.store(b"b")
    subscriber = fixture.subscriber(ready=10)
    assert subscriber.receive_bodies() == [b"a"]
    assert (fixture.counts(), fixture.channel().message_count) == ((0, 1, 0), 1)
    fixture.topic.accept(stored)
    assert subscriber.receive_bodies() == [b"b"]
    assert fixture.channel().message_count == 2


def test_emptying_a_topic_keeps_messages_being_stored() -> None:
    fixture = Fixture()
    fixture.publish(b"gone")
    stored = fixture.store(b"kept")
    fixture.topic.empty()
    assert fixture.topic.depth == 0
    fixture.topic.accept(stored)
    assert fixture.topic.depth == 1
    assert fixture.drain() == [b"kept"]


# ---------------------------------------------------------------------- logs in memory


def test_ephemeral_topics_and_channels() -> None:
    assert Fixture(name="t#ephemeral").topic.ephemeral
    assert not Fixture(name="t").topic.ephemeral
    assert Fixture().channel("c#ephemeral").ephemeral
    assert not Fixture().channel("c").ephemeral


def bounded(messages: int = 10) -> Fixture:
    return Fixture(MemoryLog(max_messages=messages), name="t#ephemeral", mem_queue_size=messages)


def test_full_memory_drops_the_oldest_and_the_depth_follows() -> None:
    fixture = bounded()
    fixture.publish_many(25)
    assert fixture.topic.depth == 10
    fixture.channel("first")
    fixture.channel("second")
    assert (fixture.counts("first"), fixture.counts("second"), fixture.topic.depth) == (
        (10, 0, 0),
        (0, 0, 0),
        0,
    )
    fixture.publish_many(12, prefix="n")
    assert (fixture.counts("first"), fixture.counts("second")) == ((10, 0, 0), (10, 0, 0))
    assert fixture.drain("first") == [b"n%d" % index for index in range(2, 12)]


def test_full_memory_drops_messages_of_a_paused_topic() -> None:
    fixture = bounded()
    fixture.channel()
    fixture.publish_many(3, prefix="before")
    fixture.topic.pause()
    fixture.publish_many(4, prefix="during")
    assert (fixture.topic.depth, fixture.counts()) == (4, (3, 0, 0))
    fixture.publish_many(30, prefix="late")
    assert (fixture.topic.depth, fixture.counts()) == (10, (0, 0, 0))
    fixture.topic.unpause()
    assert fixture.drain() == [b"late%d" % index for index in range(20, 30)]


def test_messages_in_flight_survive_a_full_memory() -> None:
    """A busy ephemeral topic drops a message after a fraction of a second; a requeue must still redeliver it."""
    fixture = bounded()
    subscriber = fixture.subscriber(ready=5, msg_timeout_ms=1000)
    fixture.publish_many(5, each=5, prefix="old")
    received = subscriber.receive()
    subscriber.finish(received[4:])
    subscriber.requeue(received[0])
    subscriber.requeue(received[1], delay_ms=500)
    subscriber.ready(0)
    fixture.publish_many(100, prefix="new")
    fixture.pass_ms(500)
    assert fixture.counts() == (12, 2, 0)
    fixture.pass_ms(500)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((14, 0, 0), 2)
    subscriber.ready(100)
    again = {message.body: message for message in subscriber.receive()}
    old = {b"old0", b"old1", b"old2", b"old3"}
    assert {body for body in again if body.startswith(b"old")} == old
    assert all(again[body].attempts == 2 for body in old)
    subscriber.leave()
    fixture.publish_many(100, prefix="newer")
    other = fixture.subscriber(ready=100)
    third = {message.body: message.attempts for message in other.receive()}
    assert {body: third.get(body) for body in old} == dict.fromkeys(old, 3)


def test_touched_message_survives_a_full_memory() -> None:
    fixture = bounded()
    subscriber = fixture.subscriber(ready=2, msg_timeout_ms=1000)
    fixture.publish(b"a", b"b")
    received = subscriber.receive()
    fixture.pass_ms(900)
    subscriber.touch(received[1])
    fixture.topic.pause()
    fixture.publish_many(100)
    fixture.pass_ms(1000)
    assert sorted(subscriber.receive_bodies()) == [b"a", b"b"]


def test_deferred_publish_survives_a_full_memory() -> None:
    fixture = bounded()
    fixture.publish(b"before any channel", defer_ms=1000)
    fixture.publish_many(20)
    assert fixture.topic.depth == 10
    subscriber = fixture.subscriber(ready=100)
    fixture.publish(b"with a channel", b"and another", defer_ms=1000)
    fixture.publish_many(20, prefix="n")
    subscriber.finish(subscriber.receive())
    assert fixture.counts() == (0, 0, 3)
    fixture.pass_ms(1000)
    assert subscriber.receive_bodies() == [b"before any channel", b"with a channel", b"and another"]


def test_durable_topic_holds_no_batches_for_messages_in_flight() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(b"a")
    subscriber.receive()
    ((_, delivery),) = subscriber.consumer.in_flight
    assert delivery.held is None


def test_received_equals_published() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(bytes(range(256)))
    (message,) = subscriber.receive()
    assert message == Received(message.id, bytes(range(256)), 1, message.timestamp_ns)


def test_a_record_with_headers_is_not_taken_for_dead_letters() -> None:
    """After a start, letters are looked for in the channel of their origin."""
    fixture = Fixture()
    (record,) = fixture.store(b"a")
    fixture.topic.accept([replace(record, metadata=metadata_with_headers(b"", ["a:1\n"]))])
    assert not fixture.topic.dead_letters.unconfirmed
