"""Tests for a consumer whose connections are lost, at every step."""

import logging
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from client.support.consumers import accept_and_subscribe, eager_consumer_of
from client.support.fake_broker import (
    FakeBroker,
    Peer,
    after_identify,
    at_once,
    bounded,
    error,
    fins,
    message,
    message_id,
    within_the_reply,
)
from trio_nsq.client import Consumer
from trio_nsq.protocol.frames import OK_FRAME, encode_response

Step = Callable[[Peer], Awaitable[None]]


async def after_the_reply(peer: Peer) -> None:
    await peer.greet()


async def after_sub(peer: Peer) -> None:
    await peer.greet()
    await peer.expect(b"SUB topic channel\n")


async def within_ok(peer: Peer) -> None:
    await after_sub(peer)
    await peer.send(OK_FRAME[:5])


async def after_ok(peer: Peer) -> None:
    await after_sub(peer)
    await peer.send(OK_FRAME)


async def after_rdy(peer: Peer) -> None:
    await peer.subscribe(ready=5)


async def within_a_message(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(message(7)[:-1])


async def after_a_message(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(message(7))


async def after_an_error(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(error("E_INVALID cannot RDY in current state"))


async def after_nonsense(peer: Peer) -> None:
    await peer.subscribe(ready=5)
    await peer.send(b"\xff" * 100)


STEPS = [
    at_once,
    after_identify,
    within_the_reply,
    after_the_reply,
    after_sub,
    within_ok,
    after_ok,
    after_rdy,
    within_a_message,
    after_a_message,
    after_an_error,
    after_nonsense,
]


@pytest.mark.parametrize("cut", [Peer.hang_up, Peer.reset])
@pytest.mark.parametrize("step", STEPS)
@bounded
async def test_connection_lost_at_any_step_is_reconnected(
    broker: FakeBroker, step: Step, cut: Callable[[Peer], None]
) -> None:
    async with trio.open_nursery() as nursery:
        first: list[Peer] = []

        async def accept() -> None:
            first.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with eager_consumer_of(broker) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            cut(first[0])
            peer = await broker.accept()
            await step(peer)
            cut(peer)
            peer = await accept_and_subscribe(broker)
            await peer.send(message(1))
            async for received in consumer:
                received.finish()
                if received.id == message_id(1):
                    break
            await peer.expect(fins(1))
            assert consumer.stats().connections == 1


@bounded
async def test_unexpected_response_ends_the_connection(broker: FakeBroker) -> None:
    """It may be a message frame with a flipped bit in its type, which would otherwise be lost until its
    timeout.
    """
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with eager_consumer_of(broker):
            await trio.testing.wait_all_tasks_blocked()
            await peers[0].send(encode_response(message(1)[8:]))
            await peers[0].expect_end()
            await accept_and_subscribe(broker)


@bounded
async def test_answers_to_a_lost_connection_are_dropped(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_two_and_hang_up, broker)
        async with eager_consumer_of(broker) as consumer:
            batch = await anext(consumer.batches())
            peer = await accept_and_subscribe(broker)
            first, second = batch
            first.touch()
            first.finish()
            second.requeue()
            assert consumer.stats().finished == consumer.stats().requeued == 0
            assert (first.connected, batch.connected) == (False, False)
            await peer.expect_nothing()


async def send_two_and_hang_up(broker: FakeBroker) -> None:
    peer = await accept_and_subscribe(broker)
    await peer.send(message(1), message(2))
    await trio.testing.wait_all_tasks_blocked()
    peer.hang_up()


@bounded
async def test_messages_of_a_lost_connection_are_left_to_their_redelivery(broker: FakeBroker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_two_and_hang_up, broker)
        async with eager_consumer_of(broker) as consumer:
            peer = await accept_and_subscribe(broker)
            await peer.send(message(2, attempts=2))
            received = await anext(consumer)
            assert (received.id, received.attempts) == (message_id(2), 2)
            assert consumer.stats().received == 3


@bounded
async def test_loop_waits_while_no_broker_is_reachable(broker: FakeBroker) -> None:
    got: list[bytes] = []

    async def loop(consumer: Consumer) -> None:
        async for received in consumer:
            got.append(received.body)

    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with eager_consumer_of(broker) as consumer:
            nursery.start_soon(loop, consumer)
            await trio.testing.wait_all_tasks_blocked()
            broker.stop()
            peers[0].hang_up()
            while consumer.stats().connections:
                await trio.testing.wait_all_tasks_blocked()
            await broker.start()
            peer = await accept_and_subscribe(broker)
            await peer.send(message(1))
            await trio.testing.wait_all_tasks_blocked()
            assert got == [b"body 1"]


@bounded
async def test_reason_of_a_loss_is_logged(broker: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_error_and_hang_up, broker)
        async with eager_consumer_of(broker):
            await accept_and_subscribe(broker)
    (record,) = [record for record in caplog.records if record.name == "trio_nsq.client"]
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"{broker.address} answered E_INVALID so it goes; reconnecting in")


async def send_error_and_hang_up(broker: FakeBroker) -> None:
    peer = await accept_and_subscribe(broker)
    await peer.send(error("E_INVALID so it goes"))
    peer.hang_up()


@bounded
async def test_silent_broker_is_dropped_after_two_heartbeat_intervals(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with eager_consumer_of(broker, heartbeat_interval_s=4) as consumer:
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(7.5)
            await trio.testing.wait_all_tasks_blocked()
            assert consumer.stats().connections == 1
            clock.jump(0.5)
            await peers[0].expect_end()
            await accept_and_subscribe(broker)
    assert "no heartbeat for 8 s" in caplog.text


@bounded
async def test_reconnection_delays_grow(
    broker: FakeBroker, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        peers: list[Peer] = []

        async def accept() -> None:
            peers.append(await accept_and_subscribe(broker))

        nursery.start_soon(accept)
        async with eager_consumer_of(broker, reconnect_min_s=1, reconnect_max_s=2, random=lambda: 0.0):
            for lifetime_s, delay_s in ((0, 1), (1, 2), (0, 2), (2, 1)):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(lifetime_s)
                peers.pop().hang_up()
                await trio.testing.wait_all_tasks_blocked()
                assert f"reconnecting in {delay_s}.0 s" in caplog.records[-1].message
                clock.jump(delay_s)
                await accept()
