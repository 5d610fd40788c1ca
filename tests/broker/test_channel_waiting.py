"""Tests for output buffering in a channel: whether messages may wait for more, and until when."""

import pytest

from broker.state import MS, Fixture, Subscriber
from trio_nsq.protocol.bulk import MESSAGE_FRAME_BYTES

BUFFER = (1000, 250)
"""output_buffer_size, and output_buffer_timeout in ms."""


def waiting_for(*consumers: Subscriber) -> Fixture:
    """Return a topic and consumers with these buffers; all published messages are delivered and finished."""
    fixture = consumers[0].fixture
    fixture.publish(*[b"before"] * len(consumers))
    for consumer, messages in fixture.pump(fixture.channel()):
        subscriber = next(each for each in consumers if each.consumer is consumer)
        subscriber.finish(messages)
    return fixture


def test_message_may_wait_if_everything_before_was_sent() -> None:
    fixture = Fixture()
    one = fixture.subscriber(ready=100, buffer=BUFFER)
    fixture.publish(b"first")
    assert not fixture.channel().dispatcher.can_wait
    assert one.receive_bodies() == [b"first"]
    fixture.publish(b"second")
    assert fixture.channel().dispatcher.can_wait


def test_messages_of_a_limited_topic_do_not_wait() -> None:
    """It could refuse further ones for lack of room."""
    fixture = waiting_for(Fixture().subscriber(ready=100, buffer=BUFFER))
    fixture.topic.configure({"max_messages": 1000})
    fixture.publish(b"x")
    assert not fixture.channel().dispatcher.can_wait
    fixture.topic.configure({"max_messages": None})
    assert fixture.channel().dispatcher.can_wait


def test_message_waits_for_the_negotiated_time_after_the_last_output() -> None:
    fixture = waiting_for(Fixture().subscriber(ready=100, buffer=BUFFER))
    fixture.publish(b"x")
    exactly_ns = fixture.now_ns + 250 * MS
    assert exactly_ns <= fixture.channel().dispatcher.buffering.wait_until_ns <= exactly_ns + 250 * MS // 50
    fixture.pass_ms(100)
    assert exactly_ns <= fixture.channel().dispatcher.buffering.wait_until_ns <= exactly_ns + 250 * MS // 50
    fixture.pump(fixture.channel())
    assert fixture.channel().dispatcher.buffering.wait_until_ns >= exactly_ns + 100 * MS


@pytest.mark.parametrize("buffer", [(1, 0), (1000, 0)])
def test_without_a_timeout_nothing_waits_in_the_channel(buffer: tuple[int, int]) -> None:
    fixture = waiting_for(Fixture().subscriber(ready=100, buffer=buffer))
    fixture.publish(b"x")
    assert not fixture.channel().dispatcher.can_wait


def test_full_buffer_does_not_wait() -> None:
    fixture = waiting_for(Fixture().subscriber(ready=100, buffer=BUFFER))
    fixture.publish(bytes(400))
    fixture.publish(bytes(599 - 2 * MESSAGE_FRAME_BYTES))
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(b"")
    assert not fixture.channel().dispatcher.can_wait


def test_last_message_that_fits_the_window_does_not_wait() -> None:
    fixture = waiting_for(Fixture().subscriber(ready=2, buffer=BUFFER))
    fixture.publish(b"x")
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(b"y")
    assert not fixture.channel().dispatcher.can_wait


def test_leftover_messages_do_not_wait() -> None:
    fixture = Fixture()
    one = fixture.subscriber(ready=2, buffer=BUFFER)
    fixture.publish_many(3)
    received = one.receive()
    one.finish(received)
    assert not fixture.channel().dispatcher.can_wait
    one.ready(100)
    assert not fixture.channel().dispatcher.can_wait
    assert len(one.receive()) == 1
    fixture.publish(b"x")
    assert fixture.channel().dispatcher.can_wait


def test_each_client_has_its_own_buffer_and_share() -> None:
    fixture = Fixture()
    fixture = waiting_for(*[fixture.subscriber(ready=5, buffer=BUFFER) for _ in range(2)])
    fixture.publish(bytes(900), bytes(900))
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(bytes(200))
    assert not fixture.channel().dispatcher.can_wait
    fixture.pump(fixture.channel())
    fixture.publish(b"x")  # one client has two in flight, the other one
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(*[b"x"] * 6)
    assert not fixture.channel().dispatcher.can_wait


