"""Tests for closing a consumer, and for sharing `max_in_flight` between connections."""

import logging

import pytest
import trio
import trio.testing

from client.support.consumers import (
    accept_up_to_sub,
    consumer_entered,
    consumer_of,
    hold_open,
    opened,
    see_off,
)
from client.support.fake_broker import FakeBroker, Peer, bounded, error, fins, message, reqs
from trio_nsq.client import ConsumerStats, MessageBatch
from trio_nsq.protocol.frames import CLOSE_WAIT_FRAME, OK_FRAME

# ------------------------------------------------------------------------------------------------ closing


@bounded
async def test_unanswered_messages_are_requeued(broker: FakeBroker) -> None:
    async with opened(broker, returned=(1, 3, 4)) as (consumer, peer):
        await peer.send(message(1), message(2))
        first, second = [await anext(consumer) for _ in range(2)]
        second.finish()
        await peer.expect(fins(2))
        await peer.send(message(3), message(4))  # not received by the application
        await trio.testing.wait_all_tasks_blocked()
    first.finish()  # too late, without effect
    assert first.answered
    assert consumer.stats() == ConsumerStats(received=4, finished=1, requeued=3, connections=0)


@bounded
async def test_drain_sends_cls_once_and_waits_for_answers(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery, consumer_entered(nursery, broker) as (consumer, peer):
        await peer.send(message(1), message(2))
        first, second = [await anext(consumer) for _ in range(2)]
        nursery.start_soon(consumer.drain)
        await peer.expect(b"CLS\n")
        nursery.start_soon(consumer.drain, None)
        await peer.send(message(3), CLOSE_WAIT_FRAME)  # nsqd may still send one
        first.finish()
        await peer.expect(fins(1))
        await peer.expect_nothing()
        second.requeue(delay_s=0)
        (await anext(consumer)).finish()
        await peer.expect(reqs(2), fins(3))
        await peer.expect_end()
        peer.hang_up()


@bounded
async def test_messages_that_arrive_during_the_close_are_requeued(broker: FakeBroker) -> None:
    async def play(peer: Peer) -> None:
        await peer.expect(b"CLS\n")
        await peer.send(message(1), CLOSE_WAIT_FRAME)
        await peer.expect(reqs(1))
        await peer.send(message(2))  # nsqd may send this after CLOSE_WAIT
        await peer.expect(reqs(2))
        await peer.expect_end()
        peer.hang_up()

    async with trio.open_nursery() as nursery, consumer_entered(nursery, broker) as (_, peer):
        nursery.start_soon(play, peer)


@bounded
async def test_close_waits_until_the_broker_has_read_everything(broker: FakeBroker) -> None:
    left = trio.Event()

    async def play(peer: Peer) -> None:
        await peer.expect(b"CLS\n")
        await peer.send(CLOSE_WAIT_FRAME)
        await peer.expect_end()
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        peer.hang_up()

    async with trio.open_nursery() as nursery:
        async with consumer_entered(nursery, broker) as (_, peer):
            nursery.start_soon(play, peer)
        left.set()


@bounded
async def test_messages_are_requeued_even_if_the_broker_does_not_answer_cls(
    broker: FakeBroker,
) -> None:
    async with trio.open_nursery() as nursery:
        async with consumer_entered(nursery, broker, close_timeout_s=0.2) as (consumer, peer):
            await peer.send(message(1))
            await anext(consumer)
        await peer.expect(b"CLS\n", reqs(1))
        await peer.expect_end()


@bounded
async def test_cancelled_consumer_closes_cleanly(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with consumer_entered(nursery, broker) as (consumer, peer):
                nursery.start_soon(see_off, peer, 1)
                await peer.send(message(1))
                await anext(consumer)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


@bounded
async def test_without_a_close_timeout_it_disconnects_at_once(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        async with consumer_entered(nursery, broker, close_timeout_s=0) as (consumer, peer):
            await peer.send(message(1))
            await anext(consumer)
        await peer.expect_end()


@bounded
async def test_connection_lost_during_the_close(broker: FakeBroker) -> None:
    async def play(peer: Peer) -> None:
        await peer.expect(b"CLS\n")
        peer.reset()

    async with trio.open_nursery() as nursery, consumer_entered(nursery, broker) as (_, peer):
        nursery.start_soon(play, peer)


@bounded
async def test_answers_during_the_close_are_too_late(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(peer: Peer, batch: MessageBatch) -> None:
        await peer.expect(b"CLS\n")
        await peer.send(CLOSE_WAIT_FRAME)
        await peer.expect(reqs(1, 2))
        first, second = batch
        first.touch()
        first.finish()
        second.requeue()
        await peer.send(error("E_REQ_FAILED REQ 0 failed ID not in flight"))  # it had timed out
        await peer.expect_end()
        peer.hang_up()

    caplog.set_level(logging.DEBUG, "trio_nsq.client")
    async with trio.open_nursery() as nursery, consumer_entered(nursery, broker) as (consumer, peer):
        await peer.send(message(1), message(2))
        nursery.start_soon(play, peer, await anext(consumer.batches()))
    assert consumer.stats() == ConsumerStats(received=2, finished=0, requeued=2, connections=0)
    assert [record.levelno for record in caplog.records if record.name == "trio_nsq.client"] == [
        logging.DEBUG
    ]


@bounded
async def test_nothing_is_connected_after_aclose_inside_the_block(broker: FakeBroker) -> None:
    async with (
        trio.open_nursery() as nursery,
        consumer_entered(nursery, broker, close_timeout_s=0) as (consumer, peer),
    ):
        await consumer.aclose()
        assert consumer.stats().connections == 0
        await peer.expect_end()


@bounded
async def test_no_connection_gets_more_while_others_close(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    consumer = consumer_of(broker, other_broker)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        first, second = await accept_up_to_sub(broker), await accept_up_to_sub(other_broker)
        await first.send(OK_FRAME)
        await first.expect(b"RDY 5\n")
        nursery.start_soon(consumer.aclose)
        await second.expect_nothing()
        await second.send(OK_FRAME)  # too late for a share: its messages would not be requeued
        await second.expect_nothing()
        await see_off(first)
        await second.expect_end()
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------------------------ sharing


@bounded
async def test_max_in_flight_is_shared_between_connections(
    broker: FakeBroker, other_broker: FakeBroker
) -> None:
    consumer = consumer_of(broker, other_broker, reconnect_min_s=0.001, close_timeout_s=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        first, second = await accept_up_to_sub(broker), await accept_up_to_sub(other_broker)
        await first.send(OK_FRAME)
        await first.expect(b"RDY 5\n")
        await second.send(OK_FRAME)
        await first.expect(b"RDY 3\n")
        await second.expect(b"RDY 2\n")
        assert consumer.stats().connections == 2
        second.hang_up()
        await first.expect(b"RDY 5\n")
        assert consumer.stats().connections == 1
        second = await accept_up_to_sub(other_broker)
        await second.send(OK_FRAME)
        await first.expect(b"RDY 3\n")
        await second.expect(b"RDY 2\n")
        first.hang_up()  # the older connection gets the remainder
        await second.expect(b"RDY 5\n")
        first = await accept_up_to_sub(broker)
        await first.send(OK_FRAME)
        await second.expect(b"RDY 3\n")
        await first.expect(b"RDY 2\n")
        nursery.cancel_scope.cancel()


@bounded
async def test_share_is_limited_by_the_broker(broker: FakeBroker) -> None:
    consumer = consumer_of(broker, max_in_flight=100, close_timeout_s=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        peer = await accept_up_to_sub(broker, max_rdy_count=7)
        await peer.send(OK_FRAME)
        await peer.expect(b"RDY 7\n")
        nursery.cancel_scope.cancel()
