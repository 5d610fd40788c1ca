"""Tests for the order by key of a channel."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from broker.api import address, running_api
from broker.state import (
    BUFFERED,
    SECOND,
    TIMESTAMP,
    Fixture,
    Received,
    Subscriber,
    UnreadableLog,
    disk_log,
    records,
)
from broker.support import connected
from trio_nsq.broker.state import key_order
from trio_nsq.broker.state.batch import Batch
from trio_nsq.broker.state.broker import MessageIds
from trio_nsq.broker.state.in_flight_batch import InFlightBatch
from trio_nsq.broker.state.message_keys import MessageKeys
from trio_nsq.broker.state.move import Move
from trio_nsq.broker.state.settings import SettingsError
from trio_nsq.broker.state.withdrawn import WithdrawnMessage
from trio_nsq.log import Log, LogReadError, MemoryLog


def body(key: Any, number: int) -> bytes:
    return json.dumps({"user": {"id": key}, "n": number}).encode()


def ordered(log: Log | None = None, **options: Any) -> Fixture:
    """Return a topic with a channel whose messages have an order."""
    fixture = Fixture(log, **options)
    fixture.channel().configure({"order_by": "json:user.id"})
    return fixture


def publish(fixture: Fixture, keys: str, **options: Any) -> None:
    """Publish a message for each key; their numbers are their sequences."""
    first = fixture.topic.end
    fixture.publish(*[body(key, first + number) for number, key in enumerate(keys)], **options)


def numbers(messages: list[Received]) -> list[int]:
    return [json.loads(message.body)["n"] for message in messages]


def received(subscriber: Subscriber) -> list[int]:
    return numbers(subscriber.receive())


# ---------------------------------------------------------------------- keys

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters()),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(("id", "user", "n")), each),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(("user", "id", "n")), _VALUES), st.booleans(), st.integers(-1, 60))
def test_key_is_what_json_reads(value: dict[str, Any], is_ascii: bool, cut: int) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    text = text if cut < 0 else text[:cut] + text[cut + 1 :]
    try:
        member = json.loads(text.decode(), parse_constant=int)["user"]["id"]
    except (ValueError, KeyError, TypeError):
        member = None
    keys = MessageKeys("json:user.id").of_all(Batch([records([text])]))
    expected = member if isinstance(member, str | int | float | bool) else None
    if expected is not None and len(str(expected)) > 64:
        expected = hash(expected)
    # Of a body that is not UTF-8, or has a number that is too long to be read, the key may be found.
    assert keys == [expected] or (expected is None and not _is_read(text))


def _is_read(text: bytes) -> bool:
    try:
        json.loads(text.decode(), parse_constant=int)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("text", [r"\ud83d", "1e999", "9" * 5000, "[" * 5000 + "]" * 5000])
def test_other_members_do_not_matter(text: str) -> None:
    value = text if text[0] in "19[" else f'"{text}"'
    batch = Batch([records([b'{"user": {"id": "a"}, "text": %s}' % value.encode()])])
    keys = MessageKeys("json:user.id").of_all(batch)
    assert keys == ["a"] or text.startswith("[")


# ---------------------------------------------------------------------- one message of a key


def test_one_message_of_a_key_is_in_flight() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100)
    publish(fixture, "aabac")
    first = subscriber.receive()
    assert numbers(first) == [0, 2, 4]
    assert fixture.counts() == (2, 3, 0)
    assert fixture.channel().messages.blocked_count == 2
    subscriber.finish(first[1:])
    assert received(subscriber) == []
    subscriber.finish(first[:1])
    (second,) = subscriber.receive()
    assert (numbers([second]), second.attempts) == ([1], 1)
    subscriber.finish([second])
    assert received(subscriber) == [3]


def test_messages_without_a_key_do_not_wait() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100)
    without = [b"", b"no JSON", b"[1]", b"{}", b'{"user": 1}', body(None, 0), body({}, 0), body([1], 0)]
    fixture.publish(*without * 2)
    assert subscriber.receive_bodies() == without * 2


def test_messages_that_are_not_consecutive_are_in_flight_together() -> None:
    fixture = ordered()
    channel, subscriber = fixture.channel(), fixture.subscriber(ready=10)
    publish(fixture, "aabacadaea")
    a, b, c, d, e = subscriber.receive()
    assert numbers([a, b, c, d, e]) == [0, 2, 4, 6, 8]
    fixture.pass_ms(30_000)
    assert subscriber.touch(d) is None
    subscriber.requeue(b)
    subscriber.finish([a])
    assert channel.messages.oldest == 1
    (again, released) = subscriber.receive()
    assert numbers([again, released]) == [2, 1]
    assert [again.attempts, released.attempts] == [2, 1]
    unfinished = sorted(channel.messages.unfinished())
    assert unfinished == [(1, 1), (2, 2), (3, 0), (4, 1), (5, 0), (6, 1), (7, 0), (8, 1), (9, 0)]
    subscriber.finish([released])
    assert received(subscriber) == [3]
    assert channel.messages.oldest == 2
    fixture.pass_ms(30_001)  # c and e time out, d was touched
    assert sorted(received(subscriber)) == [4, 8]
    assert subscriber.finish([d, again]) == []
    assert [reason for _, reason in subscriber.finish([b])] == ["ID not in flight"]


def sent_to(subscriber: Subscriber) -> set[InFlightBatch]:
    """Return what the client has in flight: the messages of each send."""
    return {delivery for _, delivery in subscriber.consumer.in_flight}


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_answers_in_the_order_of_delivery_split_no_run(piece: int) -> None:
    """Also for several records, and for messages that were blocked: their ids are lower than those sent before."""
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100)
    publish(fixture, "abcd")
    held = subscriber.receive()
    for keys in ("aebf", "cgdh"):
        publish(fixture, keys)
    held += subscriber.receive()
    assert numbers(held) == [0, 1, 2, 3, 5, 7, 9, 11]
    deliveries = sent_to(subscriber)
    assert len(deliveries) == 2
    done = 0
    while done < len(held):
        answers = held[done : done + piece]
        assert subscriber.finish(answers) == []
        done += len(answers)
        held += subscriber.receive()
        deliveries |= sent_to(subscriber)
    assert sorted(numbers(held)) == list(range(12))
    assert not any(delivery.is_split for delivery in deliveries)


@given(st.text("abcdef", min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 20), st.randoms())
def test_answers_may_come_in_any_order(keys: str, each: int, ready: int, random: Random) -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=ready)
    for start in range(0, len(keys), each):
        publish(fixture, keys[start : start + each])
    held: list[Received] = []
    done: list[Received] = []
    sent: list[int] = []
    while (got := subscriber.receive()) or held:
        held += got
        sent += numbers(got)
        in_flight = [keys[number] for number in numbers(held)]
        assert len(set(in_flight)) == len(in_flight) <= ready
        random.shuffle(held)
        count = random.randint(1, len(held))
        again = random.sample(done, min(len(done), 2))
        assert subscriber.finish([*again, *held[:count]]) == [
            (message.id, "ID not in flight") for message in again
        ]
        done += held[:count]
        del held[:count]
    assert sorted(sent) == list(range(len(keys)))
    for key in set(keys):
        of_key = [number for number in sent if keys[number] == key]
        assert of_key == sorted(of_key)


def test_ids_descend_where_the_node_id_was_changed() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100)
    publish(fixture, "abc")
    fixture.ids = MessageIds(3, 1000)
    publish(fixture, "def")
    messages = subscriber.receive()
    for number in (4, 1):
        assert subscriber.requeue(messages[number]) is None
        assert received(subscriber) == [number]
    assert subscriber.finish([*messages[2:4], messages[5], messages[0]]) == []


def test_messages_that_were_blocked_may_lie_between_others_in_flight() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100)
    publish(fixture, "aabbcdef")
    messages = subscriber.receive()
    assert numbers(messages) == [0, 2, 4, 5, 6, 7]
    assert subscriber.finish(messages[:2]) == []
    between = subscriber.receive()
    assert numbers(between) == [1, 3]
    assert subscriber.finish([messages[3]]) == []
    assert subscriber.requeue(messages[4]) is None
    assert received(subscriber) == [6]
    assert subscriber.finish([between[1], messages[5], between[0], messages[2]]) == []


def test_time_from_publish_to_fin_is_measured() -> None:
    fixture = ordered(e2e_window_ns=600 * SECOND)
    fixture.now_ns = TIMESTAMP + SECOND
    subscriber = fixture.subscriber(ready=100)
    publish(fixture, "aabb")
    publish(fixture, "cacb")
    while got := subscriber.receive():
        subscriber.finish(got)
    latency = fixture.channel().e2e_latency
    assert latency is not None
    recent = latency.recent(fixture.now_ns)
    assert recent.count == 8
    assert recent.quantiles([1.0]) == pytest.approx([SECOND], rel=0.02)


def test_several_consumers_share_the_keys() -> None:
    fixture = ordered()
    one, other = fixture.subscriber(), fixture.subscriber()
    publish(fixture, "aab")
    sent = {consumer: numbers(messages) for consumer, messages in fixture.pump(fixture.channel())}
    assert sent == {one.consumer: [0], other.consumer: [2]}


def test_answer_of_another_client_releases_no_key() -> None:
    fixture = ordered()
    owner, other = fixture.subscriber(), fixture.subscriber(ready=0)
    publish(fixture, "aa")
    (message,) = owner.receive()
    assert other.finish([message]) == [(message.id, "client does not own message")]
    other.ready(1)
    assert received(other) == []
    assert owner.finish([message, message]) == [(message.id, "ID not in flight")]
    owner.ready(0)
    assert received(other) == [1]


@pytest.mark.parametrize("delay_ms", [0, 50])
def test_requeued_message_keeps_its_key_and_holds_no_other(delay_ms: int) -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=1)
    publish(fixture, "aab")
    (message,) = subscriber.receive()
    subscriber.requeue(message, delay_ms)
    got = subscriber.receive()
    if delay_ms:
        assert numbers(got) == [2]
        subscriber.finish(got)
        assert received(subscriber) == []
        fixture.pass_ms(delay_ms)
        got = subscriber.receive()
    assert (numbers(got), got[0].attempts) == ([0], 2)


def test_timed_out_message_keeps_its_key() -> None:
    fixture = ordered()
    slow, other = fixture.subscriber(msg_timeout_ms=100), fixture.subscriber(ready=0)
    publish(fixture, "aab")
    assert received(slow) == [0]
    slow.ready(0)
    other.ready(10)
    assert received(other) == [2]
    fixture.pass_ms(100)
    assert received(other) == [0]


def test_lost_connection_breaks_no_order() -> None:
    fixture = ordered()
    lost = fixture.subscriber(ready=3)
    publish(fixture, "abcabc")
    assert received(lost) == [0, 1, 2]
    lost.leave()
    subscriber = fixture.subscriber(ready=1)
    sent: list[int] = []
    while got := subscriber.receive():
        sent += numbers(got)
        subscriber.finish(got)
    assert sorted(sent) == [0, 1, 2, 3, 4, 5]
    assert all(sent.index(number) < sent.index(number + 3) for number in range(3))


def test_exhausted_message_releases_its_key() -> None:
    fixture = ordered()
    fixture.channel().configure({"max_attempts": 1})
    subscriber = fixture.subscriber()
    publish(fixture, "aa")
    subscriber.requeue(subscriber.receive()[0])
    assert received(subscriber) == [1]


def test_dead_letter_releases_its_key_once_it_is_stored() -> None:
    fixture = ordered()
    channel = fixture.channel()
    channel.configure({"max_attempts": 1, "dead_letter_topic": "dead"})
    subscriber = fixture.subscriber()
    publish(fixture, "aa")
    subscriber.requeue(subscriber.receive()[0])
    taken = channel.messages.withdrawn.take(10)
    assert received(subscriber) == []
    channel.dispose_dead_letters(taken)
    assert received(subscriber) == [1]


def test_cancelled_message_releases_its_key() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber()
    publish(fixture, "aa")
    subscriber.requeue(subscriber.receive()[0], delay_ms=1000)
    assert received(subscriber) == []
    assert fixture.channel().cancel([0]) == [0]
    assert received(subscriber) == [1]


def test_deferred_message_gets_its_place_when_it_is_due() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "a", defer_ms=100)
    publish(fixture, "aa")
    (message,) = subscriber.receive()
    assert numbers([message]) == [1]
    fixture.pass_ms(100)
    assert received(subscriber) == []
    subscriber.finish([message])
    assert received(subscriber) == [0]


@given(st.lists(st.booleans(), max_size=12))
def test_deferred_messages_that_are_due_come_after_earlier_ones(deferred: list[bool]) -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "a")
    got = subscriber.receive()
    for each in deferred:
        publish(fixture, "a", defer_ms=100 * each)
    fixture.pass_ms(100)
    sent: list[int] = []
    while got:
        assert received(subscriber) == []
        sent += numbers(got)
        subscriber.finish(got)
        got = subscriber.receive()
    assert sent == list(range(len(deferred) + 1))


def test_expired_messages_release_their_keys() -> None:
    fixture = ordered()
    fixture.topic.configure({"ttl_ms": 1000})
    fixture.now_ns = TIMESTAMP
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "aaab")
    got = subscriber.receive()
    assert numbers(got) == [0, 3]
    fixture.now_ns += 2 * SECOND
    subscriber.finish(got)
    assert received(subscriber) == []
    assert fixture.counts() == (0, 0, 0)
    assert fixture.channel().messages.expired_count == 2


def test_message_of_a_released_key_does_not_wait_for_others() -> None:
    """Output buffering would make each wait for a quarter of a second: no other message can fill the buffer."""
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100, buffer=BUFFERED)
    publish(fixture, "aaa")
    for number in range(2):
        got = subscriber.receive()
        assert numbers(got) == [number]
        subscriber.finish(got)
        assert not fixture.channel().dispatcher.can_wait
    subscriber.finish(subscriber.receive())
    publish(fixture, "b")
    assert fixture.channel().dispatcher.can_wait


# ---------------------------------------------------------------------- no starvation, and the limit


def test_few_bodies_are_read_at_once() -> None:
    """Keys of blocked messages are read in parts: other channels must be served meanwhile."""
    fixture = ordered()
    subscriber = fixture.subscriber(ready=100)
    padding = "x" * 300_000
    for _ in range(20):
        fixture.publish(json.dumps({"user": {"id": 1}, "padding": padding}).encode())
    dispatcher, places = fixture.channel().dispatcher, [0]
    while dispatcher.dispatch(fixture.now_ns) or dispatcher.budget_exhausted:
        places.append(fixture.channel().cursor)
    assert subscriber.consumer.in_flight.count == 1
    assert places[-1] > 10
    assert max(end - start for start, end in pairwise(places)) <= 5


def test_stalled_key_does_not_delay_others() -> None:
    fixture = ordered(mem_queue_size=1000)
    stuck, subscriber = fixture.subscriber(ready=0), fixture.subscriber(ready=0)
    publish(fixture, "a")
    stuck.ready(1)
    assert received(stuck) == [0]
    count = 30_000
    for start in range(0, count, 1000):
        fixture.publish(
            *[body("a" if number % 2 else number, number) for number in range(start, start + 1000)]
        )
    subscriber.ready(2500)
    sent: list[int] = []
    while got := subscriber.receive():
        sent += numbers(got)
        subscriber.finish(got)
    assert sent == list(range(0, count, 2))
    assert fixture.channel().messages.blocked_count == count // 2


def test_cursor_stops_at_the_limit_until_a_key_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "MAX_BLOCKED", 2)
    fixture = ordered()
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "aaaabab")
    first = subscriber.receive()
    assert numbers(first) == [0]
    assert fixture.channel().cursor == 3
    subscriber.finish(first)
    second = subscriber.receive()
    assert numbers(second) == [1]
    subscriber.finish(second)
    third = subscriber.receive()
    assert numbers(third) == [2, 4]
    assert fixture.counts() == (3, 2, 0)


def test_full_topic_drops_blocked_messages_before_fresh_ones() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=1)
    publish(fixture, "aaaa")
    (message,) = subscriber.receive()
    fixture.topic.configure({"max_messages": 2, "when_full": "drop-oldest"})
    subscriber.ready(2)
    assert received(subscriber) == []  # all are blocked now
    fixture.topic.limits.make_room()
    publish(fixture, "b")
    fixture.topic.limits.make_room()
    assert received(subscriber) == [4]
    subscriber.finish([message])
    assert received(subscriber) == [3]
    assert fixture.channel().messages.dropped_count == 2


# ---------------------------------------------------------------------- operators


def test_order_of_a_channel_with_messages() -> None:
    fixture = Fixture()
    channel, subscriber = fixture.channel(), fixture.subscriber(ready=2)
    publish(fixture, "aaaaa")
    first = subscriber.receive()
    assert numbers(first) == [0, 1]
    subscriber.requeue(first[1])
    channel.configure({"order_by": "json:user.id"})
    subscriber.ready(10)
    second = subscriber.receive()
    assert numbers(second) == [1]  # the one in flight before has no place
    subscriber.finish([first[0], *second])
    assert received(subscriber) == [2]
    channel.configure({"order_by": None})
    assert received(subscriber) == [3, 4]


def test_empty_and_seek_forget_the_keys() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "aab")
    subscriber.receive()
    fixture.channel().empty()
    assert fixture.counts() == (0, 0, 0)
    publish(fixture, "a")
    assert received(subscriber) == [3]
    moved = fixture.seek(1)
    assert (moved.delivered_again, moved.in_flight) == (2, 1)
    assert received(subscriber) == [1, 2]


def test_peek_shows_blocked_messages() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "aaa")
    subscriber.receive()
    assert [each.sequence for each in fixture.channel().messages.peek("requeued")] == [1, 2]


def test_withdrawn_messages_leave_the_order() -> None:
    fixture = ordered()
    channel, subscriber = fixture.channel(), fixture.subscriber(ready=10)
    publish(fixture, "aaa")
    first = subscriber.receive()
    taken = channel.withdraw([1])
    assert [each.sequence for each in taken] == [1]
    subscriber.finish(first)
    assert received(subscriber) == [2]
    channel.put_back(taken)
    assert received(subscriber) == []  # the key is held


def test_withdrawn_message_of_unknown_key_delays_no_fresh_ones() -> None:
    fixture = Fixture()
    channel, subscriber = fixture.channel(), fixture.subscriber()
    publish(fixture, "ab")
    subscriber.requeue(subscriber.receive()[0])
    channel.configure({"order_by": "json:user.id"})
    channel.withdraw([0])
    assert received(subscriber) == [1]


OPERATIONS = ("cancel", "withdraw", "dispose", "drop")


@given(
    st.text("ab", min_size=3, max_size=12),
    st.lists(st.tuples(st.sampled_from([*OPERATIONS, "requeue", "defer", "finish"]), st.integers(0, 11))),
)
def test_what_an_operation_releases_is_due(keys: str, steps: list[tuple[str, int]]) -> None:
    """Consumers may have room: nobody would deliver the messages that a change makes ready, without a deadline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_order, "MAX_BLOCKED", 4)
        fixture = ordered()
        fixture.watch_deadlines()
        channel, subscriber = fixture.channel(), fixture.subscriber(ready=10)
        publish(fixture, keys)
        in_flight = {each.id: each for each in subscriber.receive()}
        taken: list[WithdrawnMessage] = []
        for what, pick in steps:
            fixture.watched.clear()
            if what in OPERATIONS:
                if what == "cancel":
                    channel.cancel([pick])
                elif what == "withdraw":
                    taken += channel.withdraw([pick])
                elif what == "dispose":
                    channel.dispose(taken)
                    taken = []
                else:
                    channel.messages.drop_oldest(min(pick, channel.messages.droppable_count))
            elif in_flight:
                message = in_flight.pop(list(in_flight)[pick % len(in_flight)])
                if what == "finish":
                    subscriber.finish([message])
                else:
                    subscriber.requeue(message, delay_ms=1000 if what == "defer" else 0)
            got = subscriber.receive()
            if got and what in OPERATIONS:
                assert fixture.watched[channel] <= fixture.now_ns
            in_flight |= {each.id: each for each in got}