@pytest.mark.parametrize("impatient", [(1, 0), (1000, 25), (64, 250)])
def test_shortest_timeout_of_several_clients_counts(impatient: tuple[int, int]) -> None:
    fixture = Fixture()
    patient = fixture.subscriber(ready=100, buffer=BUFFER)
    hurried = fixture.subscriber(ready=100, buffer=impatient)
    waiting_for(patient, hurried)
    channel = fixture.channel()
    fixture.publish(bytes(200))
    assert (
        not channel.dispatcher.can_wait
        or channel.dispatcher.buffering.wait_until_ns <= fixture.now_ns + 26 * MS
    )
    hurried.leave()
    assert channel.dispatcher.can_wait
    assert channel.dispatcher.buffering.wait_until_ns >= fixture.now_ns + 250 * MS


def test_nothing_waits_in_a_topic_with_limits() -> None:
    fixture = Fixture()
    fixture.topic.configure({"max_messages": 1000})
    waiting_for(fixture.subscriber(ready=100, buffer=BUFFER))
    fixture.publish(b"x")
    assert not fixture.channel().dispatcher.can_wait
    fixture.topic.configure({"max_messages": None})
    assert fixture.channel().dispatcher.can_wait


def test_nothing_waits_for_a_client_that_fills_another_ones_share() -> None:
    fixture = Fixture()
    many, few = fixture.subscriber(ready=100, buffer=BUFFER), fixture.subscriber(ready=2, buffer=BUFFER)
    waiting_for(many, few)
    fixture.publish(b"x")
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(b"y")
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(b"z")  # two for one of them
    assert not fixture.channel().dispatcher.can_wait


def test_redelivered_messages_wait_as_others_do() -> None:
    fixture = Fixture()
    one = fixture.subscriber(ready=5, buffer=BUFFER)
    fixture.publish_many(4)
    received = one.receive()
    one.finish(received[:2])
    one.requeue(received[2])
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(b"fresh")
    assert fixture.channel().dispatcher.can_wait
    one.requeue(received[3])
    assert fixture.channel().dispatcher.can_wait
    fixture.publish(b"one more", b"the last one that has room")
    assert not fixture.channel().dispatcher.can_wait
    assert len(one.receive()) == 5


def test_redelivered_message_of_a_client_with_room_for_one_does_not_wait() -> None:
    fixture = Fixture()
    one = fixture.subscriber(ready=1, buffer=BUFFER)
    fixture.publish(b"x")
    (message,) = one.receive()
    one.requeue(message)
    assert not fixture.channel().dispatcher.can_wait
    assert one.receive() != []


def test_redelivered_messages_that_fill_the_buffer_with_the_heads_of_their_frames_do_not_wait() -> None:
    fixture = Fixture()
    count = -(-BUFFER[0] // MESSAGE_FRAME_BYTES)
    one = fixture.subscriber(ready=100, buffer=BUFFER)
    fixture.publish_many(count)
    received = one.receive()
    for message in received[1:]:
        one.requeue(message)
    assert fixture.channel().dispatcher.can_wait
    one.requeue(received[0])
    assert not fixture.channel().dispatcher.can_wait


def test_nothing_waits_after_a_seek_back() -> None:
    fixture = waiting_for(Fixture().subscriber(ready=100, buffer=BUFFER))
    fixture.publish(bytes(100_000))
    fixture.pump(fixture.channel())
    fixture.seek(1)
    assert not fixture.channel().dispatcher.can_wait


def test_unsent_messages_do_not_extend_the_wait() -> None:
    one = Fixture().subscriber(ready=100, buffer=BUFFER)
    fixture = waiting_for(one)
    before_ns = fixture.channel().dispatcher.buffering.wait_until_ns
    fixture.pass_ms(100)
    one.consumer.sample = lambda: False
    fixture.publish(b"is passed over")
    assert fixture.pump(fixture.channel()) == []
    assert fixture.channel().dispatcher.buffering.wait_until_ns == before_ns


def test_many_channels_wake_at_the_same_time() -> None:
    fixture = Fixture()
    until_ns: set[int] = set()
    for number in range(10):
        one = fixture.subscriber(f"c{number}", ready=100, buffer=BUFFER)
        fixture.publish(b"x")
        one.receive()
        until_ns.add(one.channel.dispatcher.buffering.wait_until_ns)
        fixture.now_ns += MS // 10
    assert len(until_ns) <= 2
