"""sample_rate: what a consumer does not want is dropped from the channel (NSQ protocol: sampling)."""

from collections.abc import Iterable

from broker.state import Fixture, Subscriber


def sampling(fixture: Fixture, wanted: Iterable[bool], ready: int = 2500) -> Subscriber:
    """A subscriber that takes messages as `wanted` says, one after the other."""
    subscriber = fixture.subscriber(ready=0)
    decisions = iter(wanted)
    subscriber.consumer.sample = lambda: next(decisions)
    subscriber.ready(ready)
    return subscriber


def test_what_is_not_wanted_is_gone() -> None:
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


def test_sampling_passes_over_what_is_deferred() -> None:
    """And decides about that when its time has come."""
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


def test_ready_counts_only_what_is_sent() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [False, True] * 10, ready=3)
    fixture.publish_many(20)
    assert subscriber.receive_bodies() == [b"m1", b"m3", b"m5"]
    assert fixture.counts() == (14, 3, 0)  # what follows is not looked at before there is room for it


def test_a_message_is_sampled_again_when_it_is_delivered_again() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [True, True, False, True])
    fixture.publish(b"a", b"b")
    a, b = subscriber.receive()
    subscriber.requeue(a)
    assert subscriber.receive() == []
    assert fixture.counts() == (0, 1, 0)
    subscriber.requeue(b)
    assert [(m.body, m.attempts) for m in subscriber.receive()] == [(b"b", 2)]


def test_deliveries_know_their_messages_though_others_between_were_dropped() -> None:
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


def test_each_message_is_sampled_once_however_large_it_is() -> None:
    """What does not fit into one round any more has been decided upon, too."""
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


def test_what_is_not_wanted_a_second_time_is_gone_after_a_restart_too() -> None:
    fixture = Fixture()
    subscriber = sampling(fixture, [True, False])
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    subscriber.requeue(message)
    fixture.topic.snapshot()
    assert subscriber.receive() == []
    assert fixture.restarted(fixture.topic.snapshot()).drain() == []
