"""Tests for saved state: a restart from a snapshot and the log."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.state import MS, SECOND, Fixture, disk_log, kept, packed, records
from trio_nsq.broker.state.checkpoint import first_needed
from trio_nsq.broker.state.dead_letter_ledger import DeadLetterLedger
from trio_nsq.broker.state.move import Move
from trio_nsq.broker.state.producers import LastBatch
from trio_nsq.broker.state.topic import StateError
from trio_nsq.broker.state.version import Version
from trio_nsq.log import MemoryLog


def saved(fixture: Fixture) -> dict[str, Any]:
    """Return a snapshot, encoded and decoded."""
    state: dict[str, Any] = json.loads(json.dumps(fixture.topic.snapshot()))
    return state


def test_after_a_clean_stop_unfinished_messages_are_delivered_with_their_attempts() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=5)
    fixture.publish_many(8, each=4)
    received = subscriber.receive()
    subscriber.finish(received[:2])
    subscriber.requeue(received[2])
    subscriber.receive()
    subscriber.requeue(received[2])
    subscriber.ready(0)
    assert fixture.counts() == (2, 4, 0)
    after = fixture.restarted(saved(fixture))
    assert after.counts() == (6, 0, 0)
    other = after.subscriber(ready=100)
    assert {message.body: message.attempts for message in other.receive()} == {
        b"m2": 3,
        b"m3": 2,
        b"m4": 2,
        b"m5": 2,
        b"m6": 2,
        b"m7": 1,
    }


def test_after_a_restart_counters_start_at_zero_and_pauses_are_kept() -> None:
    fixture = Fixture()
    fixture.publish(b"a")
    fixture.channel("paused").paused = True
    fixture.channel("running")
    fixture.publish(b"b")
    fixture.topic.pause()
    fixture.publish(b"c")
    after = fixture.restarted(saved(fixture))
    assert after.topic.paused
    assert [(name, channel.paused) for name, channel in after.topic.channels.items()] == [
        ("paused", True),
        ("running", False),
    ]
    assert (after.topic.depth, after.counts("paused"), after.counts("running")) == (1, (2, 0, 0), (1, 0, 0))
    assert (after.topic.message_count, after.topic.message_bytes) == (0, 0)
    assert after.topic.channels["paused"].message_count == 0
    after.topic.unpause()
    assert after.drain("running") == [b"b", b"c"]
    assert after.drain("paused") == []


def test_due_times_survive_a_restart() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.publish(b"requeued")
    fixture.publish(b"deferred", defer_ms=2000)
    (message,) = subscriber.receive()
    subscriber.requeue(message, delay_ms=1000)
    start = fixture.now_ns
    after = fixture.restarted(saved(fixture))
    channel = after.channel()
    assert (after.counts(), channel.next_due_ns) == ((0, 0, 2), start + SECOND)
    channel.tick(start + SECOND)
    assert (after.counts(), channel.next_due_ns) == ((1, 0, 1), start + 2 * SECOND)
    channel.tick(start + 2 * SECOND)
    received = after.subscriber(ready=10).receive()
    assert [(m.body, m.attempts) for m in received] == [(b"requeued", 2), (b"deferred", 1)]


def test_deferred_messages_of_the_topic_survive_a_restart() -> None:
    fixture = Fixture()
    fixture.publish(b"a", b"b", defer_ms=1000)
    fixture.publish(b"c")
    after = fixture.restarted(saved(fixture))
    assert after.topic.depth == 1
    after.channel()
    assert after.counts() == (1, 0, 2)
    after.pass_ms(1000)
    assert sorted(after.drain()) == [b"a", b"b", b"c"]


def test_messages_after_the_snapshot_are_found_in_the_log() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    state = saved(fixture)
    fixture.publish(b"b")
    fixture.publish(b"c", b"d", defer_ms=1000)
    fixture.publish(b"e")
    assert sorted(fixture.drain()) == [b"a", b"b", b"e"]  # not recorded anywhere
    after = fixture.restarted(state)
    assert after.counts() == (3, 0, 2)
    assert after.channel().next_due_ns == after.now_ns + SECOND
    assert after.drain() == [b"a", b"b", b"e"]
    after.pass_ms(1000)
    assert after.drain() == [b"c", b"d"]


def test_topic_that_was_never_saved_has_its_log_and_no_channel() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.publish(b"b", defer_ms=1000)
    after = fixture.restarted(None)
    assert after.topic.channels == {}
    assert after.topic.depth == 1
    after.channel()
    assert after.counts() == (1, 0, 1)


def test_ephemeral_channels_are_not_kept() -> None:
    fixture = Fixture()
    fixture.channel("kept")
    fixture.channel("tail#ephemeral")
    after = fixture.restarted(saved(fixture))
    assert list(after.topic.channels) == ["kept"]


def test_cursor_behind_deferred_and_emptied_messages() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.publish(b"answered", b"requeued", b"deferred", defer_ms=10)
    fixture.topic.pause()
    fixture.publish(b"emptied")
    fixture.topic.empty()
    fixture.topic.unpause()
    fixture.publish(b"b")
    fixture.pass_ms(10)
    subscriber = fixture.subscriber(ready=3)
    received = subscriber.receive()
    assert [message.body for message in received] == [b"answered", b"requeued", b"deferred"]
    subscriber.ready(0)
    subscriber.finish(received[:1])
    subscriber.requeue(received[1])
    subscriber.requeue(received[2], delay_ms=1000)
    assert fixture.counts() == (3, 0, 1)
    after = fixture.restarted(saved(fixture))
    assert after.counts() == (3, 0, 1)
    assert sorted(after.drain()) == [b"a", b"b", b"requeued"]
    assert after.counts() == (0, 0, 1)
    after.pass_ms(1000)
    assert after.drain() == [b"deferred"]


def test_snapshot_does_not_change_while_it_is_written() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=2)
    fixture.publish_many(5)
    fixture.publish(b"x", defer_ms=1000)
    fixture.topic.pause()
    fixture.publish(b"y", defer_ms=1000)
    received = subscriber.receive()
    state = fixture.topic.snapshot()
    before = json.dumps(state)
    subscriber.finish(received[:1])
    subscriber.requeue(received[1], delay_ms=1)
    fixture.topic.empty()
    fixture.topic.unpause()
    fixture.publish_many(5)
    fixture.pass_ms(2000)
    fixture.channel().empty()
    assert json.dumps(state) == before


def test_restart_does_not_change_the_saved_state() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber("one", ready=2)
    fixture.publish_many(9, each=3)
    fixture.publish(b"x", b"y", defer_ms=1000)
    fixture.publish_many(3)
    (message, _) = subscriber.receive()
    subscriber.requeue(message, delay_ms=500)
    subscriber.leave()
    fixture.channel("two")
    fixture.publish(b"z", defer_ms=3000)
    fixture.topic.pause()
    fixture.publish(b"waits", defer_ms=10)
    once = saved(fixture)
    assert saved(fixture.restarted(once)) == once


# ---------------------------------------------------------------------- needed messages


def test_first_needed_is_the_oldest_message_that_may_be_read() -> None:
    fixture = Fixture()
    needed = []

    def note() -> None:
        needed.append(first_needed(saved(fixture)))

    note()
    fixture.publish_many(4)
    note()  # no channel: the first one will get everything
    fixture.topic.add_channel("channel")
    note()
    subscriber = fixture.subscriber(ready=4)
    received = subscriber.receive()
    subscriber.ready(0)
    note()  # in flight
    subscriber.finish(received[:1])
    subscriber.requeue(received[1])
    note()  # requeued
    subscriber.ready(3)
    subscriber.receive()
    subscriber.finish(received[1:2])
    subscriber.requeue(received[2], delay_ms=1000)
    subscriber.finish(received[3:])
    note()  # deferred
    fixture.pass_ms(1000)
    subscriber.finish(subscriber.receive())
    note()
    assert needed == [0, 0, 0, 0, 1, 2, 4]


def test_ephemeral_channel_keeps_messages_that_it_has_not_read(tmp_path: Path) -> None:
    fixture = Fixture(disk_log(tmp_path / "log", segment_bytes=300), mem_queue_size=0, cache_bytes=0)
    fixture.channel("tail#ephemeral")
    fixture.channel("durable")
    bodies = fixture.publish_many(50)
    assert fixture.drain("durable") == bodies
    tail = fixture.subscriber("tail#ephemeral", ready=30)
    first = tail.receive()
    tail.ready(0)
    tail.requeue(first[10], delay_ms=10)
    tail.finish(first[:10] + first[12:])
    fixture.log.discard_before(first_needed(saved(fixture)))
    fixture.cache.forget_topic("topic")
    assert 0 < fixture.log.first_sequence <= 10
    fixture.pass_ms(10)
    tail.requeue(first[11])
    tail.ready(100)
    received = tail.receive()
    assert sorted(each.body for each in received) == sorted([*bodies[10:12], *bodies[30:]])
    tail.requeue(received[-1], delay_ms=10)
    tail.finish(received[:-1])
    kept = fixture.topic.checkpoint()
    for _ in kept.encode():
        pass
    assert kept.first_needed == first_needed(json.loads(kept.content)) == bodies.index(received[-1].body)
    fixture.pass_ms(10)
    assert tail.receive_bodies() == [received[-1].body]
    fixture.log.discard_before(first_needed(saved(fixture)))
    assert fixture.log.first_sequence > 40


@pytest.mark.parametrize("ephemeral_leaves", [False, True])
def test_discarding_unneeded_messages_loses_nothing(tmp_path: Path, ephemeral_leaves: bool) -> None:
    fixture = Fixture(disk_log(tmp_path / "log", segment_bytes=300), mem_queue_size=0, cache_bytes=0)
    subscriber = fixture.subscriber(ready=20)
    bodies = fixture.publish_many(60)
    received = subscriber.receive()
    subscriber.finish(received[:13])
    if ephemeral_leaves:
        subscriber.leave()
    state = saved(fixture)
    fixture.log.discard_before(first_needed(state))
    assert 0 < fixture.log.first_sequence <= 13
    after = fixture.restarted(state, disk_log(tmp_path / "log", segment_bytes=300))
    assert after.counts() == (47, 0, 0)
    assert sorted(after.drain()) == sorted(bodies[13:])


# ---------------------------------------------------------------------- snapshots that do not match the log


def cut(log: MemoryLog, end: int) -> MemoryLog:
    """Return the log after a power cut: without the records at its end."""
    shorter = MemoryLog(max_messages=1_000_000)
    for record in log.read(0, 1 << 40):
        if record.next_sequence <= end:
            shorter.append([record], sync=True)
    return shorter


def test_snapshot_ahead_of_the_log_is_cut_back_to_it() -> None:
    """A power cut with --sync=interval: the state was saved, the last messages were not synced."""
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a", b"b", b"c")
    fixture.publish(b"deferred", defer_ms=1000)
    fixture.publish(b"d")
    fixture.publish(b"lost, deferred", defer_ms=1000)
    fixture.publish(b"lost")
    subscriber = fixture.subscriber(ready=1)
    (message,) = subscriber.receive()
    subscriber.finish([message])
    subscriber.leave()
    state = saved(fixture)
    assert isinstance(fixture.log, MemoryLog)
    after = fixture.restarted(state, cut(fixture.log, 5))
    assert after.was_ahead
    assert after.counts() == (3, 0, 1)
    after.publish(b"new 1")
    after.publish(b"new 2", defer_ms=1000)
    assert after.counts() == (4, 0, 2)
    assert after.drain() == [b"b", b"c", b"d", b"new 1"]
    after.pass_ms(1000)
    assert after.drain() == [b"deferred", b"new 2"]
    assert after.counts() == (0, 0, 0)


def test_a_snapshot_ahead_of_the_log_of_a_paused_topic() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    fixture.publish(b"lost")
    fixture.topic.pause()
    fixture.publish(b"lost, too")
    fixture.publish(b"lost, deferred", defer_ms=10)
    state = saved(fixture)
    assert isinstance(fixture.log, MemoryLog)
    after = fixture.restarted(state, cut(fixture.log, 1))
    assert after.was_ahead
    assert (after.topic.depth, after.counts()) == (0, (1, 0, 0))
    after.publish(b"new")
    assert (after.topic.depth, after.counts()) == (1, (1, 0, 0))
    after.topic.unpause()
    assert after.drain() == [b"a", b"new"]
    assert after.channel().message_count == 1
    assert (after.channel().next_due_ns, after.topic.deferred_count) == (None, 0)


def test_due_times_are_in_order_after_some_were_cut() -> None:
    fixture = Fixture()
    fixture.channel()
    for body, defer_ms in ((b"5", 5), (b"2", 2), (b"1, lost", 1)):
        fixture.publish(body, defer_ms=defer_ms)
    state = saved(fixture)
    assert isinstance(fixture.log, MemoryLog)
    after = fixture.restarted(state, cut(fixture.log, 2))
    assert after.channel().next_due_ns == fixture.now_ns + 2 * MS


def test_snapshot_with_lost_finished_messages_must_be_saved_again() -> None:
    """Their sequences are reused: the old snapshot would treat the new messages as finished."""
    fixture = Fixture()
    fixture.channel()
    fixture.publish_many(10)
    fixture.drain()
    old = saved(fixture)
    assert isinstance(fixture.log, MemoryLog)
    after = fixture.restarted(old, cut(fixture.log, 4))
    assert after.was_ahead
    new = saved(after)
    after.publish_many(10, prefix="new")
    again = after.restarted(new)
    assert not again.was_ahead
    assert again.drain() == [b"new%d" % index for index in range(10)]


def test_snapshot_that_the_log_has_caught_up_with_is_not_ahead() -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    state = saved(fixture)
    assert not fixture.restarted(state).was_ahead
    assert not fixture.restarted(None).was_ahead
    fixture.publish(b"b")
    assert not fixture.restarted(state).was_ahead


@given(st.data())
def test_snapshot_far_ahead_of_the_log_delivers_the_remaining_messages_once(data: st.DataObject) -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=data.draw(st.integers(0, 5)))
    for index in range(data.draw(st.integers(0, 12))):
        what = data.draw(st.sampled_from(["publish", "defer", "answer", "empty", "pause", "unpause", "pass"]))
        if what == "publish":
            fixture.publish(*(b"%d.%d" % (index, n) for n in range(data.draw(st.integers(1, 4)))))
        elif what == "defer":
            fixture.publish(b"%d" % index, defer_ms=data.draw(st.integers(1, 20)))
        elif what == "answer":
            received = subscriber.receive()
            subscriber.finish(received[::2])
            for message in received[1::2]:
                subscriber.requeue(message, delay_ms=data.draw(st.sampled_from([0, 10])))
        elif what == "empty":
            fixture.topic.empty()
        elif what == "pause":
            fixture.topic.pause()
        elif what == "unpause":
            fixture.topic.unpause()
        else:
            fixture.pass_ms(10)
    fixture.topic.unpause()
    subscriber.leave()
    state = saved(fixture)
    assert isinstance(fixture.log, MemoryLog)
    ends = [0, *(record.next_sequence for record in fixture.log.read(0, 1 << 40))]
    end = data.draw(st.sampled_from(ends))
    log = cut(fixture.log, end)
    kept = [body for record in log.read(0, 1 << 40) for body in record.messages.bodies()]
    # The complete state, without a cut, has the expected messages.
    whole = fixture.restarted(state)
    whole.pass_ms(1000)
    unfinished = whole.drain()
    after = fixture.restarted(state, log)
    depth, in_flight, deferred = after.counts()
    assert min(depth, deferred) >= 0
    assert in_flight == 0
    assert depth + deferred == len([body for body in unfinished if body in kept])
    after.publish(b"new")
    after.pass_ms(1000)
    assert sorted(after.drain()) == sorted([*(body for body in unfinished if body in kept), b"new"])
    assert after.counts() == (0, 0, 0)


def test_log_that_begins_after_messages_needed_by_the_snapshot() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=2)
    bodies = fixture.publish_many(10)
    subscriber.receive()
    state = saved(fixture)
    fixture.log.discard_before(5)
    after = fixture.restarted(state)
    assert after.counts() == (7, 0, 0)  # two of them were in flight, and are missing
    assert after.drain() == bodies[5:]
    assert after.counts() == (0, 0, 0)
    assert fixture.restarted(None).topic.depth == 5


def test_log_that_begins_after_messages_waiting_in_the_topic() -> None:
    fixture = Fixture()
    bodies = fixture.publish_many(10)
    state = saved(fixture)
    fixture.log.discard_before(5)
    after = fixture.restarted(state)
    assert after.topic.depth == 5
    assert after.drain() == bodies[5:]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda state: state.pop("format"), "the field 'format'"),
        (lambda state: state.pop("channels"), "the field 'channels'"),
        (lambda state: state["channels"][0].pop("cursor"), "the field 'cursor'"),
        (lambda state: state.update(format=2), "its format is 2, this program reads 1"),
        (lambda state: state.update(name="other"), "it is the state of topic other"),
        (lambda state: state.update(end="x"), "invalid literal"),
        (lambda state: state.update(end=float("inf")), "infinity"),
        (lambda state: state.update(channels=5), "not iterable"),
        (lambda state: state.update(channels=["x"]), "string"),
        (lambda state: state["channels"][0].update(unfinished=[[1]]), "unpack"),
        (lambda state: state["channels"][0].update(deferred=[[1, 2]]), "bytes-like|str object"),
        (
            lambda state: state["channels"][0].update(deferred=["AAAA"]),
            "3 bytes do not hold deferred messages",
        ),
        (lambda state: state["channels"][0].update(deferred=["%"]), "base64"),
        (
            lambda state: state["channels"][0].update(deferred=packed([(2, 0, 0)]) + packed([(1, 0, 0)])),
            "sorted by due time",
        ),
        (lambda state: state["channels"][0].update(holes=None), "not iterable"),
    ],
)
def test_invalid_snapshot_is_refused_with_the_reason(spoil: Any, complaint: str) -> None:
    fixture = Fixture()
    fixture.channel()
    fixture.publish(b"a")
    state = saved(fixture)
    spoil(state)
    with pytest.raises(StateError, match=complaint):
        Fixture(fixture.log).topic.restore(state)


def test_descending_ids_after_a_restart_are_found(tmp_path: Path) -> None:
    """The node id depends on the host name, which may change between two runs."""
    log = disk_log(tmp_path / "log")
    for base, node in enumerate((900, 3, 900, 2, 2, 900)):
        log.append([records([b"m%d" % base], base=base, first_id=node << 54 | base)], sync=True)
    fixture = Fixture(log)
    subscriber = fixture.subscriber(ready=10)
    received = subscriber.receive()
    assert [message.body for message in received] == [b"m%d" % index for index in range(6)]
    for message in received:
        subscriber.requeue(message)
    assert [(m.id, m.body) for m in subscriber.receive()] == [(m.id, m.body) for m in received]
    assert fixture.now_ns == 5000 * MS


def test_beginning_and_end_of_a_move_are_saved_as_they_are_made() -> None:
    fixture = Fixture()
    fixture.publish_many(3)
    topic, channel = fixture.topic, fixture.channel()
    topic.moving.begin(Move("0" * 16, "elsewhere", topic.end, 0))
    before = kept(channel.state())
    copy = topic.copy([channel.name])
    copy.channels[channel.name].fix_stream()
    assert kept(channel.state()) == before
    channel.fix_stream()
    assert copy.snapshot() == topic.snapshot()
    assert kept(channel.state()) != before

    copy = topic.copy(topic.channels)
    copy.moving.end()
    assert "move" in topic.snapshot()
    topic.moving.end()
    assert copy.snapshot() == topic.snapshot()
    assert "move" not in topic.snapshot()


def test_copy_has_all_that_a_checkpoint_saves() -> None:
    """Else a change would be saved with other values than the topic has."""
    fixture = Fixture()
    topic, channel, other = fixture.topic, fixture.channel(), fixture.channel("other")
    fixture.channel("tail#ephemeral")
    fixture.publish_many(20)
    consumer = fixture.subscriber(ready=6)
    received = consumer.receive()
    consumer.finish(received[1:2])
    consumer.requeue(received[2])
    consumer.requeue(received[3], 60_000)
    channel.withdraw([7])
    channel.messages.add_prefetched(2)
    for each in (channel, other):
        each.configure({"max_attempts": 9})
        each.paused = True
    topic.configure({"max_messages": 100})
    topic.pause()
    fixture.publish(b"waits")
    fixture.publish(b"deferred", defer_ms=60_000)
    topic.producers.record(LastBatch("p", 3, 5), SECOND)
    topic.dead_letters.record_here(b"letters", 11)
    topic.dead_letters.record_moved(DeadLetterLedger(Version()), b"others")
    topic.moving.begin(Move("0" * 16, "elsewhere", topic.end, 0))
    other.fix_stream()
    topic.moving.confirm("other", 4)
    topic.moving.confirm(None, 20)
    state, checkpoint = saved(fixture), topic.checkpoint()
    assert state["move"]["moved"] == 20
    assert state["settled"] == 11
    for names in ([], ["channel"], ["other", "tail#ephemeral"], topic.channels):
        copy = topic.copy(names)
        copied = copy.snapshot()
        copied["channels"].sort(key=lambda each: list(topic.channels).index(each["name"]))
        assert copied == state
        assert copy.checkpoint().settings == checkpoint.settings
        assert copy.checkpoint().moved_letters == checkpoint.moved_letters == 1
