"""Tests for batches that combine messages over some time: `Consumer.batches(max_wait_s=...)`."""

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from client.support.consumers import consumer_of, hold_open, opened
from client.support.fake_broker import FakeBroker, bounded, fins, message, message_id, reqs
from trio_nsq.client import AlreadyAnswered, Consumer, MessageBatch
from trio_nsq.protocol.frames import OK_FRAME


class Taking:
    """Waits for one batch.

    Attributes:
        batch: The batch, when it has arrived.
    """

    def __init__(self, nursery: trio.Nursery, batches: AsyncIterator[MessageBatch]) -> None:
        self.batch: MessageBatch | None = None
        self.scope = trio.CancelScope()
        nursery.start_soon(self._take, batches)

    async def _take(self, batches: AsyncIterator[MessageBatch]) -> None:
        with self.scope:
            self.batch = await anext(batches)

    @property
    def bodies(self) -> list[bytes] | None:
        return None if self.batch is None else self.batch.bodies


@bounded
async def test_messages_within_the_time_are_one_batch(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened(broker, max_in_flight=9) as (consumer, peer), trio.open_nursery() as nursery:
        taking = Taking(nursery, consumer.batches(max_wait_s=5))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(5)  # starts at the first message
        await peer.send(message(1))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(3)
        await peer.send(message(2, b"two", attempts=2, timestamp_ns=9), message(3))
        await trio.testing.wait_all_tasks_blocked()
        assert taking.batch is None
        clock.jump(2)
        await trio.testing.wait_all_tasks_blocked()
        batch = taking.batch
        assert batch is not None
        assert batch.bodies == [b"body 1", b"two", b"body 3"]
        assert batch.ids == [message_id(1), message_id(2), message_id(3)]
        assert (batch.attempts, batch.timestamps_ns) == ([1, 2, 1], [0, 9, 0])
        assert (len(batch), batch.nsqd_address) == (3, broker.address)
        batch.finish()
        await peer.expect(fins(1, 2, 3))


@bounded
async def test_full_batch_does_not_wait(broker: FakeBroker) -> None:
    returned = (0, 1, 2, 3, 4, 5)
    async with (
        opened(broker, max_in_flight=9, returned=returned) as (consumer, peer),
        trio.open_nursery() as nursery,
    ):
        batches = consumer.batches(max_messages=3, max_wait_s=1000)
        taking = Taking(nursery, batches)
        for number in range(3):
            assert taking.batch is None
            await peer.send(message(number))
            await trio.testing.wait_all_tasks_blocked()
        assert taking.bodies == [b"body 0", b"body 1", b"body 2"]
        await peer.send(*map(message, range(3, 7)))
        assert (await anext(batches)).bodies == [b"body 3", b"body 4", b"body 5"]
        (await anext(consumer)).finish()
        await peer.expect(fins(6))


@bounded
async def test_batch_with_all_allowed_messages_does_not_wait(broker: FakeBroker) -> None:
    async with (
        opened(broker, max_in_flight=3, returned=(0, 1, 2)) as (consumer, peer),
        trio.open_nursery() as nursery,
    ):
        batches = consumer.batches(max_messages=100, max_wait_s=1000)
        taking = Taking(nursery, batches)
        for number in range(3):
            assert taking.batch is None
            await peer.send(message(number))
            await trio.testing.wait_all_tasks_blocked()
        assert taking.bodies == [b"body 0", b"body 1", b"body 2"]


@bounded
async def test_several_brokers_make_one_batch(broker: FakeBroker, other_broker: FakeBroker) -> None:
    consumer = consumer_of(broker, other_broker, max_in_flight=8, close_timeout_s=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_open, consumer)
        peers = []
        for listening in (broker, other_broker):
            peer = await listening.accept()
            await peer.greet()
            await peer.expect(b"SUB topic channel\n")
            await peer.send(OK_FRAME)
            peers.append(peer)
        one, other = peers
        while consumer.stats().connections < 2:
            await trio.testing.wait_all_tasks_blocked()
        for peer in peers:
            await trio.testing.wait_all_tasks_blocked()
            peer.receive_nowait()
        taking = Taking(nursery, consumer.batches(max_messages=4, max_wait_s=1000))
        for peer, number in ((one, 1), (other, 2), (one, 3), (other, 4)):
            await peer.send(message(number))
            await trio.testing.wait_all_tasks_blocked()
        batch = taking.batch
        assert batch is not None
        assert batch.bodies == [b"body 1", b"body 2", b"body 3", b"body 4"]
        assert batch.nsqd_address == f"{broker.address}, {other_broker.address}"
        assert [each.nsqd_address for each in batch] == 2 * [broker.address, other_broker.address]
        third = list(batch)[2]
        third.requeue(delay_s=0.007, backoff=False)
        assert batch.unanswered_ids() == [message_id(1), message_id(2), message_id(4)]
        batch.touch()
        batch.finish()
        touches = [b"TOUCH %s\n" % message_id(number) for number in (1, 2, 4)]
        await one.expect(reqs(3, delay_ms=7), touches[0], fins(1))
        await other.expect(touches[1], touches[2], fins(2, 4))
        for answer in (batch.finish, batch.requeue, third.finish):
            with pytest.raises(AlreadyAnswered):
                answer()
        nursery.cancel_scope.cancel()


@bounded
async def test_combined_batch_is_requeued_as_a_whole(broker: FakeBroker) -> None:
    async with (
        opened(broker, max_in_flight=2, backoff_after=1) as (consumer, peer),
        trio.open_nursery() as nursery,
    ):
        taking = Taking(nursery, consumer.batches(max_wait_s=1000))
        for number in (1, 2):
            await peer.send(message(number, attempts=number))
            await trio.testing.wait_all_tasks_blocked()
        assert taking.batch is not None
        with pytest.raises(ValueError, match="-1"):
            taking.batch.requeue(delay_s=-1)
        taking.batch.requeue()
        await peer.expect(reqs(1, delay_ms=90_000), b"RDY 0\n", reqs(2, delay_ms=180_000))


@bounded
async def test_cancellation_loses_no_messages(broker: FakeBroker) -> None:
    async with opened(broker) as (consumer, peer), trio.open_nursery() as nursery:
        taking = Taking(nursery, consumer.batches(max_wait_s=1000))
        await peer.send(message(1))
        await trio.testing.wait_all_tasks_blocked()
        taking.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert taking.batch is None
        (await anext(consumer)).finish()
        await peer.expect(fins(1))


@bounded
async def test_closing_ends_the_wait_and_requeues_the_messages(broker: FakeBroker) -> None:
    ended = []

    async def loop(consumer: Consumer) -> None:
        async for _ in consumer.batches(max_wait_s=1000):
            raise AssertionError
        ended.append(True)

    async with trio.open_nursery() as nursery:
        async with opened(broker, returned=(1,)) as (consumer, peer):
            nursery.start_soon(loop, consumer)
            await peer.send(message(1))
            await trio.testing.wait_all_tasks_blocked()
    assert ended == [True]


@bounded
async def test_two_waiting_loops_share_the_messages(
    broker: FakeBroker, clock: trio.testing.MockClock
) -> None:
    async with opened(broker) as (consumer, peer), trio.open_nursery() as nursery:
        batches = consumer.batches(max_wait_s=2)
        first, second = Taking(nursery, batches), Taking(nursery, batches)
        await peer.send(message(1))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(2)
        await trio.testing.wait_all_tasks_blocked()
        assert [first.bodies, second.bodies].count([b"body 1"]) == 1
        assert [first.bodies, second.bodies].count(None) == 1
        await peer.send(message(2))
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(2)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted([first.bodies or [], second.bodies or []]) == [[b"body 1"], [b"body 2"]]
        for taking in (first, second):
            assert taking.batch is not None
            taking.batch.finish()
        assert sorted([await peer.receive_line(), await peer.receive_line()]) == [fins(1), fins(2)]


def test_negative_time_is_refused() -> None:
    with pytest.raises(ValueError, match="max_wait_s is -1"):
        Consumer("topic", "channel").batches(max_wait_s=-1)
