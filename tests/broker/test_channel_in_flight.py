"""Tests for delivered messages: answers, timeouts and disconnects."""

import pytest

from broker.state import MS, SECOND, Fixture, Received, ids_in_flight
from trio_nsq.broker.state.in_flight import InFlight
from trio_nsq.broker.state.in_flight_batch import InFlightBatch
from trio_nsq.protocol.encode import encode_finish

NOT_IN_FLIGHT = "ID not in flight"
NOT_OWNED = "client does not own message"
UNKNOWN = b"0123456789abcdef"


# ---------------------------------------------------------------------- answers by id


def test_finished_message_is_not_delivered_again() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    fixture.publish(b"a", b"b")
    received = subscriber.receive()
    assert subscriber.finish(received[:1]) == []
    assert fixture.counts() == (0, 1, 0)
    fixture.pass_ms(60_000)
    assert subscriber.receive_bodies() == [b"b"]


def test_unknown_id_is_not_in_flight() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10)
    stranger = Received(UNKNOWN, b"", 1, 0)
    assert subscriber.finish([stranger]) == [(UNKNOWN, NOT_IN_FLIGHT)]
    assert subscriber.requeue(stranger) == NOT_IN_FLIGHT
    assert subscriber.touch(stranger) == NOT_IN_FLIGHT
    assert fixture.channel().requeue_count == 0


def test_message_of_another_client_is_not_owned() -> None:
    fixture = Fixture()
    owner, other = fixture.subscriber(ready=1), fixture.subscriber(ready=0)
    fixture.publish(b"a")
    (message,) = owner.receive()
    assert other.finish([message]) == [(message.id, NOT_OWNED)]
    assert other.requeue(message) == NOT_OWNED
    assert other.requeue(message, delay_ms=5) == NOT_OWNED
    assert other.touch(message) == NOT_OWNED
    assert fixture.counts() == (0, 1, 0)
    assert owner.finish([message]) == []


def test_invalid_answers_do_not_affect_messages_of_others() -> None:
    fixture = Fixture()
    owner, other = fixture.subscriber(ready=10), fixture.subscriber(ready=0)
    fixture.publish(*[b"%d" % number for number in range(5)])
    received = owner.receive()
    owner.finish(received[:1])
    stranger = Received(UNKNOWN, b"", 1, 0)
    assert other.finish([stranger, received[0], received[4], received[1], received[4]]) == [
        (UNKNOWN, NOT_IN_FLIGHT),
        (received[0].id, NOT_IN_FLIGHT),
        (received[4].id, NOT_OWNED),
        (received[1].id, NOT_OWNED),
        (received[4].id, NOT_OWNED),
    ]
    assert other.requeue(received[2]) == other.touch(received[2]) == NOT_OWNED
    assert not any(delivery.is_split for _, delivery in owner.consumer.in_flight)
    owner.finish(received[2:3])  # out of order
    assert other.touch(received[2]) == NOT_IN_FLIGHT
    assert other.touch(received[3]) == NOT_OWNED


def test_unknown_ids_are_not_searched_among_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture()
    owners = [fixture.subscriber(ready=20) for _ in range(300)]
    sender = fixture.subscriber(ready=0)
    fixture.publish_many(6000, each=100)
    fixture.pump(fixture.channel())
    assert fixture.counts() == (0, 6000, 0)
    looks = 0

    def holds(in_flight: InFlight, message_id: bytes) -> bool:
        nonlocal looks
        looks += 1
        return really_holds(in_flight, message_id)

    really_holds = InFlight.holds
    monkeypatch.setattr(InFlight, "holds", holds)
    ids = [b"%015xg" % number for number in range(3000)]
    assert fixture.channel().finish(sender.consumer, encode_finish(ids), 0) == [
        (message_id, NOT_IN_FLIGHT) for message_id in ids
    ]
    assert sender.touch(Received(UNKNOWN, b"", 1, 0)) == NOT_IN_FLIGHT
    assert looks <= 1000
    for owner in owners:
        assert not any(delivery.is_split for _, delivery in owner.consumer.in_flight)


@pytest.mark.parametrize("ending", ["FIN", "REQ", "timeout", "empty", "leave"])
def test_only_the_connection_with_a_message_can_answer_it(ending: str) -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    if ending == "FIN":
        subscriber.finish([message])
    elif ending == "REQ":
        subscriber.requeue(message)
    elif ending == "timeout":
        fixture.pass_ms(1000)
    elif ending == "empty":
        fixture.channel().empty()
    else:
        subscriber.leave()
    assert subscriber.finish([message]) == [(message.id, NOT_IN_FLIGHT)]
    assert subscriber.requeue(message) == NOT_IN_FLIGHT
    assert subscriber.touch(message) == NOT_IN_FLIGHT
    assert fixture.counts() == (0 if ending in ("FIN", "empty") else 1, 0, 0)


