"""Tests for flow control of the consumer: turns of connections, backoff, and requeue delays."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from client.support.consumers import accept_up_to_sub, consumer_of, hold_open, opened
from client.support.fake_broker import FakeBroker, Peer, bounded, fake_broker, fins, message, reqs
from trio_nsq.client import Consumer, Message
from trio_nsq.protocol.frames import OK_FRAME


@asynccontextmanager
async def consuming(
    brokers: Sequence[FakeBroker], **options: Any
) -> AsyncIterator[tuple[Consumer, list[Peer]]]:
    """Open a consumer that is subscribed to all brokers; yield it and the brokers' ends. At the end it
    disconnects at once.
    """
    defaults: Any = {"backoff_after": 1, "close_timeout_s": 0, "random": lambda: 0.0}
    consumer = consumer_of(*brokers, **defaults | options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        peers = []
        for number, broker in enumerate(brokers, 1):
            peer = await broker.accept()
            await peer.greet()
            await peer.expect(b"SUB topic channel\n")
            await peer.send(OK_FRAME)
            peers.append(peer)
            while consumer.stats().connections < number:
                await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        yield consumer, peers
        nursery.cancel_scope.cancel()


async def heard(peers: Sequence[Peer]) -> list[bytes]:
    """Return what each broker has received."""
    await trio.testing.wait_all_tasks_blocked()
    return [peer.receive_nowait() for peer in peers]


# ------------------------------------------------------------------------------------------------ turns


@bounded
async def test_connections_beyond_max_in_flight_take_turns(
    clock: trio.testing.MockClock,
) -> None:
    async with fake_broker() as one, fake_broker() as two, fake_broker() as three:
        async with consuming([one, two, three], max_in_flight=2) as (consumer, peers):
            # The first connection had both until the second connected.
            assert await heard(peers) == [b"RDY 2\nRDY 1\n", b"RDY 1\n", b""]
            clock.jump(6)
            await peers[0].send(message(1))
            (await anext(consumer)).finish()
            assert await heard(peers) == [fins(1), b"", b""]
            clock.jump(4)  # the second connection has been idle for 10 seconds
            assert await heard(peers) == [b"", b"RDY 0\n", b"RDY 1\n"]
            clock.jump(6)  # now the first one, too
            assert await heard(peers) == [b"RDY 0\n", b"RDY 1\n", b""]


@bounded
async def test_turn_of_a_lost_connection_goes_to_a_waiting_one(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    async with consuming([broker, other_broker], max_in_flight=1) as (_, peers):
        assert await heard(peers) == [b"RDY 1\n", b""]
        peers[0].hang_up()
        await peers[1].expect(b"RDY 1\n")


@bounded
async def test_connection_with_a_message_in_work_keeps_its_turn_longer(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    options: Any = {"low_rdy_idle_timeout_s": 1, "low_rdy_timeout_s": 10, "rdy_redistribute_interval_s": 0.5}
    async with consuming([broker, other_broker], max_in_flight=1, **options) as (_, peers):
        await peers[0].send(message(1))
        assert await heard(peers) == [b"RDY 1\n", b""]
        for _ in range(9):
            clock.jump(1)
            assert await heard(peers) == [b"", b""]
        clock.jump(1)
        assert await heard(peers) == [b"RDY 0\n", b"RDY 1\n"]


@bounded
async def test_larger_max_in_flight_is_shared_by_all(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with consuming([broker, other_broker], max_in_flight=1) as (consumer, peers):
        assert await heard(peers) == [b"RDY 1\n", b""]
        consumer.max_in_flight = 7
        assert await heard(peers) == [b"RDY 4\n", b"RDY 3\n"]


@bounded
async def test_pause_and_unpause(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with consuming([broker, other_broker], max_in_flight=10) as (consumer, peers):
        await heard(peers)
        consumer.pause()
        assert consumer.paused
        assert await heard(peers) == [b"RDY 0\n", b"RDY 0\n"]
        consumer.max_in_flight = 20  # applies after the pause
        assert await heard(peers) == [b"", b""]
        await peers[0].send(message(1))  # was on its way
        (await anext(consumer)).finish()
        assert await heard(peers) == [fins(1), b""]
        consumer.unpause()
        assert not consumer.paused
        assert await heard(peers) == [b"RDY 10\n", b"RDY 10\n"]


@bounded
async def test_is_starved(broker: FakeBroker, other_broker: FakeBroker) -> None:
    async with consuming([broker, other_broker], max_in_flight=40) as (consumer, peers):
        await peers[0].send(*map(message, range(16)))
        batch = await anext(consumer.batches())
        assert not consumer.is_starved
        await peers[0].send(message(16))  # 17 of 20
        last = await anext(consumer)
        assert consumer.is_starved
        last.finish()
        assert not consumer.is_starved
        consumer.pause()
        assert consumer.is_starved
        batch.finish()
        assert not consumer.is_starved


# ------------------------------------------------------------------------------------------------ forgotten answers


def stalls(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often the consumer has warned that no message is answered."""
    return sum("messages that may be in flight are unanswered" in each.message for each in caplog.records)


