"""Tests for producers whose broker does not answer, or refuses publishes because it drains."""

from typing import Any

import pytest
import trio
import trio.testing

from client.support.fake_broker import FakeBroker, bounded, error, mpub, pub
from client.support.producers import Outcome, accept, opened, opened_on, take
from trio_nsq.client import BrokerError, ConnectionLost
from trio_nsq.client.publishing.answer_watch import AnswerWatch
from trio_nsq.protocol.frames import OK_FRAME

DRAINING = "DRAINING: this broker accepts no publishes; publish to another broker"
SILENCE_S = 0.5  # the default


async def pass_time(clock: trio.testing.MockClock, seconds: float) -> None:
    """Move the clock in steps that are shorter than the intervals of the producer's checks."""
    for _ in range(round(seconds / 0.05)):
        clock.jump(0.05)
        await trio.testing.wait_all_tasks_blocked(0.002)


# ------------------------------------------------------------------------------------------------ silent brokers


@bounded
async def test_silent_broker_gets_no_publishes_until_it_answers(
    broker: FakeBroker,
    other_broker: FakeBroker,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened_on(broker, other_broker) as (producer, peers, nursery):
        first = Outcome(nursery, producer.publish, "t", b"first")
        silent, _ = await take(*peers)
        await pass_time(clock, SILENCE_S + 0.2)
        for _ in range(3):
            publish = Outcome(nursery, producer.publish, "t", b"x")
            await peers[1 - silent].expect(pub("t", b"x"))
            await peers[1 - silent].send(OK_FRAME)
            await publish.success()
        assert not first.ended.is_set()
        await peers[silent].send(OK_FRAME)
        await first.success()
        await pass_time(clock, 0.2)
        places = set()
        for _ in range(2):
            publish = Outcome(nursery, producer.publish, "t", b"x")
            place, _ = await take(*peers)
            places.add(place)
            await peers[place].send(OK_FRAME)
            await publish.success()
        assert places == {0, 1}
    address = (broker, other_broker)[silent].address
    assert f"{address} does not answer; others are used until it does" in caplog.messages


@bounded
async def test_messages_that_wait_for_a_silent_broker_go_to_another(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened_on(broker, other_broker, max_in_flight_bytes=5) as (producer, peers, nursery):
        publishes = []
        for body in (b"1", b"2", b"3"):  # the third one waits for the window of the first broker
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked(0.01)
        sent = [peer.receive_nowait() for peer in peers]
        silent = sent.index(pub("t", b"1"))
        await peers[1 - silent].send(OK_FRAME)
        await pass_time(clock, SILENCE_S + 0.2)
        await peers[1 - silent].expect(pub("t", b"3"))
        await peers[1 - silent].send(OK_FRAME)
        await publishes[1].success()
        await publishes[2].success()
        assert not publishes[0].ended.is_set()
        await peers[silent].send(OK_FRAME)


@bounded
async def test_rest_of_a_list_leaves_a_silent_broker(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    options: Any = {"max_body_size": 25, "max_in_flight_bytes": 21}
    async with opened_on(broker, other_broker, **options) as (producer, peers, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        silent, data = await take(*peers)
        assert data == mpub("topic", *bodies[:3])
        await pass_time(clock, SILENCE_S + 0.2)
        await peers[silent].send(OK_FRAME)
        for start in (3, 6):
            await pass_time(clock, 0.2)
            place, data = await take(*peers)
            assert data == mpub("topic", *bodies[start : start + 3])
            await peers[place].send(OK_FRAME)
        await publish.success()


@bounded
async def test_list_that_waits_for_a_silent_broker_goes_to_another(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened_on(broker, other_broker, max_in_flight_bytes=10) as (producer, peers, nursery):
        publishes = []
        for body in (b"1", b"2"):
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked(0.01)
        silent = [peer.receive_nowait() for peer in peers].index(pub("t", b"1"))
        await peers[1 - silent].send(OK_FRAME)
        bodies = [b"123456"]  # it waits for the window of the first broker
        publishes.append(Outcome(nursery, producer.publish_many, "t", bodies))
        await trio.testing.wait_all_tasks_blocked(0.01)
        await peers[1 - silent].expect_nothing()
        await pass_time(clock, SILENCE_S + 0.2)
        await peers[1 - silent].expect(mpub("t", *bodies))
        await peers[1 - silent].send(OK_FRAME)
        await peers[silent].send(OK_FRAME)
        for publish in publishes:
            await publish.success()


@bounded
async def test_only_broker_is_used_although_it_is_silent(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(broker) as (producer, peer, nursery):
        publishes = [Outcome(nursery, producer.publish, "t", b"1")]
        await peer.expect(pub("t", b"1"))
        await pass_time(clock, SILENCE_S + 0.2)
        publishes.append(Outcome(nursery, producer.publish, "t", b"2"))
        await peer.expect(pub("t", b"2"))
        await peer.send(OK_FRAME * 2)
        for publish in publishes:
            await publish.success()
    assert not caplog.messages


@pytest.mark.parametrize("retry", [False, True])
@bounded
async def test_unanswered_publish_times_out(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock, retry: bool
) -> None:
    options: Any = {"publish_timeout_s": 3, "retry": retry}
    async with opened_on(broker, other_broker, **options) as (producer, peers, nursery):
        publish = Outcome(nursery, producer.publish, "t", b"x")
        hung, _ = await take(*peers)
        await pass_time(clock, 1)
        assert not publish.ended.is_set()
        await pass_time(clock, 2.2)
        if retry:
            await peers[1 - hung].expect(pub("t", b"x"))
            await peers[1 - hung].send(OK_FRAME)
            await publish.success()
        else:
            failure = await publish.failure()
            assert failure.maybe_stored
            assert isinstance(failure.__cause__, ConnectionLost)
            assert failure.__cause__.reason == "no answer to a publish for 3 s"
        await peers[hung].expect_end()


@bounded
async def test_answers_in_time_are_no_timeout(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    async with opened(broker, publish_timeout_s=3, max_in_flight_bytes=5) as (producer, peer, nursery):
        publishes = [Outcome(nursery, producer.publish, f"t{n}", b"x") for n in range(4)]
        for _ in publishes:
            await peer.receive()
            await pass_time(clock, 1.5)
            await peer.send(OK_FRAME)
        for publish in publishes:
            await publish.success()


@bounded
async def test_broker_that_hangs_in_the_handshake_does_not_hold_up_messages(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened_on(broker, other_broker) as (producer, peers, nursery):
        for peer in peers:
            peer.hang_up()
        await trio.testing.wait_all_tasks_blocked(0.01)
        publishes = []
        for body in (b"x", b"y"):
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked(0.01)
        await broker.accept()  # it never greets
        await pass_time(clock, SILENCE_S + 0.2)
        peer = await accept(other_broker)
        await pass_time(clock, 0.2)
        await peer.expect(mpub("t", b"x", b"y"))
        await peer.send(OK_FRAME)
        for publish in publishes:
            await publish.success()


def test_late_checks_do_not_count() -> None:
    """A program that was busy has not read the answers."""
    watch = AnswerWatch(0.1)
    command = object()
    assert watch.observe(command, 0) == 0
    assert watch.observe(command, 0.1) == pytest.approx(0.1)
    assert watch.observe(command, 50) == pytest.approx(0.3)
    assert watch.observe(object(), 50.1) == 0
    assert watch.observe(None, 50.2) == 0
    assert watch.observe(None, 50.3) == 0


def test_time_counts_from_the_new_connection() -> None:
    watch = AnswerWatch(0.1)
    command = object()
    watch.observe(command, 0)
    watch.observe(command, 0.1)
    watch.restart()
    assert watch.observe(command, 0.2) == 0
    assert watch.observe(command, 0.3) == pytest.approx(0.1)


# ------------------------------------------------------------------------------------------------ draining brokers


@pytest.mark.parametrize("survives", [True, False])
@bounded
async def test_publish_goes_on_from_a_draining_broker_to_another(
    broker: FakeBroker, other_broker: FakeBroker, survives: bool
) -> None:
    """It is not stored, so `retry` is not needed."""
    async with opened_on(broker, other_broker, survive_refusals=survives) as (producer, peers, nursery):
        publish = Outcome(nursery, producer.publish, "t", b"x")
        draining, _ = await take(*peers)
        await peers[draining].send(error(f"E_PUB_FAILED PUB failed {DRAINING}"))
        await peers[1 - draining].expect(pub("t", b"x"))
        await peers[1 - draining].send(OK_FRAME)
        await publish.success()


@bounded
async def test_publish_goes_on_from_nsqd_that_stops(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with opened_on(broker, other_broker, silence_timeout_s=1000) as (producer, peers, nursery):
        publishes = []
        for body in (b"1", b"2", b"3"):  # two to one of the brokers
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked(0.01)
        sent = [peer.receive_nowait() for peer in peers]
        stopping = sent.index(pub("t", b"1") + pub("t", b"3"))
        await peers[stopping].send(error("E_PUB_FAILED PUB failed exiting"))
        peers[stopping].hang_up()
        with trio.fail_after(5):  # before a connection to the other one times out
            await peers[1 - stopping].expect(pub("t", b"1"), pub("t", b"3"))
        await peers[1 - stopping].send(OK_FRAME * 3)
        for publish in publishes:
            await publish.success()


@bounded
async def test_draining_broker_is_not_tried_for_each_publish(
    broker: FakeBroker,
    other_broker: FakeBroker,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened_on(broker, other_broker, survive_refusals=True, reconnect_min_s=2) as opened_producer:
        producer, peers, nursery = opened_producer
        refusals, draining = 0, None

        async def publish() -> None:
            nonlocal refusals, draining
            outcome = Outcome(nursery, producer.publish, "t", b"x")
            place, _ = await take(*peers)
            if draining is None:
                draining = place
            if place == draining:
                refusals += 1
                await peers[place].send(error(f"E_PUB_FAILED PUB failed {DRAINING}"))
                place, _ = await take(*peers)
            await peers[place].send(OK_FRAME)
            await outcome.success()

        for _ in range(4):
            await publish()
        assert refusals == 1
        clock.jump(2)
        for _ in range(4):
            await publish()
        assert refusals == 2
        clock.jump(3)  # excluded for 4 s now
        for _ in range(4):
            await publish()
        assert refusals == 2
        assert len(caplog.messages) == 2
        assert caplog.messages[0].endswith("publish to another broker; trying it again after 2.0 s")


@bounded
async def test_draining_broker_keeps_its_publishes_in_flight(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with opened_on(broker, other_broker, survive_refusals=True) as (producer, peers, nursery):
        publishes = []
        for body in (b"1", b"2", b"3", b"4", b"5"):
            publishes.append(Outcome(nursery, producer.publish, "t", body))
            await trio.testing.wait_all_tasks_blocked(0.01)
        sent = [peer.receive_nowait() for peer in peers]
        draining = sent.index(b"".join(pub("t", body) for body in (b"1", b"3", b"5")))
        refusal = error(f"E_PUB_FAILED PUB failed {DRAINING}")
        await peers[draining].send(OK_FRAME, refusal)
        await publishes[0].success()
        await peers[1 - draining].expect(pub("t", b"3"))
        await peers[draining].send(OK_FRAME)  # stored before the drain began
        await publishes[4].success()
        await peers[1 - draining].send(OK_FRAME * 3)
        for publish in publishes:
            await publish.success()


@bounded
async def test_rest_of_a_list_leaves_a_draining_broker(broker: FakeBroker, other_broker: FakeBroker) -> None:
    bodies = [b"%03d" % number for number in range(9)]
    parts = [mpub("topic", *bodies[start : start + 3]) for start in (0, 3, 6)]
    options: Any = {"survive_refusals": True, "max_body_size": 25}
    async with opened_on(broker, other_broker, **options) as (producer, peers, nursery):
        publish = Outcome(nursery, producer.publish_many, "topic", bodies)
        draining, data = await take(*peers)
        assert data == b"".join(parts)
        refusal = error(f"E_MPUB_FAILED MPUB failed {DRAINING}")
        await peers[draining].send(OK_FRAME, refusal, refusal)
        await peers[1 - draining].expect(parts[1], parts[2])
        await peers[1 - draining].send(OK_FRAME * 2)
        await publish.success()


@bounded
async def test_publish_fails_if_all_brokers_drain(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with opened_on(broker, other_broker, survive_refusals=True) as (producer, peers, nursery):
        for _ in range(2):
            publish = Outcome(nursery, producer.publish, "t", b"x")
            for _ in peers:
                place, _ = await take(*peers)
                await peers[place].send(error(f"E_PUB_FAILED PUB failed {DRAINING}"))
            failure = await publish.failure()
            assert not failure.maybe_stored
            assert isinstance(failure.__cause__, BrokerError)
            for each in (broker, other_broker):
                assert f"{each.address} answered E_PUB_FAILED PUB failed DRAINING" in str(failure)


@bounded
async def test_refusal_of_an_ordered_producer_fails_the_rest(broker: FakeBroker) -> None:
    async with opened(broker, ordered=True) as (producer, peer, nursery):
        publishes = []
        for topic in ("t0", "t1"):
            publishes.append(Outcome(nursery, producer.publish, topic, b"x"))
            await trio.testing.wait_all_tasks_blocked()
        await peer.expect(pub("t0", b"x"), pub("t1", b"x"))
        await peer.send(error(f"E_PUB_FAILED PUB failed {DRAINING}"))
        peer.hang_up()
        for publish in publishes:
            assert not (await publish.failure()).maybe_stored
