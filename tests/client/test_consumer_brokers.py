"""Tests for a consumer with several real brokers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from broker.api import running_api
from broker.support import bodies, connected, running_broker
from client.support.fake_broker import bounded
from client.support.lookupds import until
from trio_nsq.client import Consumer, Message

COUNT = 40


@asynccontextmanager
async def brokers(tmp_path: Path, count: int) -> AsyncIterator[list[str]]:
    """Brokers whose `topic` has `COUNT` messages each, with the broker's name in the body; yields the
    addresses.
    """
    async with AsyncExitStack() as stack:
        addresses = []
        for number in range(count):
            bound = await stack.enter_async_context(running_broker(tmp_path / f"{number}", sync="interval"))
            async with connected(bound.tcp_address) as client:
                await client.publish("topic", *(b"%d/%d" % (number, place) for place in range(COUNT)))
            addresses.append(bound.tcp_address)
        yield addresses


def all_bodies(count: int) -> set[bytes]:
    return {b"%d/%d" % (number, place) for number in range(count) for place in range(COUNT)}


@bounded
async def test_one_message_in_flight_from_four_brokers(tmp_path: Path) -> None:
    bodies: set[bytes] = set()

    async def handler(message: Message) -> None:
        bodies.add(message.body)

    async with (
        brokers(tmp_path, 4) as addresses,
        trio.open_nursery() as nursery,
        Consumer(
            "topic",
            "channel",
            nsqd_tcp_addresses=addresses,
            max_in_flight=1,
            low_rdy_idle_timeout_s=0.02,
            low_rdy_timeout_s=0.05,
            rdy_redistribute_interval_s=0.01,
        ) as consumer,
    ):
        nursery.start_soon(consumer.run, handler)
        await until(lambda: bodies == all_bodies(4))
        assert consumer.stats().connections == 4
        nursery.cancel_scope.cancel()


@bounded
async def test_one_batch_from_three_brokers(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path, 3) as addresses,
        Consumer("topic", "channel", nsqd_tcp_addresses=addresses, max_in_flight=9 * COUNT) as consumer,
    ):
        batch = await anext(consumer.batches(max_messages=3 * COUNT, max_wait_s=10))
        assert len(batch) == 3 * COUNT
        assert set(batch.bodies) == all_bodies(3)
        assert sorted(batch.nsqd_address.split(", ")) == sorted(addresses)
        batch.finish()
        assert consumer.stats().finished == 3 * COUNT


@bounded
async def test_failed_message_of_two_brokers_is_retried_until_it_succeeds(tmp_path: Path) -> None:
    attempts: dict[bytes, int] = {}
    done: set[bytes] = set()

    async def handler(message: Message) -> None:
        attempts[message.body] = attempts.get(message.body, 0) + 1
        if message.body in (b"0/3", b"0/4", b"1/7") and message.attempts < 3:
            raise ValueError(message.attempts)
        done.add(message.body)

    async with (
        brokers(tmp_path, 2) as addresses,
        trio.open_nursery() as nursery,
        Consumer(
            "topic",
            "channel",
            nsqd_tcp_addresses=addresses,
            max_in_flight=20,
            backoff_multiplier_s=0.01,
            default_requeue_delay_s=0.01,
            low_rdy_idle_timeout_s=0.05,
            rdy_redistribute_interval_s=0.01,
        ) as consumer,
    ):

        async def run() -> None:
            await consumer.run(handler, concurrency=4)

        nursery.start_soon(run)
        await until(lambda: done == all_bodies(2))
        nursery.cancel_scope.cancel()
    assert {body: count for body, count in attempts.items() if count != 1} == {
        b"0/3": 3,
        b"0/4": 3,
        b"1/7": 3,
    }


@bounded
async def test_dead_letters_of_a_draining_broker_go_to_another(tmp_path: Path) -> None:
    async def handler(message: Message) -> None:
        if message.body == b"bad":
            raise ValueError

    async with (
        running_api(tmp_path / "draining") as draining,
        running_broker(tmp_path / "other") as other,
        connected(other.tcp_address) as letters,
        trio.open_nursery() as nursery,
    ):
        await draining.tcp.publish("topic", b"bad", b"good")
        await letters.subscribe("dead", "letters", 1)
        assert (await draining.send("PUT", "/config/draining", body=b"true")).status_code == 200
        async with Consumer(
            "topic",
            "channel",
            nsqd_tcp_addresses=["%s:%d" % draining.tcp.stream.socket.getpeername()[:2], other.tcp_address],
            max_in_flight=2,
        ) as consumer:
            await until(lambda: consumer.stats().connections == 2)
            nursery.start_soon(partial(consumer.run, handler, max_attempts=1, dead_letter_topic="dead"))
            assert await bodies(letters, 1) == [b"bad"]
            await until(lambda: consumer.stats().finished == 2)