def test_cancelled_move_keeps_the_order() -> None:
    fixture = ordered()
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "aaab")
    first = subscriber.receive()
    fixture.topic.moving.begin(Move(f"{1:016x}", "127.0.0.1:1", fixture.topic.end, 0))
    subscriber.requeue(first[0])
    subscriber.finish(first[1:])
    assert received(subscriber) == []
    fixture.topic.moving.end()
    second = subscriber.receive()
    assert numbers(second) == [0]
    subscriber.finish(second)
    assert received(subscriber) == [1]


# ---------------------------------------------------------------------- restarts and disks


def test_restart_keeps_the_order(tmp_path: Path) -> None:
    log = disk_log(tmp_path / "log")
    fixture = ordered(log)
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "abaacab")
    first = subscriber.receive()
    assert numbers(first) == [0, 1, 4]
    subscriber.requeue(first[0], delay_ms=60_000)
    state = json.loads(json.dumps(fixture.topic.snapshot()))
    other = fixture.restarted(state)
    subscriber = other.subscriber(ready=10)
    sent = subscriber.receive()
    assert numbers(sent) == [0, 1, 4]  # the delay is lost, the order is not
    subscriber.finish(sent)
    assert received(subscriber) == [2, 6]
    log.close()


def test_message_that_cannot_be_read_loses_its_place() -> None:
    log = UnreadableLog(max_messages=1000)
    fixture = ordered(log, cache_bytes=1, mem_queue_size=1)
    publish(fixture, "a")
    publish(fixture, "b")
    subscriber = fixture.subscriber(ready=10)
    got = subscriber.receive()
    state = fixture.topic.snapshot()
    other = fixture.restarted(state)
    again = other.subscriber(ready=10)
    log.fails = True
    for _ in range(2):
        with pytest.raises(LogReadError):
            other.channel().dispatcher.dispatch(other.now_ns)
    log.fails = False
    assert sorted(received(again)) == sorted(numbers(got)) == [0, 1]


