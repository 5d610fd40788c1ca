"""Tests for a consumer with working connections: commands, answers and iteration."""

import logging
import math
from collections.abc import AsyncIterator
from typing import Any

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
from client.support.fake_broker import FakeBroker, bounded, error, fins, message, message_id, reqs
from trio_nsq.client import AlreadyAnswered, Consumer, ConsumerStats
from trio_nsq.client.consuming.consumer import TIME_SLICE_S
from trio_nsq.protocol.frames import HEARTBEAT_FRAME, OK_FRAME

# ------------------------------------------------------------------------------------------------ the opening


@bounded
async def test_opening_sequence(broker: FakeBroker) -> None:
    async def play() -> None:
        peer = await broker.accept()
        fields = await peer.expect_identify()
        assert fields["client_id"] == "me"
        assert fields["feature_negotiation"] is True
        await peer.expect_nothing()
        await peer.send(HEARTBEAT_FRAME)  # may arrive at any time
        await peer.expect(b"NOP\n")
        await peer.send(b'\0\0\0\x1a\0\0\0\0{"max_rdy_count":2500}')
        await peer.expect(b"SUB topic channel\n")
        await peer.expect_nothing()
        await peer.send(HEARTBEAT_FRAME)
        await peer.expect(b"NOP\n")
        await peer.send(OK_FRAME)
        await peer.expect(b"RDY 5\n")
        await see_off(peer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        async with consumer_of(broker, client_id="me") as consumer:
            assert consumer.stats() == ConsumerStats(0, 0, 0, connections=1)
    assert consumer.stats() == ConsumerStats(0, 0, 0, connections=0)


@bounded
async def test_broker_without_feature_negotiation(broker: FakeBroker) -> None:
    async def play() -> None:
        peer = await broker.accept()
        await peer.expect_identify()
        await peer.send(OK_FRAME)
        await peer.expect(b"SUB topic channel\n")
        await peer.send(OK_FRAME)
        await peer.expect(b"RDY 2500\n")
        await see_off(peer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        async with consumer_of(broker, max_in_flight=10_000):
            pass


# ------------------------------------------------------------------------------------------------ answers


@bounded
async def test_messages_and_their_answers(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1, b"one", attempts=3, timestamp_ns=17), message(2), message(3))
        first, second, third = [await anext(consumer) for _ in range(3)]
        assert (first.id, first.body, first.attempts, first.timestamp_ns) == (message_id(1), b"one", 3, 17)
        assert first.nsqd_address == broker.address
        third.touch()
        third.finish()
        first.requeue(0, backoff=False)
        second.requeue(delay_s=1.5, backoff=False)
        await peer.expect(b"TOUCH %s\n" % message_id(3), fins(3), reqs(1), reqs(2, delay_ms=1500))
        assert consumer.stats() == ConsumerStats(received=3, finished=1, requeued=2, connections=1)


@bounded
async def test_only_the_first_answer_counts(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1))
        received = await anext(consumer)
        assert not received.answered
        received.finish()
        assert received.answered
        with pytest.raises(AlreadyAnswered, match=message_id(1).decode()):
            received.finish()
        with pytest.raises(AlreadyAnswered):
            received.requeue()
        received.touch()  # ignored
        await peer.expect(fins(1))
        await peer.expect_nothing()


@bounded
async def test_invalid_delay_is_refused_and_the_message_stays_open(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), message(2))
        batch = await anext(consumer.batches())
        with pytest.raises(ValueError, match="delay_s is -1"):
            next(iter(batch)).requeue(delay_s=-1)
        with pytest.raises(ValueError, match="delay_s is -1"):
            batch.requeue(delay_s=-1)
        with pytest.raises(ValueError, match="delay_ms is -1"):
            batch.requeue(-1)
        for invalid in (math.nan, math.inf, True, "1", 2**63):
            with pytest.raises((TypeError, ValueError), match="delay_s"):
                batch.requeue(delay_s=invalid)  # type: ignore[arg-type]  # what it refuses
        for wrong in (math.nan, math.inf, 1.5, True, "1", 2**63):
            with pytest.raises((TypeError, ValueError), match="delay_ms"):
                next(iter(batch)).requeue(wrong)  # type: ignore[arg-type]  # what it refuses
        batch.finish()
        await peer.expect(fins(1, 2))


@bounded
async def test_batches_are_finished_and_requeued_as_a_whole(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1, attempts=2, timestamp_ns=9), message(2))
        batch = await anext(consumer.batches())
        assert (batch.ids, batch.bodies) == ([message_id(1), message_id(2)], [b"body 1", b"body 2"])
        assert (batch.attempts, batch.timestamps_ns) == ([2, 1], [9, 0])
        assert (len(batch), batch.nsqd_address) == (2, broker.address)
        batch.finish()
        await peer.expect(fins(1, 2))
        for answer in (batch.finish, batch.requeue, next(iter(batch)).finish):
            with pytest.raises(AlreadyAnswered):
                answer()
        await peer.send(message(3), message(4))
        (await anext(consumer.batches())).requeue(delay_s=0.02, backoff=False)
        await peer.expect(reqs(3, 4, delay_ms=20))
        assert consumer.stats() == ConsumerStats(received=4, finished=2, requeued=2, connections=1)