def test_after_a_timeout_and_redelivery_to_the_same_connection_the_id_is_valid_again() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    fixture.pass_ms(1000)
    assert subscriber.finish([message]) == [(message.id, NOT_IN_FLIGHT)]
    (again,) = subscriber.receive()
    assert again.id == message.id
    assert subscriber.finish([message]) == []
    assert fixture.counts() == (0, 0, 0)


def test_bulk_fin_finishes_valid_ids_and_returns_invalid_ones_in_order() -> None:
    fixture = Fixture()
    one, other = fixture.subscriber(ready=4), fixture.subscriber(ready=1)
    fixture.publish(*(b"%d" % index for index in range(5)))
    delivered = fixture.pump(fixture.channel())
    mine = [message for consumer, received in delivered if consumer is one.consumer for message in received]
    foreign = [m for consumer, received in delivered if consumer is other.consumer for m in received]
    assert (len(mine), len(foreign)) == (4, 1)
    ids = [UNKNOWN, mine[0].id, foreign[0].id, mine[1].id, mine[1].id, mine[2].id, b"f" * 16]
    assert fixture.channel().finish(one.consumer, encode_finish(ids), 0) == [
        (UNKNOWN, NOT_IN_FLIGHT),
        (foreign[0].id, NOT_OWNED),
        (mine[1].id, NOT_IN_FLIGHT),
        (b"f" * 16, NOT_IN_FLIGHT),
    ]
    assert ids_in_flight(one.consumer) == [mine[3].id]
    assert (one.consumer.finish_count, other.consumer.finish_count) == (3, 0)


def test_bulk_fin_out_of_order() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=100)
    fixture.publish_many(30, each=10)
    received = subscriber.receive()
    assert subscriber.finish(received[-2::-2]) == []
    assert ids_in_flight(subscriber.consumer) == [message.id for message in received[1::2]]
    assert fixture.channel().finish(subscriber.consumer, b"", 0) == []


# ---------------------------------------------------------------------- REQ


def test_req_redelivers_at_once_and_increases_attempts_at_delivery() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(b"a")
    for attempts in range(1, 6):
        (message,) = subscriber.receive()
        assert message.attempts == attempts
        assert subscriber.requeue(message) is None
        assert fixture.counts() == (1, 0, 0)
    assert (fixture.channel().requeue_count, subscriber.consumer.requeue_count) == (5, 5)


def test_req_with_a_delay_defers_for_exactly_this_time() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    assert subscriber.requeue(message, delay_ms=90_000) is None
    assert fixture.channel().next_due_ns == fixture.now_ns + 90 * SECOND
    fixture.pass_ms(89_999)
    assert fixture.counts() == (0, 0, 1)
    assert subscriber.receive() == []
    fixture.pass_ms(1)
    assert fixture.counts() == (1, 0, 0)
    assert [again.attempts for again in subscriber.receive()] == [2]
    assert fixture.channel().timeout_count == 0


def test_req_of_one_message_of_a_batch() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=100)
    bodies = fixture.publish_many(20, each=20)
    received = subscriber.receive()
    for index in (7, 3, 19, 0):
        assert subscriber.requeue(received[index]) is None
    subscriber.finish([received[index] for index in range(20) if index not in (7, 3, 19, 0)])
    again = subscriber.receive()
    assert [(m.id, m.body, m.attempts) for m in again] == [
        (received[index].id, bodies[index], 2) for index in (7, 3, 19, 0)
    ]


# ---------------------------------------------------------------------- timeouts


def test_message_times_out_exactly_at_its_deadline() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    channel = fixture.channel()
    assert channel.next_deadline_ns == fixture.now_ns + SECOND
    channel.tick(fixture.now_ns + SECOND - 1)
    assert (fixture.counts(), channel.timeout_count) == ((0, 1, 0), 0)
    channel.tick(fixture.now_ns + SECOND)
    assert (fixture.counts(), channel.timeout_count) == ((1, 0, 0), 1)
    assert channel.next_deadline_ns is None
    assert [(again.id, again.attempts) for again in subscriber.receive()] == [(message.id, 2)]


