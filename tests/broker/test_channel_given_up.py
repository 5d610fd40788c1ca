"""Tests for max_attempts of a channel: exhausted messages, and messages withdrawn by a mover."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from broker.state import Fixture, Received, Subscriber, disk_log, effect_of_seek
from trio_nsq.broker.state.channel import Channel
from trio_nsq.broker.state.channel_messages import MAX_PREFETCHED
from trio_nsq.broker.state.checkpoint import first_needed
from trio_nsq.broker.state.seek import Seek
from trio_nsq.broker.state.settings import SettingsError
from trio_nsq.log import MemoryLog
from trio_nsq.log.record_metadata import Reason, only_channel


def limited(max_attempts: int = 2, dead_letter_topic: str = "dead", **options: Any) -> Fixture:
    """Return a topic with a channel with this max_attempts."""
    fixture = Fixture(**options)
    fixture.channel().configure({"max_attempts": max_attempts, "dead_letter_topic": dead_letter_topic})
    return fixture


def attempt(subscriber: Subscriber, times: int) -> Received:
    """Requeue the next message this many times; return its last delivery."""
    for _ in range(times):
        (message,) = subscriber.receive()
        assert subscriber.requeue(message) is None
    return message


def saved(fixture: Fixture) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(fixture.topic.snapshot()))
    return state


# ---------------------------------------------------------------------- exhausted messages


def test_message_requeued_after_its_last_attempt_is_exhausted() -> None:
    fixture = limited(max_attempts=3)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    message = attempt(subscriber, 3)
    assert message.attempts == 3
    assert subscriber.receive() == []
    channel = fixture.channel()
    assert (channel.messages.withdrawn.waiting, channel.requeue_count, channel.given_up_count) == (1, 3, 0)
    (taken,) = channel.messages.withdrawn.take(10)
    assert (taken.sequence, taken.attempts, taken.reason) == (0, 3, Reason.REQUEUED)


def test_requeue_delay_after_the_last_attempt_does_not_matter() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    assert subscriber.requeue(message, delay_ms=1000) is None
    assert (fixture.channel().messages.withdrawn.waiting, fixture.counts()) == (1, (1, 0, 0))


def test_message_that_times_out_after_its_last_attempt_is_exhausted() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber(msg_timeout_ms=1000)
    fixture.publish(b"a")
    subscriber.receive()
    fixture.pass_ms(999)
    assert fixture.channel().messages.withdrawn.waiting == 0
    fixture.pass_ms(1)
    assert fixture.channel().timeout_count == 1
    assert [each.reason for each in fixture.channel().messages.withdrawn.take(10)] == [Reason.TIMED_OUT]


def test_message_of_a_lost_connection_after_its_last_attempt_is_exhausted() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber(ready=2)
    fixture.publish(b"a", b"b", b"c")
    subscriber.finish(subscriber.receive()[:1])
    subscriber.ready(0)
    subscriber.leave()
    assert [each.reason for each in fixture.channel().messages.withdrawn.take(10)] == [Reason.CONNECTION_LOST]
    assert fixture.drain() == [b"c"]


def test_message_finished_in_its_last_attempt_is_not_exhausted() -> None:
    fixture = limited(max_attempts=2)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    attempt(subscriber, 1)
    assert subscriber.finish(subscriber.receive()) == []
    assert (fixture.channel().messages.withdrawn.waiting, fixture.counts()) == (0, (0, 0, 0))


def test_without_max_attempts_a_message_is_delivered_any_number_of_times() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    assert attempt(subscriber, 1000).attempts == 1000


def test_without_a_dead_letter_topic_a_message_is_dropped_and_counted() -> None:
    fixture = limited(max_attempts=1, dead_letter_topic="")
    subscriber = fixture.subscriber(ready=2)
    fixture.publish(b"a", b"b")
    for message in subscriber.receive():
        subscriber.requeue(message)
    channel = fixture.channel()
    assert (channel.given_up_count, channel.messages.withdrawn.waiting, fixture.counts()) == (2, 0, (0, 0, 0))
    assert first_needed(saved(fixture)) == 2


def test_exhausted_messages_are_waiting_also_while_they_are_moved() -> None:
    """Otherwise carried-forward messages could not be found by their ids."""
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a", b"b", b"c")
    attempt(subscriber, 1)
    attempt(subscriber, 1)
    messages = fixture.channel().messages
    assert messages.waiting_before(2) == [0, 1]
    messages.withdrawn.take(1)
    assert (messages.waiting_before(2), messages.waiting_before(1)) == ([0, 1], [0])
    assert effect_of_seek(fixture.channel(), 3).skipped == 3


def test_exhausted_messages_that_left_the_log_survive_a_seek_to_its_beginning() -> None:
    """Also a kill after the seek is saved and before it is applied."""
    fixture = limited(max_attempts=1, log=MemoryLog(max_messages=2), name="topic#ephemeral")
    subscriber = fixture.subscriber(ready=2)
    fixture.publish(b"being moved")
    fixture.publish(b"waits")
    for message in subscriber.receive():
        subscriber.requeue(message)
    subscriber.leave()
    channel = fixture.channel()
    taken = channel.messages.withdrawn.take(1)
    fixture.publish_many(4)
    assert fixture.log.first_sequence == 4
    seek = Seek(channel, 4, fixture.now_ns)
    for _ in seek.prepare():
        pass
    copy = channel.copy(channel.topic)
    seek.move(copy)
    state = copy.make_state()
    for _ in state.encode():
        pass
    assert sorted(state.sequences()) == [0, 1]
    seek.close()
    fixture.seek(4)
    channel.configure({"max_attempts": 0})
    channel.put_back(taken)
    assert sorted(fixture.drain()) == [b"being moved", b"m2", b"m3", b"waits"]


def test_exhausted_messages_count_for_the_depth_and_keep_the_log() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a", b"b")
    attempt(subscriber, 1)
    channel = fixture.channel()
    assert (channel.depth, channel.messages.ready_count, channel.messages.oldest) == (2, 1, 0)
    assert first_needed(saved(fixture)) == 0
    channel.messages.withdrawn.take(1)
    assert (channel.depth, channel.messages.ready_count, channel.messages.oldest) == (2, 1, 0)
    assert first_needed(saved(fixture)) == 0
    subscriber.finish(subscriber.receive())
    assert (channel.depth, channel.messages.ready_count) == (1, 0)
    assert channel.dispatcher.dispatch(fixture.now_ns) == []


def test_withdrawn_messages_are_removed_or_put_back() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber(ready=3)
    fixture.publish(b"a", b"b", b"c")
    for message in subscriber.receive():
        subscriber.requeue(message)
    channel = fixture.channel()
    first, second = channel.messages.withdrawn.take(2)
    assert (channel.messages.withdrawn.waiting, channel.depth) == (1, 3)
    assert channel.dispose([first]) == 1
    assert channel.dispose([first]) == 0
    channel.put_back([second])
    assert (channel.messages.withdrawn.waiting, channel.depth) == (2, 2)
    assert {each.sequence for each in channel.messages.withdrawn.take(9)} == {1, 2}


def test_messages_emptied_while_withdrawn_are_not_put_back() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    attempt(subscriber, 1)
    channel = fixture.channel()
    taken = channel.messages.withdrawn.take(1)
    channel.empty()
    assert (channel.messages.withdrawn.waiting, fixture.counts()) == (0, (0, 0, 0))
    channel.put_back(taken)
    assert (channel.dispose(taken), channel.messages.withdrawn.waiting, fixture.counts()) == (0, 0, (0, 0, 0))


def test_paused_channel_exhausts_messages_too() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber(msg_timeout_ms=1000)
    fixture.publish(b"a")
    subscriber.receive()
    fixture.channel().paused = True
    fixture.pass_ms(1000)
    assert fixture.channel().messages.withdrawn.waiting == 1


# ---------------------------------------------------------------------- changed settings


def test_larger_max_attempts_revives_exhausted_messages() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    attempt(subscriber, 1)
    assert subscriber.receive() == []
    fixture.channel().configure({"max_attempts": 2})
    assert [message.attempts for message in subscriber.receive()] == [2]


@pytest.mark.parametrize("max_attempts", [0, None])
def test_no_max_attempts_revives_exhausted_messages(max_attempts: int | None) -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    attempt(subscriber, 1)
    fixture.channel().configure({"max_attempts": max_attempts})
    assert subscriber.receive_bodies() == [b"a"]


def test_no_dead_letter_topic_drops_exhausted_messages() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    attempt(subscriber, 1)
    fixture.channel().configure({"dead_letter_topic": ""})
    assert (fixture.channel().given_up_count, fixture.counts()) == (1, (0, 0, 0))


def test_smaller_max_attempts_applies_to_later_requeues() -> None:
    fixture = limited(max_attempts=5)
    subscriber = fixture.subscriber()
    fixture.publish(b"a")
    attempt(subscriber, 3)
    fixture.channel().configure({"max_attempts": 2})
    assert attempt(subscriber, 1).attempts == 4
    assert fixture.channel().messages.withdrawn.waiting == 1


def test_topic_is_not_its_own_dead_letter_topic() -> None:
    fixture = limited(max_attempts=5, dead_letter_topic="dead")
    with pytest.raises(SettingsError, match="dead_letter_topic is the topic itself"):
        fixture.channel().configure({"max_attempts": 7, "dead_letter_topic": "topic"})
    assert fixture.channel().settings.max_attempts == 5
    assert fixture.channel().settings.dead_letter_topic == "dead"


# ---------------------------------------------------------------------- restarts


def test_exhausted_messages_keep_their_reason_over_a_restart() -> None:
    fixture = limited(max_attempts=1)
    subscriber = fixture.subscriber(ready=4, msg_timeout_ms=1000)
    fixture.publish(b"a", b"b", b"c", b"d")
    first, *_ = subscriber.receive()
    subscriber.requeue(first)
    fixture.channel().messages.withdrawn.take(1)  # and then the broker is killed
    fixture.pass_ms(1000)
    after = fixture.restarted(saved(fixture))
    assert [(each.sequence, each.reason) for each in after.channel().messages.withdrawn.take(9)] == [
        (0, Reason.REQUEUED),
        *[(n, Reason.TIMED_OUT) for n in (1, 2, 3)],
    ]
    assert saved(fixture)["channels"] == saved(after)["channels"]


@pytest.mark.parametrize("dead_letter_topic", ["dead", ""])
def test_end_of_the_broker_exhausts_no_message(dead_letter_topic: str) -> None:
    """The messages in flight have not failed; they would be dropped without a dead-letter topic."""
    fixture = limited(max_attempts=1, dead_letter_topic=dead_letter_topic)
    fixture.publish(b"a", b"b")
    fixture.subscriber(ready=2).receive()
    after = fixture.restarted(saved(fixture))
    assert (after.channel().messages.withdrawn.waiting, after.channel().given_up_count) == (0, 0)
    reader = after.subscriber()
    (message,) = reader.receive()
    assert (message.body, message.attempts) == (b"a", 2)
    reader.requeue(message)
    assert (after.channel().messages.withdrawn.waiting, after.channel().given_up_count) == (
        int(bool(dead_letter_topic)),
        int(not dead_letter_topic),
    )


# ---------------------------------------------------------------------- messages that were only prefetched


@pytest.mark.parametrize("restarts", [False, True])
def test_crash_costs_only_the_message_that_the_client_worked_on(restarts: bool) -> None:
    """The others are delivered first the next time, so one message that crashes its client cannot hold them up."""
    fixture = limited(max_attempts=3)
    fixture.publish(*(b"%d" % n for n in range(100)))
    received: list[list[bytes]] = []
    for _ in range(3):
        crashing = fixture.subscriber(ready=100)
        received.append([each.body for each in crashing.receive()])
        crashing.leave()
        if restarts:
            fixture = fixture.restarted(saved(fixture))
    assert [each[0] for each in received] == ([b"0"] * 3 if restarts else [b"0", b"1", b"2"])
    last = fixture.subscriber(ready=100)
    messages = last.receive()
    # As with nsqd, the attempts are deliveries.
    assert [each.attempts for each in messages] == [4] * (97 + 3 * (not restarts) + 2 * restarts)
    (taken,) = fixture.channel().messages.withdrawn.take(100) if restarts else (None,)
    assert taken is None or (taken.sequence, taken.reason) == (0, Reason.CONNECTION_LOST)


def test_touched_messages_are_those_that_a_lost_client_worked_on() -> None:
    fixture = limited(max_attempts=1)
    fixture.publish(b"a", b"b", b"c", b"d")
    subscriber = fixture.subscriber(ready=4)
    messages = subscriber.receive()
    fixture.pass_ms(1)
    subscriber.touch(messages[1])
    subscriber.touch(messages[2])
    subscriber.leave()
    assert [each.sequence for each in fixture.channel().messages.withdrawn.take(9)] == [1, 2]
    assert fixture.drain() == [b"a", b"d"]


def test_messages_returned_by_a_closing_client_have_not_failed() -> None:
    fixture = limited(max_attempts=2, dead_letter_topic="")
    fixture.publish(b"a", b"b")
    for attempts in range(1, 9):
        closing = fixture.subscriber(ready=2)
        messages = closing.receive()
        assert [each.attempts for each in messages] == [attempts] * 2  # as with nsqd
        closing.consumer.closing = True
        for message in messages:
            closing.requeue(message)
        closing.leave()
    # Each has its two attempts left.
    reader = fixture.subscriber(ready=1)
    for _ in range(4):
        assert fixture.channel().given_up_count < 2
        (message,) = reader.receive()
        reader.requeue(message)
    assert fixture.channel().given_up_count == 2


def test_messages_have_not_failed_if_the_broker_ends_the_connection() -> None:
    fixture = limited(max_attempts=1)
    fixture.publish(b"a")
    subscriber = fixture.subscriber()
    subscriber.receive()
    fixture.channel().remove(subscriber.consumer, failed=False)
    assert fixture.channel().messages.withdrawn.waiting == 0
    assert fixture.drain() == [b"a"]


def returned_three_times() -> Fixture:
    """A message that closing clients have returned three times."""
    fixture = limited(max_attempts=2)
    fixture.publish(b"a")
    for _ in range(3):
        closing = fixture.subscriber()
        (message,) = closing.receive()
        closing.consumer.closing = True
        closing.requeue(message)
        closing.leave()
    return fixture


def test_returned_messages_have_their_attempts_left_after_a_restart() -> None:
    fixture = returned_three_times()
    fixture = fixture.restarted(saved(fixture))
    subscriber = fixture.subscriber()
    for waiting in range(2):
        assert attempt(subscriber, 1).attempts == 4 + waiting
        assert fixture.channel().messages.withdrawn.waiting == waiting


def test_a_message_in_the_place_of_a_returned_one_that_a_power_cut_lost_has_no_further_attempts() -> None:
    """With `--sync=interval` the log can end before it, and its sequence is used again."""
    fixture = returned_three_times()
    fixture = fixture.restarted(saved(fixture), MemoryLog())
    fixture.publish(b"new")
    assert attempt(fixture.subscriber(), 2).attempts == 2
    assert fixture.channel().messages.withdrawn.waiting == 1


def test_returned_messages_have_no_further_attempts_after_a_seek() -> None:
    """Attempts start again."""
    fixture = returned_three_times()
    fixture.seek(0)
    assert attempt(fixture.subscriber(), 2).attempts == 2
    assert fixture.channel().messages.withdrawn.waiting == 1


def test_returned_messages_are_remembered_up_to_a_limit() -> None:
    """Then all deliveries count of those that were returned longest ago."""
    messages = limited().channel().messages
    for sequence in (*range(MAX_PREFETCHED), 0, MAX_PREFETCHED):
        messages.add_prefetched(sequence)
    assert len(messages.prefetched) == MAX_PREFETCHED
    assert [messages.failed_attempts(each, 5) for each in (0, 1, 2, MAX_PREFETCHED)] == [3, 5, 4, 4]


def test_delayed_message_of_a_closing_client_has_failed() -> None:
    fixture = limited(max_attempts=1)
    fixture.publish(b"a")
    closing = fixture.subscriber()
    (message,) = closing.receive()
    closing.consumer.closing = True
    closing.requeue(message, delay_ms=1)
    assert fixture.channel().messages.withdrawn.waiting == 1


# ---------------------------------------------------------------------- withdrawing messages


def in_every_state(**options: Any) -> tuple[Fixture, Subscriber]:
    """0 is in flight, 1 requeued, 2 deferred by REQ, 3 new, 4 deferred by its publisher, 5 and 6 new."""
    fixture = Fixture(**options)
    subscriber = fixture.subscriber(ready=3)
    fixture.publish(b"0", b"1", b"2")
    received = subscriber.receive()
    subscriber.ready(0)
    subscriber.requeue(received[1])
    subscriber.requeue(received[2], delay_ms=100)
    fixture.publish(b"3")
    fixture.publish(b"4", defer_ms=50)
    fixture.publish(b"5", b"6")
    assert fixture.counts() == (4, 1, 2)
    return fixture, subscriber


def test_states_of_waiting_messages() -> None:
    fixture, _ = in_every_state()
    channel = fixture.channel()
    assert [waiting_from(channel, start) for start in (0, 2, 6, 7)] == [[(1, 7)], [(2, 7)], [(6, 7)], []]
    fixture.publish(b"7", defer_ms=50)
    fixture.publish(b"8")
    assert channel.withdraw([5])
    assert channel.cancel([7]) == [7]
    assert waiting_from(channel, 4) == [(4, 5), (6, 7), (8, 9)]


def waiting_from(channel: Channel, sequence: int) -> list[tuple[int, int]]:
    found: deque[tuple[int, int]] = deque()
    for _ in channel.messages.find_waiting(sequence, found):
        pass
    return list(found)


def test_search_of_many_messages_has_small_steps_and_misses_none() -> None:
    """Messages that become due between two steps change their place."""
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish_many(10_000, each=1000)
    subscriber = fixture.subscriber(ready=2500)
    received = subscriber.receive()
    subscriber.ready(0)
    for message in received[::2]:
        subscriber.requeue(message)
    for number in range(10_000):
        fixture.publish(b"later", defer_ms=1000 + number % 7 * 1000)
    fixture.publish_many(1000, each=1000)
    found: deque[tuple[int, int]] = deque()
    steps = 0
    for _ in channel.messages.find_waiting(100, found):
        steps += 1
        fixture.pass_ms(500)
        fixture.publish(b"late", defer_ms=600_000)
    assert steps > 20
    assert channel.deferred_count < 10_000
    start, end = found.pop()
    assert start == 2500
    assert 21_000 <= end <= 21_000 + steps  # messages that arrived meanwhile may or may not be found
    assert list(found) == [(n, n + 1) for n in range(100, 2500, 2)]


@pytest.mark.parametrize("on_disk", [False, True])
def test_messages_in_any_other_state_than_in_flight_can_be_withdrawn(tmp_path: Path, on_disk: bool) -> None:
    options = {"log": disk_log(tmp_path / "log"), "mem_queue_size": 0, "cache_bytes": 0} if on_disk else {}
    fixture, subscriber = in_every_state(**options)
    channel = fixture.channel()
    taken = channel.withdraw([0, 1, 2, 4, 6, 99])
    assert sorted((each.sequence, each.attempts, each.reason) for each in taken) == [
        (1, 1, None),
        (2, 1, None),
        (4, 0, None),
        (6, 0, None),
    ]
    assert (channel.messages.ready_count, channel.deferred_count, channel.in_flight_count, channel.depth) == (
        2,
        0,
        1,
        6,
    )
    fixture.pass_ms(1000)
    subscriber.ready(9)
    assert subscriber.receive_bodies() == [b"3", b"5"]
    channel.put_back([each for each in taken if each.sequence != 4])
    assert channel.dispose(each for each in taken if each.sequence == 4) == 1
    assert sorted(subscriber.receive_bodies()) == [b"1", b"2", b"6"]
    assert channel.depth == 0


def test_adjacent_holes_are_merged() -> None:
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish_many(10)
    for sequence in (4, 2, 3, 8, 9):
        channel.dispose(channel.withdraw([sequence]))
    assert saved(fixture)["channels"][0]["holes"] == [[2, 5], [8, 10]]
    channel.dispose(channel.withdraw([0, 1]))
    assert (channel.cursor, saved(fixture)["channels"][0]["holes"]) == (5, [[8, 10]])
    assert fixture.drain() == [b"m5", b"m6", b"m7"]
    assert saved(fixture)["channels"][0]["holes"] == []


def test_withdrawn_messages_are_back_after_a_restart() -> None:
    fixture, _ = in_every_state()
    fixture.channel().withdraw([1, 3, 4])
    after = fixture.restarted(saved(fixture))
    assert after.counts() == (6, 0, 1)
    assert sorted(after.drain()) == [b"0", b"1", b"3", b"4", b"5", b"6"]


def test_withdrawn_message_of_a_full_memory_log_is_kept() -> None:
    fixture = Fixture(name="topic#ephemeral")
    fixture.channel()
    fixture.publish(b"a")
    taken = fixture.channel().withdraw([0])
    fixture.log.discard_before(1)
    fixture.cache.forget_topic("topic#ephemeral")
    fixture.channel().put_back(taken)
    assert fixture.drain() == [b"a"]


def test_deferred_messages_can_be_cancelled() -> None:
    fixture, _ = in_every_state()
    channel = fixture.channel()
    assert sorted(channel.cancel([0, 1, 2, 3, 4])) == [2, 4]
    assert (fixture.counts(), channel.next_due_ns) == ((4, 1, 0), None)


# ---------------------------------------------------------------------- messages for one channel


def test_message_for_one_channel_is_not_delivered_by_others() -> None:
    fixture = Fixture()
    fixture.channel("one")
    fixture.channel("two")
    fixture.publish(b"both")
    fixture.publish(b"only", only="two")
    fixture.publish(b"both again")
    fixture.pass_ms(0)
    assert (fixture.counts("one"), fixture.counts("two")) == ((2, 0, 0), (3, 0, 0))
    assert [fixture.channel(name).message_count for name in ("one", "two")] == [2, 3]
    assert fixture.drain("one") == [b"both", b"both again"]
    assert sorted(fixture.drain("two")) == [b"both", b"both again", b"only"]
    assert first_needed(saved(fixture)) == 3


def test_message_for_one_channel_can_be_deferred_and_waits_for_a_pause() -> None:
    fixture = Fixture()
    fixture.channel("one")
    fixture.channel("two")
    fixture.topic.pause()
    fixture.publish(b"soon", only="two")
    fixture.publish(b"later", only="two", defer_ms=100)
    assert (fixture.topic.depth, fixture.counts("two")) == (0, (0, 0, 0))
    after = fixture.restarted(saved(fixture))
    after.topic.unpause()
    after.pass_ms(0)
    assert (after.counts("one"), after.counts("two")) == ((0, 0, 0), (1, 0, 1))
    after.pass_ms(100)
    assert sorted(after.drain("two")) == [b"later", b"soon"]


def test_message_for_one_channel_is_restored_after_a_crash() -> None:
    fixture = Fixture()
    fixture.channel("one")
    fixture.channel("two")
    state = saved(fixture)
    fixture.publish(b"only", only="two")
    after = fixture.restarted(state)
    after.pass_ms(0)
    assert (after.drain("one"), after.drain("two")) == ([], [b"only"])


def test_message_for_a_deleted_channel_is_dropped() -> None:
    fixture = Fixture()
    fixture.channel("one")
    fixture.publish(b"only", only="two")
    fixture.channel("two")
    fixture.pass_ms(0)
    assert (fixture.counts("one"), fixture.counts("two")) == ((0, 0, 0), (0, 0, 0))


@pytest.mark.parametrize("passed_ms", [0, 100])
def test_seek_does_not_deliver_messages_for_other_channels(passed_ms: int) -> None:
    fixture = Fixture()
    fixture.channel("one")
    fixture.channel("two")
    fixture.publish(b"a")
    fixture.publish(b"only", only="two", defer_ms=50)
    fixture.publish(b"b")
    for name in ("one", "two"):
        fixture.drain(name)
    fixture.pass_ms(passed_ms)
    for name in ("one", "two"):
        fixture.seek(0, name)
    assert fixture.drain("one") == [b"a", b"b"]
    fixture.pass_ms(1000)
    assert sorted(fixture.drain("two")) == [b"a", b"b", b"only"]
    assert fixture.counts("one") == (0, 0, 0)


def test_metadata_has_the_channel() -> None:
    fixture = Fixture()
    (stored,) = fixture.store(b"x", only="two")
    assert only_channel(stored.metadata) == "two"
    assert only_channel(b"") is None
    assert stored.due_ns == fixture.now_ns