@bounded
async def test_answer_to_a_batch_skips_messages_already_answered(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), message(2), message(3))
        batch = await anext(consumer.batches())
        _, second, _ = batch
        second.requeue(0, backoff=False)
        batch.finish()
        await peer.expect(reqs(2), fins(1, 3))
        await peer.send(message(4), message(5))
        batch = await anext(consumer.batches())
        for one in batch:
            one.finish()
        with pytest.raises(AlreadyAnswered):
            batch.finish()
        await peer.expect(fins(4, 5))


@bounded
async def test_large_batch_is_split_to_the_requested_size(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(*map(message, range(5)))
        batches = consumer.batches(max_messages=2)
        pieces = [await anext(batches) for _ in range(3)]
        assert [len(piece) for piece in pieces] == [2, 2, 1]
        for piece in pieces:
            piece.finish()
        await peer.expect(fins(0, 1, 2, 3, 4))


@bounded
async def test_answers_of_one_tick_are_sent_in_one_write(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), message(2), message(3))
        for _ in range(3):
            (await anext(consumer)).finish()
        await trio.testing.wait_all_tasks_blocked()
        assert await peer.receive() == fins(1, 2, 3)


@bounded
async def test_refused_answer_is_logged_and_ignored(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1))
        (await anext(consumer)).finish()
        await peer.expect(fins(1))
        await peer.send(error("E_FIN_FAILED FIN 0 failed ID not in flight"), message(2))
        (await anext(consumer)).finish()
        await peer.expect(fins(2))
    records = [record for record in caplog.records if record.name == "trio_nsq.client"]
    assert [record.levelno for record in records] == [logging.WARNING]
    assert "ID not in flight" in records[0].message


@bounded
async def test_heartbeats_are_answered_between_messages(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(message(1), HEARTBEAT_FRAME, message(2))
        await peer.expect(b"NOP\n")
        for _ in range(2):
            (await anext(consumer)).finish()
        await peer.expect(fins(1, 2))


# ------------------------------------------------------------------------------------------------ iterating


@bounded
async def test_tasks_share_the_messages_of_one_batch(broker: FakeBroker) -> None:
    taken: list[bytes] = []

    async def work(consumer: Consumer) -> None:
        async for one in consumer:
            taken.append(one.body)
            one.finish()
            await trio.sleep_forever()

    async with opened(broker) as (consumer, peer), trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(work, consumer)
        await peer.send(message(1), message(2), message(3))
        await peer.expect(fins(1, 2, 3))
        assert sorted(taken) == [b"body 1", b"body 2", b"body 3"]
        nursery.cancel_scope.cancel()


@bounded
async def test_busy_loop_lets_other_tasks_run(broker: FakeBroker, clock: trio.testing.MockClock) -> None:
    async with opened(broker) as (consumer, peer):
        await peer.send(*map(message, range(5)))
        for _ in range(5):
            (await anext(consumer)).finish()
            clock.jump(TIME_SLICE_S)
        # Each of the last four waits has let the writer run, in the same tick or in the next.
        written = peer.receive_nowait()
        assert written.startswith(fins(0, 1, 2))
        await peer.expect(fins(0, 1, 2, 3, 4)[len(written) :])


@bounded
async def test_closing_ends_waiting_and_busy_loops(broker: FakeBroker) -> None:
    ended = []

    async def loop(consumer: Consumer, what: str) -> None:
        items: AsyncIterator[object] = consumer if what == "messages" else consumer.batches()
        async for _ in items:
            pass
        ended.append(what)

    async with trio.open_nursery() as nursery, consumer_entered(nursery, broker) as (consumer, peer):
        nursery.start_soon(loop, consumer, "messages")
        nursery.start_soon(loop, consumer, "batches")
        await trio.testing.wait_all_tasks_blocked()
        await peer.send(message(1), message(2))
        nursery.start_soon(see_off, peer, 1, 2)
        await consumer.aclose()
        await consumer.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)
        assert consumer.stats().connections == 0
    assert sorted(ended) == ["batches", "messages"]


@bounded
async def test_receiving_outside_the_block_is_an_error() -> None:
    consumer = Consumer("topic", "channel")
    with pytest.raises(RuntimeError, match="async with"):
        await anext(consumer)
    with pytest.raises(RuntimeError, match="async with"):
        await anext(consumer.batches())
    with pytest.raises(ValueError, match="max_messages"):
        consumer.batches(0)
    await consumer.aclose()


@bounded
async def test_exception_of_the_body_is_unchanged(broker: FakeBroker) -> None:
    async def fail(nursery: trio.Nursery) -> None:
        async with consumer_entered(nursery, broker) as (_, peer):
            nursery.start_soon(see_off, peer)
            raise KeyError

    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError):
            await fail(nursery)


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topic": "no spaces"}, "'no spaces' is not a valid topic name"),
        ({"channel": ""}, "'' is not a valid channel name"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"nsqd_tcp_addresses": []}, "at least one"),
        ({"nsqd_tcp_addresses": ["localhost"]}, "no port"),
        ({"heartbeat_interval_s": -1}, "without heartbeats"),
        ({"sample_rate": 100}, "sample_rate"),
        ({"reconnect_min_s": 2, "reconnect_max_s": 1}, "more than reconnect_max_s"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Consumer(**{"topic": "topic", "channel": "channel"} | arguments)


@bounded
async def test_duplicate_addresses_are_merged(broker: FakeBroker) -> None:
    consumer = consumer_of(broker, broker, close_timeout_s=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        peer = await accept_up_to_sub(broker)
        await peer.send(OK_FRAME)
        await peer.expect(b"RDY 5\n")
        nursery.cancel_scope.cancel()