def test_timeouts_increase_attempts() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=10)
    fixture.publish(b"a")
    attempts = []
    for _ in range(5):
        attempts += [message.attempts for message in subscriber.receive()]
        fixture.pass_ms(10)
    assert attempts == [1, 2, 3, 4, 5]
    assert fixture.channel().timeout_count == 5
    assert fixture.channel().requeue_count == 0


def test_only_unanswered_messages_time_out() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=100, msg_timeout_ms=1000)
    fixture.publish_many(10, each=10)
    received = subscriber.receive()
    subscriber.finish(received[::2])
    subscriber.ready(0)
    fixture.pass_ms(1000)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((5, 0, 0), 5)
    subscriber.ready(100)
    assert [again.body for again in subscriber.receive()] == [message.body for message in received[1::2]]


def test_each_consumer_has_its_own_timeout() -> None:
    fixture = Fixture()
    slow = fixture.subscriber(ready=1, msg_timeout_ms=5000)
    quick = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a", b"b")
    fixture.pump(fixture.channel())
    assert fixture.channel().next_deadline_ns == fixture.now_ns + SECOND
    fixture.pass_ms(1000)
    assert (len(slow.consumer.in_flight), len(quick.consumer.in_flight)) == (1, 0)
    assert fixture.channel().next_deadline_ns == fixture.now_ns + 4 * SECOND
    fixture.pass_ms(4000)
    assert fixture.channel().timeout_count == 2


def test_tick_moves_a_limited_number_of_due_messages() -> None:
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish(b"deferred", defer_ms=1000)
    subscriber = fixture.subscriber(ready=10, msg_timeout_ms=1000)
    fixture.publish(b"a", b"b", b"c")
    assert subscriber.receive_bodies() == [b"a", b"b", b"c"]
    later_ns = fixture.now_ns + 2 * SECOND
    assert channel.tick(later_ns, 3) == 3
    assert fixture.counts() == (3, 1, 0)
    assert channel.next_deadline_ns is not None
    assert channel.next_deadline_ns <= later_ns
    assert channel.tick(later_ns, 3) == 1
    assert fixture.counts() == (4, 0, 0)


def test_tick_moves_a_limited_number_for_several_consumers() -> None:
    fixture = Fixture()
    channel = fixture.channel()
    fixture.publish(b"a", b"b", b"c", b"d")
    consumers = [fixture.subscriber(ready=2, msg_timeout_ms=1000) for _ in range(2)]
    fixture.pump(channel)
    assert [subscriber.consumer.in_flight.count for subscriber in consumers] == [2, 2]
    later_ns = fixture.now_ns + 2 * SECOND
    assert channel.tick(later_ns, 3) == 3
    assert fixture.counts() == (3, 1, 0)
    assert channel.tick(later_ns, 3) == 1
    assert fixture.counts() == (4, 0, 0)


def test_deliveries_time_out_in_order() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=100, msg_timeout_ms=1000)
    start = fixture.now_ns
    for _ in range(3):
        fixture.publish(b"x", b"y")
        subscriber.receive()
        fixture.pass_ms(100)
    subscriber.ready(0)
    for count, deadline_ms in ((2, 1000), (4, 1100), (6, 1200)):
        assert fixture.channel().next_deadline_ns == start + deadline_ms * MS
        fixture.channel().tick(start + deadline_ms * MS - 1)
        assert fixture.channel().timeout_count == count - 2
        fixture.channel().tick(start + deadline_ms * MS)
        assert fixture.channel().timeout_count == count


def test_late_tick_times_out_everything_due() -> None:
    fixture = Fixture()
    subscribers = [fixture.subscriber(ready=100, msg_timeout_ms=1000 * n) for n in (1, 2, 3)]
    fixture.publish_many(9, each=9)
    fixture.pump(fixture.channel())
    fixture.pass_ms(1_000_000)
    assert fixture.counts() == (9, 0, 0)
    assert all(subscriber.consumer.window == 100 for subscriber in subscribers)


def test_timeout_frees_the_window() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a", b"b")
    assert subscriber.receive_bodies() == [b"a"]
    fixture.pass_ms(1000)
    assert len(subscriber.receive()) == 1


# ---------------------------------------------------------------------- TOUCH


def test_touch_restarts_the_timeout() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=2, msg_timeout_ms=1000)
    fixture.publish(b"touched", b"other")
    touched, _ = subscriber.receive()
    subscriber.ready(0)
    fixture.pass_ms(600)
    assert subscriber.touch(touched) is None
    fixture.pass_ms(400)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((1, 1, 0), 1)
    fixture.pass_ms(599)
    assert fixture.channel().timeout_count == 1
    assert fixture.channel().next_deadline_ns == fixture.now_ns + MS
    fixture.pass_ms(1)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((2, 0, 0), 2)
    subscriber.ready(2)
    assert sorted((m.body, m.attempts) for m in subscriber.receive()) == [(b"other", 2), (b"touched", 2)]


