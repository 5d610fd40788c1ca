"""Tests for sample_rate, with which a channel drops messages instead of delivering them."""

from collections.abc import Iterable

from broker.state import Fixture, Subscriber


def sampling(fixture: Fixture, wanted: Iterable[bool], ready: int = 2500) -> Subscriber:
    """A subscriber that takes messages as `wanted` says, in order."""
    subscriber = fixture.subscriber(ready=0)
    decisions = iter(wanted)
    subscriber.consumer.sample = lambda: next(decisions)
    subscriber.ready(ready)
    return subscriber


def test_unsampled_messages_are_dropped() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [True, False, False, True, True, False])
    fixture.publish_many(6, each=4)
    messages = subscriber.receive()
    assert [message.body for message in messages] == [b"m0", b"m3", b"m4"]
    assert fixture.counts() == (0, 3, 0)
    assert subscriber.consumer.message_count == 3
    assert subscriber.channel.requeue_count == subscriber.channel.timeout_count == 0
    assert subscriber.finish(messages) == []
    other = fixture.subscriber(ready=10)
    assert other.receive() == []


def test_sampling_skips_deferred_messages() -> None:
    """They are sampled when they are due."""
    fixture = Fixture()
    subscriber = sampling(fixture, [False, False, True, False, False, True])
    subscriber.ready(0)
    fixture.publish(b"0", b"1")
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"2", b"3", b"4")
    subscriber.ready(10)
    assert subscriber.receive_bodies() == [b"2"]
    assert fixture.counts() == (0, 1, 1)
    fixture.pass_ms(1000)
    assert subscriber.receive_bodies() == [b"later"]
    assert fixture.counts() == (0, 2, 0)


def test_rdy_counts_only_sent_messages() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [False, True] * 10, ready=3)
    fixture.publish_many(20)
    assert subscriber.receive_bodies() == [b"m1", b"m3", b"m5"]
    assert fixture.counts() == (14, 3, 0)  # following messages are not examined before there is room


def test_message_is_sampled_again_at_a_redelivery() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [True, True, False, True])
    fixture.publish(b"a", b"b")
    a, b = subscriber.receive()
    subscriber.requeue(a)
    assert subscriber.receive() == []
    assert fixture.counts() == (0, 1, 0)
    subscriber.requeue(b)
    assert [(m.body, m.attempts) for m in subscriber.receive()] == [(b"b", 2)]


def test_deliveries_know_their_messages_in_spite_of_dropped_ones() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [True, False, True, False, True])
    fixture.publish_many(5, each=5)
    messages = subscriber.receive()
    assert subscriber.finish(messages[:1]) == []
    subscriber.requeue(messages[2])
    subscriber.consumer.sample = None
    assert subscriber.receive_bodies() == [b"m4"]
    subscriber.leave()
    assert sorted(fixture.drain()) == [b"m2", b"m4"]


def test_each_message_is_sampled_once_whatever_its_size() -> None:
    """Messages that no longer fit into a round are sampled, too."""
    fixture = Fixture()
    asked: list[bool] = []
    subscriber = fixture.subscriber(ready=0)

    def every_other() -> bool:
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    subscriber.consumer.sample = every_other
    subscriber.ready(2500)
    for index in range(20):
        fixture.publish(b"%d" % index + bytes(100_000))
    got = [message.body.rstrip(b"\0") for message in subscriber.receive()]
    assert got == [b"%d" % index for index in range(0, 20, 2)]
    assert len(asked) == 20


def test_message_dropped_at_a_redelivery_is_gone_after_a_restart() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [True, False])
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    subscriber.requeue(message)
    fixture.topic.snapshot()
    assert subscriber.receive() == []
    assert fixture.restarted(fixture.topic.snapshot()).drain() == []