def test_ephemeral_topic_keeps_blocked_messages() -> None:
    fixture = ordered(name="t#ephemeral", cache_bytes=1, mem_queue_size=1)
    subscriber = fixture.subscriber(ready=10)
    publish(fixture, "aa")
    publish(fixture, "b")
    first = subscriber.receive()
    assert numbers(first) == [0, 2]
    fixture.log.discard_before(3)
    subscriber.finish(first)
    assert received(subscriber) == [1]


def test_memory_of_blocked_messages_of_an_ephemeral_topic_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps few messages in memory; what is blocked must not be an exception for messages of any size."""
    monkeypatch.setattr(key_order, "MAX_HELD_BYTES", 1024 * 1024)
    fixture = ordered(MemoryLog(max_messages=3), name="t#ephemeral", cache_bytes=1, mem_queue_size=1)
    channel, subscriber = fixture.channel(), fixture.subscriber(ready=10)
    large = b'{"user": {"id": 1}, "x": "%s"}' % (b"x" * 150_000)
    for _ in range(10):
        fixture.publish(large)
        subscriber.receive()
    (message,) = [*subscriber.consumer.in_flight]
    assert (message[0], channel.messages.blocked_count) == (0, 7)
    assert channel.messages.ready_count > 0
    for _ in range(2):  # what leaves makes room
        channel.withdraw([each.sequence for each in channel.messages.peek("requeued")])
        assert channel.messages.blocked_count == 0
        subscriber.receive()
        for _ in range(10):
            fixture.publish(large)
            subscriber.receive()
        assert channel.messages.blocked_count == 7


# ---------------------------------------------------------------------- a broker


async def test_message_behind_a_cancelled_one_is_delivered(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_api(tmp_path) as api, connected(address(api)) as client:
        await client.subscribe("t", "c", 100)
        changed = await api.send(
            "PUT", "/channel/settings?topic=t&channel=c", body=b'{"order_by": "json:user.id"}'
        )
        assert changed.status_code == 200, changed.text
        await api.tcp.publish("t", body("a", 0), body("a", 1))
        message = await client.message()
        await client.send(b"REQ %s 600000\n" % message.id)
        while (await api.channel("t", "c"))["deferred_count"] != 1:
            await trio.lowlevel.checkpoint()
        path = f"/channel/deferred/cancel?topic=t&channel=c&id={message.id.decode()}"
        assert (await api.send("POST", path)).status_code == 200
        with trio.fail_after(1):
            assert (await client.message()).body == body("a", 1)


# ---------------------------------------------------------------------- keys


def keys(order_by: str, *bodies: bytes) -> list[object]:
    batch = Batch([records(bodies)])
    found = MessageKeys(order_by).of_all(batch)
    assert found == [MessageKeys(order_by).of(batch, index) for index in range(len(bodies))]
    return found


scalars = st.text(max_size=5) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(scalars, scalars)
def test_equal_values_are_equal_keys(one: object, other: object) -> None:
    escaped, plain = (
        json.dumps({"k": one}, ensure_ascii=ascii_).encode("utf-8", "surrogatepass")
        for ascii_ in (True, False)
    )
    found = keys("json:k", escaped, plain, json.dumps({"x": [], "k": other}).encode())
    if isinstance(one, str) and any("\ud800" <= each <= "\udfff" for each in one):
        return  # not UTF-8
    assert found[0] is not None
    assert found[0] == found[1]
    if one == other:
        assert found[0] == found[2]


@given(st.lists(st.binary(max_size=40) | st.text('{}[]":,u1\\e ').map(str.encode), min_size=1, max_size=5))
def test_any_body_has_a_key_or_none(bodies: list[bytes]) -> None:
    keys("json:u", *bodies)


@pytest.mark.parametrize("others", [(), (1,)])
def test_long_keys_are_hashed(others: tuple[object, ...]) -> None:
    """So that a channel with many keys needs little memory. Short ones are kept as they are, which is faster."""
    values = ["x" * 64, "x" * 65, "x" * 65, "x" * 64 + "y", *others]
    short, first, again, second, *_ = keys("json:k", *[json.dumps({"k": each}).encode() for each in values])
    assert short == "x" * 64
    assert isinstance(first, int)
    assert first == again != second


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"k":' + b"1" * 5000 + b"}", b'{"k":NaN}', b'{"k":"\xff"}', b'{"k"']
)
def test_hostile_bodies_have_no_key(text: bytes) -> None:
    assert keys("json:k", text) == [None]


def test_paths() -> None:
    text = b'{"a":{"b":"x"},"a.b":"y"}'
    (nested,), (plain,) = keys("json:a.b", text), keys(r"json:a\.b", text)
    assert (nested, plain) == ("x", "y")


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\tb", "a\x00", "é", "\U0001f600", "\u2028", " "])
def test_any_name_of_a_member(name: str) -> None:
    order_by = f"json:{name}.id".replace("\\", r"\\")
    Fixture().channel().configure({"order_by": order_by})
    bodies = [
        json.dumps({"x": 1, name: {"id": "k"}}, ensure_ascii=ascii_).encode() for ascii_ in (True, False)
    ]
    assert keys(order_by, *bodies) == ["k"] * 2


@pytest.mark.parametrize(
    "order_by",
    ["json:", "json:a..b", "header:", "header:Upper", "header:a b", "user", "json", 5, "json:" + "a" * 2000],
)
def test_invalid_settings(order_by: object) -> None:
    fixture = Fixture()
    with pytest.raises(SettingsError, match="order_by is "):
        fixture.channel().configure({"order_by": order_by})