def test_touch_is_unlimited_and_harmless_after_the_maximum() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    delivered_ns = fixture.now_ns
    subscriber.ready(0)
    for _ in range(9):
        fixture.pass_ms(500)
        assert subscriber.touch(message, max_msg_timeout_ms=5000) is None
        assert subscriber.touch(message, max_msg_timeout_ms=5000) is None
    fixture.pass_ms(499)
    assert subscriber.touch(message, max_msg_timeout_ms=5000) is None
    assert fixture.channel().next_deadline_ns == delivered_ns + 5 * SECOND
    assert fixture.channel().timeout_count == 0
    fixture.pass_ms(1)
    assert fixture.channel().timeout_count == 1
    assert fixture.channel().next_deadline_ns is None
    assert subscriber.touch(message, max_msg_timeout_ms=5000) == NOT_IN_FLIGHT


def test_maximum_starts_at_each_delivery() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    fixture.pass_ms(900)
    subscriber.requeue(message)
    (message,) = subscriber.receive()
    delivered_ns = fixture.now_ns
    fixture.pass_ms(900)
    assert subscriber.touch(message, max_msg_timeout_ms=1500) is None
    fixture.channel().tick(delivered_ns + 1500 * MS - 1)
    assert fixture.counts() == (0, 1, 0)
    fixture.channel().tick(delivered_ns + 1500 * MS)
    assert fixture.counts() == (1, 0, 0)


def test_message_at_the_maximum_times_out_before_later_deliveries() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=3, msg_timeout_ms=1000)
    fixture.publish(b"capped", b"finished")
    capped, finished = subscriber.receive()
    start = fixture.now_ns
    fixture.pass_ms(500)
    fixture.publish(b"later")
    subscriber.receive()
    assert (
        subscriber.touch(capped, max_msg_timeout_ms=1200) is None
    )  # due before `later`, and after it in the queue
    subscriber.finish([finished])
    subscriber.ready(0)
    assert (fixture.channel().next_deadline_ns or 0) <= start + 1200 * MS
    fixture.channel().tick(start + 1200 * MS - 1)
    assert fixture.counts() == (0, 2, 0)
    assert fixture.channel().next_deadline_ns == start + 1200 * MS
    fixture.channel().tick(start + 1200 * MS)
    assert fixture.counts() == (1, 1, 0)
    assert fixture.channel().next_deadline_ns == start + 1500 * MS
    fixture.channel().tick(start + 1500 * MS)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((2, 0, 0), 2)


def test_message_at_the_maximum_gets_more_time_if_the_broker_was_held_up() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=2, msg_timeout_ms=1000)
    fixture.publish(b"capped")
    (capped,) = subscriber.receive()
    start = fixture.now_ns
    fixture.pass_ms(500)
    fixture.publish(b"later")
    subscriber.receive()
    subscriber.touch(capped, max_msg_timeout_ms=1200)
    subscriber.ready(0)
    fixture.channel().extend_timeouts(100 * MS)
    fixture.channel().tick(start + 1300 * MS - 1)
    assert fixture.counts() == (0, 2, 0)
    fixture.channel().tick(start + 1300 * MS)
    assert fixture.counts() == (1, 1, 0)
    fixture.channel().tick(start + 1600 * MS)
    assert fixture.counts() == (2, 0, 0)


def test_answered_message_at_the_maximum_does_not_time_out() -> None:
    fixture = Fixture()
    one, other = [fixture.subscriber(ready=1, msg_timeout_ms=1000) for _ in range(2)]
    fixture.publish(b"a", b"b")
    delivered = dict(fixture.pump(fixture.channel()))
    (mine,), (its,) = delivered[one.consumer], delivered[other.consumer]
    fixture.pass_ms(900)
    one.touch(mine, max_msg_timeout_ms=1100)
    other.touch(its, max_msg_timeout_ms=1100)
    one.finish([mine])
    other.requeue(its)
    other.ready(0)
    assert [message.body for message in one.receive()] == [its.body]
    fixture.pass_ms(999)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((0, 1, 0), 0)
    fixture.pass_ms(1)
    assert fixture.channel().timeout_count == 1