@bounded
async def test_forgotten_answers_are_logged_once(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        consuming([broker], max_in_flight=2) as (consumer, (peer,)),
        trio.open_nursery() as nursery,
    ):
        received: list[Message] = []

        async def forget() -> None:
            async for each in consumer:
                received.append(each)

        nursery.start_soon(forget)
        await peer.send(message(1))
        for _ in range(2):  # there is room for another message
            await heard([peer])
            clock.jump(10)
        assert stalls(caplog) == 0
        await peer.send(message(2))
        for jump_s in (10, 1):
            await heard([peer])
            clock.jump(jump_s)
        await heard([peer])
        assert stalls(caplog) == 1
        received[0].finish()
        await peer.send(message(3))
        for _ in range(2):
            await heard([peer])
            clock.jump(10)
        await heard([peer])
        assert stalls(caplog) == 2
        nursery.cancel_scope.cancel()


@bounded
async def test_long_work_is_no_forgotten_answer(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The program does not wait for more messages meanwhile."""
    async with consuming([broker], max_in_flight=1) as (consumer, (peer,)):
        await peer.send(message(1))
        received = await anext(consumer)
        for _ in range(5):
            await heard([peer])
            clock.jump(10)
        await heard([peer])
        received.finish()
    assert stalls(caplog) == 0


# ------------------------------------------------------------------------------------------------ backoff


@bounded
async def test_after_a_failure_one_message_then_all(
    broker: FakeBroker,
    other_broker: FakeBroker,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with consuming([broker, other_broker], max_in_flight=10) as (consumer, peers):
        await peers[0].send(message(1), message(2))
        await heard(peers)
        first, second = [await anext(consumer) for _ in range(2)]
        first.requeue(0)
        assert await heard(peers) == [reqs(1) + b"RDY 0\n", b"RDY 0\n"]
        second.requeue(0)  # was in flight before: not counted again
        assert await heard(peers) == [reqs(2), b""]
        clock.jump(1)
        assert await heard(peers) == [b"", b""]
        clock.jump(1)
        assert await heard(peers) == [b"RDY 1\n", b""]
        await peers[0].send(message(2, attempts=2))
        (await anext(consumer)).finish()
        assert await heard(peers) == [fins(2) + b"RDY 5\n", b"RDY 5\n"]
    told = [record for record in caplog.records if record.name == "trio_nsq.client"]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "pausing for 2.0 s (backoff level 1)" in caplog.text


@bounded
async def test_each_failure_lengthens_the_pause_and_each_success_shortens_it(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    results = [(True, 1), (True, 2), (True, 4), (False, 2), (False, 1)]
    async with consuming([broker], backoff_multiplier_s=0.5) as (consumer, (peer,)):
        await peer.expect(b"RDY 5\n")
        for number, (fails, pause_s) in enumerate(results):
            await peer.send(message(number))
            received = await anext(consumer)
            if fails:
                received.requeue(0)
            else:
                received.finish()
            await peer.expect(reqs(number) if fails else fins(number), b"RDY 0\n")
            clock.jump(pause_s - 0.5)
            await peer.expect_nothing()
            clock.jump(0.5)
            await peer.expect(b"RDY 1\n")
        await peer.send(message(9))
        (await anext(consumer.batches())).finish()
        await peer.expect(fins(9), b"RDY 5\n")


@bounded
async def test_connection_made_during_a_pause_waits_for_its_end(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with consuming([broker], reconnect_min_s=0.5, reconnect_max_s=0.5) as (consumer, (peer,)):
        await peer.send(message(1))
        (await anext(consumer)).requeue(0)
        await peer.expect(b"RDY 5\n", reqs(1), b"RDY 0\n")
        peer.hang_up()
        while consumer.stats().connections:
            await trio.testing.wait_all_tasks_blocked()
        clock.jump(0.5)
        peer = await broker.accept()
        await peer.greet()
        await peer.expect(b"SUB topic channel\n")
        await peer.send(OK_FRAME)
        await peer.expect_nothing()
        clock.jump(1.5)
        await peer.expect(b"RDY 1\n")


@bounded
async def test_trial_moves_to_another_broker_if_the_first_has_no_message(
    broker: FakeBroker, other_broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with consuming([broker, other_broker], max_in_flight=10) as (consumer, peers):
        await peers[0].send(message(1))
        (await anext(consumer)).requeue(0)
        await heard(peers)
        clock.jump(2)
        assert await heard(peers) == [b"RDY 1\n", b""]
        clock.jump(10)
        assert await heard(peers) == [b"RDY 0\n", b"RDY 1\n"]


@bounded
async def test_requeue_without_backoff_pauses_nothing(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), message(2), message(3))
        (await anext(consumer)).requeue(0, backoff=False)
        (await anext(consumer.batches())).requeue(0, backoff=False)
        await peer.expect(reqs(1, 2, 3))
        await peer.expect_nothing()


@bounded
async def test_backoff_can_be_disabled(broker: FakeBroker) -> None:
    async with opened(broker, max_backoff_duration_s=0) as (consumer, peer):
        await peer.send(message(1))
        (await anext(consumer)).requeue(0)
        await peer.expect(reqs(1))
        await peer.expect_nothing()


@bounded
async def test_end_of_a_backoff_does_not_end_a_pause_by_the_application(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with consuming([broker]) as (consumer, (peer,)):
        await peer.send(message(1))
        (await anext(consumer)).requeue(0)
        await peer.expect(b"RDY 5\n", reqs(1), b"RDY 0\n")
        consumer.pause()
        clock.jump(2)
        await peer.expect_nothing()
        consumer.unpause()
        await peer.expect(b"RDY 1\n")


# ------------------------------------------------------------------------------------------------ requeue delays


@bounded
async def test_requeue_delay_grows_with_the_attempts(broker: FakeBroker) -> None:
    async with opened(broker, max_backoff_duration_s=0) as (consumer, peer):
        await peer.send(message(1), message(2, attempts=3), message(3, attempts=11), message(4))
        for _ in range(3):
            (await anext(consumer)).requeue()
        await peer.expect(reqs(1, delay_ms=90_000), reqs(2, delay_ms=270_000), reqs(3, delay_ms=900_000))
        (await anext(consumer)).requeue(delay_s=0.007)
        await peer.expect(reqs(4, delay_ms=7))


@bounded
async def test_each_message_of_a_batch_has_its_own_delay(broker: FakeBroker) -> None:
    delays: Any = {"default_requeue_delay_s": 1, "max_requeue_delay_s": 2.5}
    async with opened(broker, max_backoff_duration_s=0, **delays) as (consumer, peer):
        await peer.send(message(1), message(2, attempts=2), message(3, attempts=3), message(4, attempts=4))
        batch = await anext(consumer.batches())
        next(iter(batch)).finish()
        batch.requeue()
        await peer.expect(fins(1), reqs(2, delay_ms=2000), reqs(3, delay_ms=2500), reqs(4, delay_ms=2500))


# ------------------------------------------------------------------------------------------------ options


def test_options_can_be_set_without_a_clock() -> None:
    consumer = Consumer("topic", "channel")
    consumer.max_in_flight = 7
    consumer.pause()
    assert (consumer.max_in_flight, consumer.paused, consumer.is_starved) == (7, True, False)


@bounded
async def test_options_set_before_the_start_are_used(broker: FakeBroker) -> None:
    consumer = consumer_of(broker, close_timeout_s=0)
    consumer.max_in_flight = 7
    consumer.pause()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        peer = await accept_up_to_sub(broker)
        await peer.send(OK_FRAME)
        await peer.expect_nothing()
        consumer.unpause()
        await peer.expect(b"RDY 7\n")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"backoff_strategy": "none"},
            "backoff_strategy is 'none'; it must be one of exponential, full_jitter",
        ),
        ({"max_backoff_duration_s": -1}, "max_backoff_duration_s is -1; it must be within 0..3600"),
        ({"backoff_multiplier_s": float("nan")}, "backoff_multiplier_s"),
        ({"backoff_after": 0}, "backoff_after is 0; it must be at least 1"),
        ({"max_requeue_delay_s": 3600.1}, "max_requeue_delay_s is 3600.1"),
        ({"default_requeue_delay_s": -1}, "default_requeue_delay_s is -1"),
        ({"low_rdy_idle_timeout_s": 0}, "low_rdy_idle_timeout_s is 0; it must be more than 0"),
        ({"low_rdy_timeout_s": -1}, "low_rdy_timeout_s is -1"),
        ({"rdy_redistribute_interval_s": 0}, "rdy_redistribute_interval_s is 0"),
        ({"connect_timeout_s": -1}, "connect_timeout_s is -1; it must be at least 0"),
        ({"lookupd_poll_interval_s": 0}, "lookupd_poll_interval_s is 0"),
        ({"lookupd_poll_jitter": 1.1}, "lookupd_poll_jitter is 1.1; it must be within 0..1"),
        ({"lookupd_poll_timeout_s": 0}, "lookupd_poll_timeout_s is 0"),
        ({"close_timeout_s": -1}, "close_timeout_s is -1; it must be at least 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Consumer("topic", "channel", **options)


@pytest.mark.parametrize("wrong", ["5", b"5", [], object()])
async def test_number_of_the_wrong_type_is_named(wrong: Any) -> None:
    for option in ("max_in_flight", "connect_timeout_s", "heartbeat_interval_s", "backoff_after"):
        with pytest.raises(TypeError, match=f"^{option} is .*; it must be"):
            Consumer("topic", "channel", **{option: wrong})
    consumer = Consumer("topic", "channel", max_in_flight=5)
    not_whole: Any
    for not_whole in (wrong, 2.5, None):
        with pytest.raises(TypeError, match=r"^max_in_flight is .*; it must be an integer"):
            consumer.max_in_flight = not_whole
        with pytest.raises(TypeError, match=r"^concurrency is .*; it must be an integer"):
            await consumer.run(_handle, concurrency=not_whole)
        with pytest.raises(TypeError, match=r"^max_attempts is .*; it must be an integer"):
            await consumer.run(_handle, max_attempts=not_whole)
    with pytest.raises(TypeError, match=r"^max_messages is .*; it must be an integer"):
        consumer.batches(wrong)
    with pytest.raises(TypeError, match=r"^max_wait_s is .*; it must be a number"):
        consumer.batches(max_wait_s=wrong)
    with pytest.raises(ValueError, match="max_in_flight is -1"):
        consumer.max_in_flight = -1
    assert consumer.max_in_flight == 5
    await consumer.aclose()


async def _handle(message: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize("wrong", [b"topic", None, 5])
def test_name_of_the_wrong_type_is_named(wrong: Any) -> None:
    with pytest.raises(TypeError, match="the name of a topic must be a string, not"):
        Consumer(wrong, "channel")
    with pytest.raises(TypeError, match="the name of a channel must be a string, not"):
        Consumer("topic", wrong)


@bounded
async def test_message_is_not_answered_with_a_wrong_delay(broker: FakeBroker) -> None:
    async with opened(broker, returned=(1,)) as (consumer, peer):
        await peer.send(message(1))
        received = await anext(consumer)
        with pytest.raises(TypeError, match="delay_ms is '5'; it must be an integer"):
            received.requeue("5")  # type: ignore[arg-type]
        assert not received.answered


@bounded
async def test_delays_in_milliseconds_are_deprecated(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), message(2), message(3), message(4))
        first, second, third, fourth = [await anext(consumer) for _ in range(4)]
        with pytest.warns(
            DeprecationWarning, match=r"delay_ms is deprecated: use delay_s=1\.5, in seconds"
        ) as warned:
            first.requeue(1500, backoff=False)
        assert warned[0].filename == __file__
        with pytest.raises(TypeError, match="both given"):
            second.requeue(1, delay_s=1)
        second.requeue(delay_s=0.0001, backoff=False)
        third.requeue(0, backoff=False)
        fourth.requeue(delay_s=0, backoff=False)
        await peer.expect(reqs(1, delay_ms=1500), reqs(2, delay_ms=1), reqs(3, 4))