def test_maximum_does_not_apply_to_a_later_delivery() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    fixture.pass_ms(900)
    subscriber.touch(message, max_msg_timeout_ms=1100)
    subscriber.requeue(message)
    assert len(subscriber.receive()) == 1
    fixture.pass_ms(999)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((0, 1, 0), 0)
    fixture.pass_ms(1)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((1, 0, 0), 1)


def test_touch_never_shortens_the_timeout() -> None:
    """With a msg_timeout above max_msg_timeout, the deadline of the delivery stays."""
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=60_000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    subscriber.ready(0)
    delivered_ns = fixture.now_ns
    fixture.pass_ms(20_000)
    assert subscriber.touch(message, max_msg_timeout_ms=10_000) is None
    assert fixture.channel().next_deadline_ns == delivered_ns + 60 * SECOND
    fixture.pass_ms(39_999)
    assert fixture.counts() == (0, 1, 0)
    fixture.pass_ms(1)
    assert fixture.counts() == (1, 0, 0)


def test_endless_touches_use_no_memory() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=1, msg_timeout_ms=1000)
    fixture.publish(b"a")
    (message,) = subscriber.receive()
    fixture.pass_ms(900)
    subscriber.touch(message, max_msg_timeout_ms=1500)
    ((_, delivery),) = subscriber.consumer.in_flight
    for _ in range(1000):
        subscriber.touch(message, max_msg_timeout_ms=1500)
    assert list(subscriber.consumer.in_flight) == [(0, delivery)]
    # Every examined message counts, whether or not it is still in flight.
    assert fixture.channel().tick(fixture.now_ns + SECOND) <= 2


def test_touched_message_keeps_its_sequence_and_attempts() -> None:
    fixture = Fixture()
    subscriber = fixture.subscriber(ready=10, msg_timeout_ms=1000)
    fixture.publish(*(b"%d" % index for index in range(10)))
    received = subscriber.receive()
    fixture.pass_ms(500)
    subscriber.touch(received[6])
    fixture.pass_ms(100)
    subscriber.touch(received[6])
    subscriber.requeue(received[6])
    assert [(m.body, m.attempts) for m in subscriber.receive()] == [(b"6", 2)]


# ---------------------------------------------------------------------- disconnects


def test_disconnect_redelivers_at_once_and_keeps_attempts() -> None:
    fixture = Fixture()
    gone = fixture.subscriber(ready=10, msg_timeout_ms=60_000)
    fixture.publish_many(10, each=10)
    received = gone.receive()
    gone.requeue(received[9])
    gone.receive()
    gone.finish(received[:4])
    gone.requeue(received[4], delay_ms=1000)
    gone.leave()
    assert ids_in_flight(gone.consumer) == []
    assert fixture.counts() == (5, 0, 1)
    assert fixture.channel().timeout_count == 0
    other = fixture.subscriber(ready=10)
    again = other.receive()
    assert [(m.body, m.attempts) for m in again] == [
        (b"m%d" % n, 3 if n == 9 else 2) for n in (6, 7, 8, 9, 5)
    ]
    fixture.pass_ms(1000)
    assert [(m.body, m.attempts) for m in other.receive()] == [(b"m4", 2)]


def test_disconnect_leaves_nothing_to_time_out() -> None:
    fixture = Fixture()
    gone = fixture.subscriber(ready=10, msg_timeout_ms=1000)
    fixture.publish(b"a", b"b")
    first, _ = gone.receive()
    fixture.pass_ms(900)
    gone.touch(first, max_msg_timeout_ms=1200)
    gone.leave()
    fixture.pass_ms(1_000_000)
    assert (fixture.counts(), fixture.channel().timeout_count) == ((2, 0, 0), 0)
    assert fixture.channel().next_deadline_ns is None


# ---------------------------------------------------------------------- Delivery


def test_delivery_finds_each_of_its_sequences() -> None:
    ids = [b"%016x" % number for number in (5, 6, 7, 50, 51, 900)]  # ids of other topics are in between
    delivery = InFlightBatch(encode_finish(ids), 100, 1, 0, 10)
    assert [delivery.id_of(sequence) for sequence in range(100, 106)] == ids
    assert delivery.split() == ids
    assert [delivery.sequence_of(message_id) for message_id in ids] == [100, 101, 102, 103, 104, 105]
    touched = delivery.touched(103, 77)
    assert (touched.lines, touched.sequence_of(ids[3])) == (encode_finish([ids[3]]), 103)
    assert (touched.attempts, touched.delivered_ns, touched.deadline_ns) == (1, 0, 77)
    assert touched.touched(103, 78).sequence_of(ids[3]) == 103
